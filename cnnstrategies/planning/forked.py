"""Programs that are forked from a process which has imported their module: imports cost seconds, a fork none."""

import contextlib
import importlib
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


class Forked:
    """One of them; as much of `subprocess.Popen` as a run needs.

    All are forked from Python's fork server, which only imports: nothing has used a device or started a thread there.

    Args:
        module: Has a function `main`, which takes its arguments from `sys.argv`.
        words: These.
        output: The file for what it prints.
        variables: Its environment.

    Attributes:
        pid: Of the process, and of the session that it begins.
    """

    def __init__(self, module: str, words: Sequence[str], output: Path, variables: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([module])
        output.touch()
        self._process = context.Process(target=_run, args=(module, list(words), output, dict(variables)))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        with contextlib.suppress(ProcessLookupError):  # It may have ended already.
            while self.poll() is None and os.getsid(self.pid) != self.pid:
                time.sleep(0.002)

    @property
    def returncode(self) -> int | None:
        """Its exit code, or the signal that has ended it, negative; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """As `returncode`."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Args:
            timeout: Seconds; None for as long as it takes.

        Raises:
            subprocess.TimeoutExpired: It has not ended by then.
        """
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self.returncode


def _run(module: str, words: list[str], output: Path, variables: dict[str, str]) -> None:
    """What the forked process does."""
    os.setsid()
    file = os.open(output, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ.clear()
    os.environ.update(variables)
    program = importlib.import_module(module)
    sys.argv = [str(program.__file__), *words]
    sys.modules["__main__"] = program  # From which Lightning knows how to start other ranks.
    program.main()
