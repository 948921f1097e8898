"""Child processes, whichever way they were started."""

import os
import signal
from multiprocessing.process import BaseProcess
from typing import Protocol


class Handle(Protocol):
    """What the supervision needs of a child process; ``subprocess.Popen`` has it."""

    @property
    def pid(self) -> int:
        """Its number."""

    def poll(self) -> int | None:
        """Its exit code, negative for a signal, or None while it runs."""

    def send_signal(self, sig: int) -> None:
        """Send a signal, if it still runs."""


class Forked:
    """A process of ``multiprocessing`` as a :class:`Handle`."""

    def __init__(self, process: BaseProcess) -> None:
        assert process.pid is not None, "it has been started"
        self.process = process
        self.pid = process.pid

    def poll(self) -> int | None:
        """Its exit code, negative for a signal, or None while it runs."""
        return self.process.exitcode

    def send_signal(self, sig: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, sig)


def ending(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
