"""Start a training run in separate processes. The run makes steps only when it receives a command to make steps."""

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

from cnnstrategies.runtime.stop_signals import cleaned_up, raise_if_interrupted

TRIAL = "CNNSTRATEGIES_TRIAL"  # Environment variable with the path of the socket from which ranks receive commands.
# Names of the two modules whose function `main` the ranks of a trial can run. With `ONE_BATCH`, all steps use the same
# batch. With `AS_IN_TRAINING`, each step loads a new batch, as in `fit`.
ONE_BATCH, AS_IN_TRAINING = "cnnstrategies.commands.tune.trial", "cnnstrategies.commands.scaling.run"
FAILED = "This trial has failed: "  # A rank that fails prints a line that begins with this text and gives the reason.
# Smallest time limit in seconds for the start and for each command. It is long because the machine may be busy.
PATIENCE = 120.0
# Number of first steps whose losses are compared with the default's losses. The loss of the third step depends on two
# updates of the weights, so the comparison includes the optimizer.
COMPARED_STEPS = 3
# Each entry has error messages and a cause. If the output of a failed run contains one of the error messages, the user
# sees the cause.
OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory", "can't allocate memory", "MemoryError", "bad_alloc")
CAUSES = (
    (OUT_OF_MEMORY, "out of memory"),
    (("BackendCompilerFailed", "InductorError", "CppCompileError", "InvalidCxxCompiler"), "the compiler failed"),
)


class TrialError(Exception):
    """A trial has ended, or has taken too long. The error message gives the reason in a few words."""


