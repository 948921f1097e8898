"""Programs of a test: their environment, what they print, and their ends."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from conftest import ROOT

T = TypeVar("T")
PYTHON = sys.executable


def environment(**extra: str) -> dict[str, str]:
    """The variables for a program that runs this checkout's package with one thread."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **extra}


def fit(*arguments: str) -> list[str]:
    """The words that train the quickstart for a short while."""
    return [
        *("-m", "cnnstrategies", "fit", f"--config={ROOT / 'configs/quickstart.yaml'}"),
        *("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false", *arguments),
    ]


def wait_until(condition: Callable[[], T], said: Callable[[], str], seconds: float = 150) -> T:
    """What the condition gives as soon as it is something; fails with what has been said, where that takes too long."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s:\n{said()}"
        time.sleep(0.05)
    return result


class Program:
    """A program under way, with its output in a file."""

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
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            raise AssertionError(f"no end in {seconds} s:\n{self.output()}") from None

    def wait_until(self, condition: Callable[[], object]) -> None:
        wait_until(lambda: condition() or self.process.poll() is not None, self.output)
        assert condition(), self.output()


def process_with(**variables: str) -> dict[str, str] | None:
    """The environment of a process that has these variables, with its number as ``PID``; None where there is none."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            found = dict(word.split("=", 1) for word in path.read_text(errors="replace").split("\0") if "=" in word)
            if variables.items() <= found.items():
                return {**found, "PID": path.parent.name}
    return None
