"""Programs of a test: their environment, and the processes that they started."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from conftest import ROOT


def environment(**extra: str) -> dict[str, str]:
    """The variables for a program that runs this checkout's package with one thread."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **extra}


def fit(*arguments: str) -> list[str]:
    """The words that train the quickstart for a short while."""
    return [
        *("-m", "cnnstrategies", "fit", f"--config={ROOT / 'configs/quickstart.yaml'}"),
        *("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false", *arguments),
    ]


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
            self.end()
            raise AssertionError(f"no end in {seconds} s:\n{self.output()}") from None

    def wait_until(self, condition: Callable[[], bool], seconds: float = 150) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.1)

    def end(self) -> None:
        for process in (*_below(self.process.pid), self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.process.wait()


def _below(parent: int) -> list[int]:
    try:
        children = [int(word) for word in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    except OSError:  # It has ended.
        return []
    return [*children, *(process for child in children for process in _below(child))]


PYTHON = sys.executable
