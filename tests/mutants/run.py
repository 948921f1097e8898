"""Remove a guarantee, and see a test fail: `python tests/mutants/run.py [NAME ...]`, or `make mutants`.

Each mutant of `mutants.yaml` is one small change of one file, and names the tests that must notice it. It is made in a
copy of the tree, and the tests run there, forked from a process that has imported what they have in common. A mutant
lives if they pass; then the guarantee is only claimed.
"""

import argparse
import importlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutants.yaml")
SECONDS = 240.0
AT_A_TIME = 2
TREE = (
    "cli.py",
    "cnnstrategies",
    "configs",
    "docs",
    "tests",
    "pyproject.toml",
    "README.md",
    "Makefile",
    "constraints.txt",
)


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        name: What is taken away.
        file: Where, from the root.
        old: The text that is replaced; it is there once.
        new: What replaces it.
        tests: Arguments of pytest: the tests that must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: list[str]


def read() -> list[Mutant]:
    """The list."""
    return [
        Mutant(name, one["file"], one["old"], one["new"], shlex.split(one["tests"]))
        for name, one in yaml.safe_load(LIST.read_text()).items()
    ]


def mutate(text: str, mutant: Mutant) -> str:
    """The file's text with the change.

    Raises:
        ValueError: What is to be replaced is not there, or more than once.
    """
    if (count := text.count(mutant.old)) != 1:
        raise ValueError(f"{mutant.name}: {mutant.file} has the text to replace {count} times: write it anew")
    return text.replace(mutant.old, mutant.new)


class Job:
    """A run of tests in a copy of the tree.

    Args:
        tests: Arguments of pytest.
        mutant: The change; None for none.
    """

    def __init__(self, tests: list[str], mutant: Mutant | None) -> None:
        self.tests = tests
        self.mutant = mutant
        self._copy = tempfile.TemporaryDirectory(prefix="mutant-")
        copy = Path(self._copy.name)
        for entry in TREE:
            source = ROOT / entry
            if source.is_dir():
                shutil.copytree(source, copy / entry, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, copy / entry)
        if mutant is not None:
            place = copy / mutant.file
            place.write_text(mutate(place.read_text(), mutant))
        self._log = copy / "log"
        self._deadline = time.monotonic() + SECONDS
        self._pid = os.fork()
        if self._pid == 0:
            _become_pytest(copy, tests, self._log)

    def report(self) -> tuple[bool, str] | None:
        """Whether it went as it should, and what to say of it; None while it runs."""
        ended, status = os.waitpid(self._pid, os.WNOHANG)
        hangs = not ended and time.monotonic() > self._deadline
        if not ended and not hangs:
            return None
        if hangs:
            subprocess.run(["pkill", "-KILL", "--session", str(self._pid)], check=False)
            _, status = os.waitpid(self._pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if self.mutant is None:
            good, what = code == 0, "unchanged"
        else:
            good, what = code == 1 or hangs, self.mutant.name  # A test that hangs has noticed.
        ending = "hangs" if hangs else {0: "passes", 1: "fails"}.get(code, f"ends with exit code {code}")
        text = f"{'' if good else 'BAD: '}{what}: {' '.join(self.tests)} {ending}"
        if not good and code != 0:
            text += "\n" + self._log.read_text(errors="replace")[-3000:]
        self._copy.cleanup()
        return good, text


def _become_pytest(copy: Path, tests: list[str], log: Path) -> None:
    os.setsid()
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(copy)
    os.environ |= {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    sys.path.insert(0, str(copy))
    sys.argv = ["pytest"]
    code = 3
    try:
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]))
    finally:
        sys.stdout.flush()
        os._exit(code)


def main() -> None:
    """Run the mutants, two at a time."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="run these alone; all by default")
    names = parser.parse_args().names
    mutants = [mutant for mutant in read() if not names or mutant.name in names]
    if missing := set(names) - {mutant.name for mutant in mutants}:
        parser.error(f"no mutant {', '.join(sorted(missing))}: see {LIST.relative_to(ROOT)}")
    for module in ("torch", "lightning.pytorch", "torchvision", "timm", "jsonargparse"):
        importlib.import_module(module)  # Once, and not in every fork.
    selections = sorted({tuple(mutant.tests) for mutant in mutants})
    waiting: list[tuple[list[str], Mutant | None]] = [(list(tests), None) for tests in selections]
    waiting += [(mutant.tests, mutant) for mutant in mutants]
    running: list[Job] = []
    bad = 0
    while waiting or running:
        while waiting and len(running) < AT_A_TIME:
            running.append(Job(*waiting.pop(0)))
        for job in list(running):
            if report := job.report():
                good, text = report
                running.remove(job)
                bad += not good
                print(text, flush=True)
        time.sleep(0.05)
    print(f"{len(mutants)} mutants, {bad} bad")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
