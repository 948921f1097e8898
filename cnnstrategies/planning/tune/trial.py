"""A training run in processes of its own that makes steps only on request."""

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

TRIAL = "CNNSTRATEGIES_TRIAL"  # Environment variable with the socket on which a trial's ranks wait for orders.
# Modules whose `main` a trial's ranks run: steps on the same batch each time, or steps as in training.
ONE_BATCH, AS_IN_TRAINING = "cnnstrategies.commands.tune.trial", "cnnstrategies.commands.scaling.run"
FAILED = "This trial has failed: "  # A rank that fails prints this text and the reason in one line.
PATIENCE = 120.0  # Least time limit in seconds for a start or an order, since the machine may be busy.
# Number of steps whose losses are compared with the default's. The third loss depends on two updates of the weights.
COMPARED_STEPS = 3
# Texts in the output of a failed run, and the cause that they indicate.
CAUSES = (
    (("OutOfMemoryError", "out of memory", "can't allocate memory"), "out of memory"),
    (("BackendCompilerFailed", "InductorError", "CppCompileError", "InvalidCxxCompiler"), "the compiler failed"),
)


class TrialError(Exception):
    """A trial has ended or taken too long; the message gives the reason in a few words."""


class Trial:
    """One candidate's run.

    The run is forked from Python's fork server, which has imported the run's module: an import takes seconds, a fork
    almost no time. The fork server only imports modules, so it has not used a device or started a thread.

    Args:
        folder: Folder for the run's socket and output.
        name: Name of these files.
        words: Arguments of the command line.
        seconds: Time limit for the start, and for each later order.
        command: Module whose ``main`` the ranks run.

    Attributes:
        output: File with the run's output.
        process: The process that was started. The processes that it starts are in the same session.
    """

    def __init__(self, folder: Path, name: str, words: Sequence[str], seconds: float, command: str = ONE_BATCH) -> None:
        self._seconds = seconds
        self._ranks: list[_Rank] = []
        path = folder / f"{name}.sock"
        variables = {**os.environ, TRIAL: str(path)}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self.output = folder / f"{name}.log"
        self.output.touch()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([command])
        self.process = context.Process(target=_run, args=(command, list(words), self.output, variables))
        self.process.start()
        with contextlib.suppress(ProcessLookupError):  # The process may have ended already.
            while self.process.exitcode is None and os.getsid(self._pid) != self._pid:
                time.sleep(0.002)

    @property
    def _pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def wait_until_ready(self) -> None:
        """Wait until all ranks have connected.

        Raises:
            TrialError: The run has ended, or not all ranks connected in time.
        """
        self._await(lambda: bool(self._ranks) and len(self._ranks) == self._ranks[0].world, self._accept)

    @property
    def hellos(self) -> list[dict[str, Any]]:
        """Ranks' reports on themselves, in rank order."""
        return [rank.hello for rank in self._ranks]

    def steps(self, count: int) -> dict[str, Any]:
        """Let all ranks make some steps.

        Returns:
            Rank 0's report, with ``seconds`` of the slowest rank.

        Raises:
            TrialError: The run has ended, or a rank has not answered in time.
        """
        reports = self.ask({"steps": count})
        return {**reports[0], "seconds": max(report["seconds"] for report in reports)}

    def ask(self, order: Mapping[str, Any], first: bool = False) -> list[dict[str, Any]]:
        """Send an order to all ranks, or to the first rank alone.

        Args:
            order: The order, as JSON values.
            first: Whether only the first rank gets the order.

        Returns:
            The reports of the asked ranks, in rank order.

        Raises:
            TrialError: The run has ended, or a rank has not answered in time.
        """
        asked = self._ranks[:1] if first else self._ranks
        for rank in asked:
            rank.send(order)
        reports: dict[int, dict[str, Any]] = {}
        self._await(lambda: len(reports) == len(asked), lambda: self._hear(asked, reports))
        return [reports[rank.number] for rank in asked]

    def close(self, patience: float = 5.0) -> None:
        """End the run and all its processes.

        Args:
            patience: Seconds that the processes have to end after SIGTERM.
        """
        for rank in self._ranks:
            rank.close()
        self._listener.close()
        for signum, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, None)):
            if self.process.exitcode is None:
                os.killpg(self._pid, signum)
                self.process.join(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)  # Ranks may outlive the process that started them.

    def cause(self) -> str:
        """Return the reason why the run has ended, in a few words, from its exit code and its output."""
        code = self.process.exitcode
        assert code is not None, "the run has ended"
        text = self.output.read_text(errors="replace")
        for signs, cause in CAUSES:
            if any(sign in text for sign in signs):
                return cause
        if code < 0:
            memory = ", possibly because memory ran out" if code == -signal.SIGKILL else ""
            return f"ended by {signal.Signals(-code).name}{memory}"
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        reasons = [line.removeprefix(FAILED) for line in lines if line.startswith(FAILED)]
        if reasons:
            return reasons[0]  # The first rank that failed; the other ranks failed because they lost it.
        if code == 0:
            return "it ended by itself: a callback, max_epochs or limit_train_batches allows no further step"
        return lines[-1] if lines else f"exit code {code}"

    def _accept(self) -> None:
        try:
            self._listener.settimeout(0.2)
            connection, _ = self._listener.accept()
        except TimeoutError:
            return
        self._ranks = sorted([*self._ranks, _Rank(connection)], key=lambda rank: rank.number)

    def _hear(self, asked: Sequence["_Rank"], reports: dict[int, dict[str, Any]]) -> None:
        for rank in asked:
            if rank.number not in reports and (report := rank.hear(0.2)) is not None:
                reports[rank.number] = report

    def _await(self, done: Callable[[], bool], work: Callable[[], None]) -> None:
        deadline = time.monotonic() + self._seconds
        while not done():
            if self.process.exitcode is not None:
                raise TrialError(self.cause())
            if time.monotonic() > deadline:
                raise TrialError(f"took more than {self._seconds:.0f} s")
            work()


def _run(module: str, words: list[str], output: Path, variables: Mapping[str, str]) -> None:
    """Run the function ``main`` of a module in the forked process, with arguments in ``sys.argv``.

    Args:
        module: Name of the module.
        words: Arguments of the command line.
        output: File for the standard output and the standard error output.
        variables: Environment variables.
    """
    os.setsid()
    file = os.open(output, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ.clear()
    os.environ.update(variables)
    program = importlib.import_module(module)
    sys.argv = [str(program.__file__), *words]
    sys.modules["__main__"] = program  # Lightning starts other ranks by the main module.
    program.main()


class _Rank:
    """The connection to one rank of a trial."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._heard = b""
        hello = self.hear(10.0)
        if hello is None:
            raise TrialError("a rank connected but did not report its number")
        self.hello = hello
        self.number, self.world = int(hello["rank"]), int(hello["world"])

    def send(self, order: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # The rank has ended; waiting for its answer raises the reason.
            self._connection.sendall(json.dumps(order).encode() + b"\n")

    def hear(self, seconds: float) -> dict[str, Any] | None:
        self._connection.settimeout(seconds)
        while b"\n" not in self._heard:
            try:
                data = self._connection.recv(65536)
            except (TimeoutError, ConnectionError):
                return None
            if not data:
                time.sleep(seconds)
                return None
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        self.send({"end": True})
        self._connection.close()
