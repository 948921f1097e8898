"""Programs that tests start: their environment, their output, and waiting for their end."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from tests.conftest import ROOT

T = TypeVar("T")
PYTHON = sys.executable


def environment(**extra: str) -> dict[str, str]:
    """Return the environment for a program that runs this checkout's package with one thread."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **extra}


def dropped(output: str) -> list[str]:
    """Return the reasons for which servers of a run have reported dropped messages. A correct run has none."""
    return re.findall(r"server \d+ dropped a message: ([^;\n]+)", output)


def fit(*arguments: str) -> list[str]:
    """Return the arguments after the interpreter that train the quickstart."""
    return [
        *("-m", "cnnstrategies", "fit", f"--config={ROOT / 'configs/quickstart.yaml'}"),
        *("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false", *arguments),
    ]


def wait_until(condition: Callable[[], T], report: Callable[[], str], seconds: float = 150, pause: float = 0.05) -> T:
    """Wait for a condition and return its first true value; after too long, fail with the text of `report`.

    Between two looks there is a pause of some seconds.
    """
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s:\n{report()}"
        time.sleep(pause)
    return result


class Program:
    """A running program that writes its output to a file."""

    def __init__(self, words: Sequence[str], log: Path, **variables: str) -> None:
        self.log = log
        with open(log, "w") as file:
            self.process = subprocess.Popen(
                words, stdout=file, stderr=subprocess.STDOUT, env=environment(**variables), start_new_session=True
            )

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float = 200) -> int:
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            raise AssertionError(f"no end in {seconds} s:\n{self.output()}") from None
        assert not dropped(self.output()), self.output()
        return code

    def wait_until(self, condition: Callable[[], object]) -> None:
        wait_until(lambda: condition() or self.process.poll() is not None, self.output)
        assert condition(), self.output()


def process_with(**variables: str) -> dict[str, str] | None:
    """Return the environment of a process that has these variables, with its id as ``PID``; None if no process has."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            environ = dict(word.split("=", 1) for word in path.read_text(errors="replace").split("\0") if "=" in word)
            if variables.items() <= environ.items():
                return {**environ, "PID": path.parent.name}
    return None