class Trial:
    """A run that is measured: the default's run, or the run of one candidate.

    The run is forked from Python's fork server, which has already imported the run's module. A fork takes almost no
    time, while the import takes seconds. A fork is safe because the fork server has only imported modules: it has not
    used a device or started a thread.

    Args:
        folder: Folder for the run's socket and output.
        name: Name of the socket and of the output file, without the suffix.
        words: Command-line arguments of the run.
        seconds: Time limit in seconds for the start and for each command.
        module: Name of the module whose function ``main`` the ranks run: `ONE_BATCH` or `AS_IN_TRAINING`.

    Attributes:
        output: File with the run's output.
        process: The process of the run. It is the leader of a process session. The processes that it starts belong to
            the same session, so that all of them can be ended together.
    """

    def __init__(self, folder: Path, name: str, words: Sequence[str], seconds: float, module: str = ONE_BATCH) -> None:
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
        context.set_forkserver_preload([module])
        self.process = context.Process(target=_run, args=(module, list(words), self.output, variables))
        self.process.start()
        self._at_end = contextlib.ExitStack()
        self._at_end.enter_context(cleaned_up(self._kill))
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
            TrialError: The run has ended, or a rank did not connect in time.
        """
        self._wait_until(lambda: bool(self._ranks) and len(self._ranks) == self._ranks[0].world, self._accept)

    @property
    def hellos(self) -> list[dict[str, Any]]:
        """The first reports of all ranks, which the ranks sent when they connected, in rank order."""
        return [rank.hello for rank in self._ranks]

    def steps(self, count: int) -> dict[str, Any]:
        """Send all ranks the command to make ``count`` steps, and wait until all ranks have made the steps.

        Returns:
            Rank 0's report, in which ``seconds`` is replaced by the largest ``seconds`` of all ranks.

        Raises:
            TrialError: The run has ended, or a rank did not answer in time.
        """
        reports = self.ask({"steps": count})
        return {**reports[0], "seconds": max(report["seconds"] for report in reports)}

    def ask(self, command: Mapping[str, Any], only: int | None = None) -> list[dict[str, Any]]:
        """Send a command to all ranks or only to one rank, and wait for the reports.

        Args:
            command: The command, which must be serializable as JSON.
            only: The rank that gets the command; None for all ranks.

        Returns:
            The ranks' reports, in rank order.

        Raises:
            TrialError: The run has ended, or a rank did not answer in time.
        """
        asked = self._ranks if only is None else [self._ranks[only]]
        for rank in asked:
            rank.send(command)
        reports: dict[int, dict[str, Any]] = {}
        self._wait_until(lambda: len(reports) == len(asked), lambda: self._receive_reports(asked, reports))
        return [reports[rank.number] for rank in asked]

    def close(self, patience: float = 5.0) -> None:
        """End the run and all its processes.

        Args:
            patience: Seconds to wait after SIGTERM before SIGKILL.
        """
        for rank in self._ranks:
            rank.close()
        self._listener.close()
        for signum, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, None)):
            if self.process.exitcode is None:
                os.killpg(self._pid, signum)
                self.process.join(seconds)
        self._kill()
        self._at_end.close()

    def _kill(self) -> None:
        # The processes of other ranks may outlive the main process of the run, so they are killed as well.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)

    def cause(self) -> str:
        """Return in a few words why the run has ended, according to its exit code and its output."""
        code = self.process.exitcode
        assert code is not None, "the run has ended"
        text = self.output.read_text(errors="replace")
        for signs, cause in CAUSES:
            if any(sign in text for sign in signs):
                return cause
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        # The first failure is the cause: the other ranks lost their connections to that rank.
        reason = next((line.removeprefix(FAILED) for line in lines if line.startswith(FAILED)), None)
        if code < 0:
            memory = ", possibly because memory ran out" if code == -signal.SIGKILL else ""
            ended = f"ended by {signal.Signals(-code).name}{memory}"
            return ended if reason is None else f"{reason} (and {ended})"
        if reason is not None:
            return reason
        if code == 0:
            return "it ended by itself: a callback, max_epochs or limit_train_batches allows no more steps"
        return lines[-1] if lines else f"exit code {code}"

    def ran_out_of_memory(self) -> bool:
        """Return whether the run has ended because a rank ran out of memory.

        An allocator's error is in the output. If the system has killed a rank, this is the run's exit code, or rank 0
        has printed it.
        """
        text = self.output.read_text(errors="replace")
        return self.process.exitcode == -signal.SIGKILL or any(sign in text for sign in (*OUT_OF_MEMORY, "SIGKILL"))

    def _accept(self) -> None:
        try:
            self._listener.settimeout(0.2)
            connection, _ = self._listener.accept()
        except TimeoutError:
            return
        self._ranks = sorted([*self._ranks, _Rank(connection)], key=lambda rank: rank.number)

    def _receive_reports(self, asked: Sequence["_Rank"], reports: dict[int, dict[str, Any]]) -> None:
        for rank in asked:
            if rank.number not in reports and (report := rank.receive(0.2)) is not None:
                reports[rank.number] = report

    def _wait_until(self, done: Callable[[], bool], work: Callable[[], None]) -> None:
        deadline = time.monotonic() + self._seconds
        while not done():
            raise_if_interrupted()
            if self.process.exitcode is not None:
                raise TrialError(self.cause())
            if time.monotonic() > deadline:
                raise TrialError(f"the ranks took more than {self._seconds:.0f} s to answer")
            work()


def _run(module: str, words: list[str], output: Path, variables: Mapping[str, str]) -> None:
    """Run the function ``main`` of a module in the forked process.

    Args:
        module: Name of the module.
        words: Command-line arguments, without the name of the program.
        output: Existing file that receives standard output and standard error.
        variables: Environment variables, which replace those of the fork server.
    """
    os.setsid()
    try:
        file = os.open(output, os.O_WRONLY)
    except FileNotFoundError:
        return  # While the fork server was importing, a signal has ended the process that wants this run.
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ.clear()
    os.environ.update(variables)
    # A child of a fork server would start its own children by another fork server. Workers of loaders would then import
    # torch at the start of each epoch, which they do not do in `fit`.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    program = importlib.import_module(module)
    sys.argv = [str(program.__file__), *words]
    # Lightning starts the other ranks by running the main module again, so the program must be the main module.
    sys.modules["__main__"] = program
    program.main()


class _Rank:
    """The connection to one rank of a trial.

    Attributes:
        hello: The report that the rank sent when it connected.
        number: The rank's number.
        world: World size of the run.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = b""
        hello = self.receive(10.0)
        if hello is None:
            raise TrialError("a rank connected but did not report its number")
        self.hello = hello
        self.number, self.world = int(hello["rank"]), int(hello["world"])

    def send(self, command: Mapping[str, Any]) -> None:
        """Send a command to the rank."""
        # If the rank has ended, no error is raised here: the wait for the rank's report raises an error with the
        # reason.
        with contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(command).encode() + b"\n")

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """Wait for the rank's next report, and return it. Return None if no report arrives.

        Args:
            seconds: Longest time to wait.
        """
        self._connection.settimeout(seconds)
        while b"\n" not in self._buffer:
            try:
                data = self._connection.recv(65536)
            except (TimeoutError, ConnectionError):
                return None
            if not data:
                time.sleep(seconds)
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        self.send({"end": True})
        self._connection.close()
