"""A run that is started as a program, ends with all its processes, and talks with the one that started it."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from cnnstrategies.planning.forked import Forked

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
        forked: Whether to fork it from a process that has imported the module, which is worth it for several runs.

    Attributes:
        output: That file.
        process: The process that was started; what it starts in turn is in the same session.
        listener: Where its ranks connect.
    """

    def __init__(
        self, words: Sequence[str], output: Path, listen_at: Path, variables: Mapping[str, str], forked: bool = False
    ) -> None:
        self.output = output
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(listen_at))
        self.listener.listen(64)
        self.process: Forked | subprocess.Popen[bytes]
        if forked:
            self.process = Forked(words[0], words[1:], output, variables)
            return
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *words],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=dict(variables),
                start_new_session=True,
            )

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
