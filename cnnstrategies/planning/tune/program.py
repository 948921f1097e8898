"""A run that is started as a program, ends with all its processes, and talks with the one that started it."""

import contextlib
import importlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


class Forked:
    """A program that is forked from a process which has imported its module: imports cost seconds, a fork none.

    It has as much of `subprocess.Popen` as a run needs. Python's fork server, from which it is forked, only imports:
    nothing has used a device or started a thread there.

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


# What the last lines of a run that has failed say, and what that means.
CAUSES = (
    (("OutOfMemoryError", "out of memory", "can't allocate memory"), "out of memory"),
    (("BackendCompilerFailed", "InductorError", "CppCompileError", "InvalidCxxCompiler"), "the compiler failed"),
)


class Program:
    """A run under way.

    Args:
        words: Its module of Python and the module's arguments.
        output: The file for what it prints.
        listen_at: The socket to make.
        variables: Its environment.

    Attributes:
        output: That file.
        process: The process that was started; what it starts in turn is in the same session.
        listener: Where its ranks connect.
    """

    def __init__(self, words: Sequence[str], output: Path, listen_at: Path, variables: Mapping[str, str]) -> None:
        self.output = output
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(listen_at))
        self.listener.listen(64)
        self.process = Forked(words[0], words[1:], output, variables)

    def close(self, patience: float = 5.0) -> None:
        """End it and all its processes.

        Args:
            patience: Seconds that it has after SIGTERM.
        """
        self.listener.close()
        for signum, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, None)):
            if self.process.poll() is None:
                os.killpg(self.process.pid, signum)
                try:
                    self.process.wait(seconds)
                except subprocess.TimeoutExpired:
                    continue
        try:
            os.killpg(self.process.pid, signal.SIGKILL)  # Ranks that have not ended with the one that started them.
        except ProcessLookupError:
            return

    def cause(self) -> str:
        """Why it has ended, in a few words, from its exit code and what it has printed."""
        code = self.process.returncode
        assert code is not None, "it has ended"
        text = self.output.read_text(errors="replace")
        for signs, cause in CAUSES:
            if any(sign in text for sign in signs):
                return cause
        if code < 0:
            return f"ended by {signal.Signals(-code).name}{', as when memory is short' * (code == -signal.SIGKILL)}"
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1] if lines else f"exit code {code}"
