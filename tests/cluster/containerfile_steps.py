"""Runs the Containerfile's steps in fresh directories, without a container: what they copy must suffice.

The packages that the project needs are those of the environment that runs this; only the project itself is installed,
from the copied files alone. The step that adds a user is left out: it would add it to this machine.
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]


def steps() -> list[tuple[str, str]]:
    """The instructions and their words."""
    lines = (ROOT / "Containerfile").read_text().replace("\\\n", " ").splitlines()
    return [(kind, words) for kind, _, words in (line.partition(" ") for line in lines if line and line[0] != "#")]


def copy(words: list[str], directory: Path) -> None:
    """COPY: a file keeps its name, of a directory the contents are copied."""
    *sources, target = words
    for source in (ROOT / one for one in sources):
        if source.is_dir():
            shutil.copytree(source, directory / target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, directory / target)


def main() -> None:
    """Run the steps; fail as they do."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        (packages,) = folder.glob("venv/lib/python*/site-packages")
        (packages / "those_of_the_tests.pth").write_text(sysconfig.get_paths()["purelib"])
        path = f"{folder / 'venv/bin'}:{os.environ['PATH']}"
        variables = {**os.environ, "PATH": path, "HOME": name, "PIP_QUIET": "1"}
        variables.pop("PYTHONPATH", None)
        directory = folder
        for kind, words in steps():
            if kind == "WORKDIR":
                directory = folder / words.lstrip("/")
                directory.mkdir(parents=True)
            elif kind == "COPY":
                copy(shlex.split(words), directory)
            elif kind == "RUN" and not words.startswith("useradd"):
                print(f"RUN {words}", flush=True)
                subprocess.run(["/bin/sh", "-c", words], cwd=directory, env=variables, check=True)
            elif kind not in ("FROM", "USER", "RUN"):
                sys.exit(f"the Containerfile has a step that this does not know: {kind}")
        found = "import cnnstrategies; print(cnnstrategies.__file__)"
        done = subprocess.run(["python", "-c", found], cwd=directory, env=variables, check=True, capture_output=True)
        assert Path(done.stdout.decode().strip()).is_relative_to(packages), done.stdout


if __name__ == "__main__":
    main()
