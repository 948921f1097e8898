"""Launchers that start a node's processes and watch them: a killed rank is restarted, or the run continues without it.

The process that starts the ranks is not a rank itself. Rank 0 is one of its child processes, and may be restarted like
any other rank.
"""

import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch.multiprocessing.spawn import ProcessRaisedException
from typing_extensions import override

from cnnstrategies._lightning_private import (
    GlobalState,
    MultiProcessingLauncher,
    ScriptLauncher,
    check_start,
    script_command,
)
from cnnstrategies.paramserver.coordinator.settings import WORKER
from cnnstrategies.paramserver.core.view import RunEnded
from cnnstrategies.paramserver.private_directory import let_go
from cnnstrategies.paramserver.services import Forked, Handle, StartMethod
from cnnstrategies.paramserver.supervision import Supervision, Watched
from cnnstrategies.runtime.processes import ENDS_WITH, end_with_parent, end_with_supervision
from cnnstrategies.runtime.stop_signals import STOPPING, LimitsStop, cleaned_up, ends_on_signals, passing_on
from cnnstrategies.strategies.parameter_server.checks import check_callbacks, check_dispatch
from cnnstrategies.strategies.parameter_server.run import INCARNATION, SESSIONS, choose_rendezvous, open_supervision
from cnnstrategies.strategies.pickling import explaining_pickling

ENDED = 75  # Exit code (EX_TEMPFAIL) of a rank that ends because another process of the run has failed.
FORWARDED = (*STOPPING, signal.SIGUSR1, signal.SIGUSR2)  # Signals that are forwarded to the ranks.


class _Watching:
    """Base class of the two launchers. It checks the run, and starts and watches the processes of this node."""

    _strategy: Any
    _supervision: Supervision | None = None
    _stop_seconds = 0.0  # Longest time in seconds that the ranks may take to stop after a signal.

    def check(self, trainer: Trainer | None) -> bool:
        """Check that the run works with parameter servers, and return whether the run trains.

        Raises:
            ConfigurationError: The run does not work with parameter servers.
        """
        if trainer is None:
            return False
        self._strategy.check()
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        self._stop_seconds = max((limit.grace for limit in callbacks if isinstance(limit, LimitsStop)), default=0.0)
        if trainer.state.fn != TrainerFn.FITTING:
            return False
        check_callbacks(callbacks)
        check_dispatch(trainer, self._strategy.options)
        return True

    def watch(
        self,
        training: bool,
        method: StartMethod,
        start: Callable[[int, int], Handle],
        tick: Callable[[], None] = lambda: None,
    ) -> Supervision:
        """Start the coordinator, the servers and the ranks of this node, and wait until the ranks have ended.

        Args:
            training: Whether the run trains, and so needs servers.
            method: How to start the coordinator and the servers.
            start: Starts a rank. Its arguments are the local rank, and the number of times that the rank was started
                before.
            tick: Function that is called several times per second while the ranks run.

        Returns:
            The supervision of the processes, which shows how each process has ended.
        """
        self._strategy.find_main_port(self._strategy.node_rank, self._strategy.num_nodes)
        options, layout = self._strategy.options, self._strategy.layout()
        place = choose_rendezvous(options, layout, SESSIONS.launch(), supervised=True)
        place.publish()
        try:
            with (
                open_supervision(options, layout, place, training, method) as supervision,
                contextlib.ExitStack() as at_end,
            ):
                self._supervision = supervision
                supervision.stop_seconds = self._stop_seconds
                at_end.enter_context(cleaned_up(partial(supervision.send_signal, signal.SIGKILL)))
                at_end.enter_context(passing_on(FORWARDED, self._send_to_all))
                for local_rank in range(layout.processes):
                    rank = layout.node * layout.processes + local_rank
                    supervision.start(Watched(WORKER, rank, partial(start, local_rank), options.max_restarts))
                supervision.watch(tick)
        finally:
            self._supervision = None
            if place.directory is not None:
                shutil.rmtree(place.directory, ignore_errors=True)
                let_go(Path(place.directory))
        return supervision

    def _send_to_all(self, signum: int) -> bool:
        """Send a signal to all ranks of this node, and return whether all ranks have been started."""
        assert self._supervision is not None
        self._supervision.send_signal(signum)
        processes: int = self._strategy.layout().processes
        return len(self._supervision.workers) == processes

    def kill(self, signum: int) -> None:
        """Send a signal to all ranks of this node. Lightning calls this method when it interrupts a run."""
        if self._supervision is not None:
            self._supervision.send_signal(signum)


class WatchingProcessLauncher(_Watching, MultiProcessingLauncher):
    """Launcher that starts the ranks with ``fork`` or ``spawn``, and watches them."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Run a function on all ranks, and return the result of rank 0.

        Raises:
            RunEnded: The run could not continue; the error message names the processes that died.
            ProcessRaisedException: The function raised an error on a rank.
        """
        check_start(self._start_method, self._strategy.root_device)
        training = self.check(trainer)
        if self._already_fit and training:
            raise NotImplementedError(
                "Calling `trainer.fit()` twice on the same Trainer is not possible with start_method "
                f"{self._start_method}, because the state of the trainer's loops is lost with the ranks: create a new "
                "Trainer, and resume from a checkpoint of the first fit"
            )
        assert self._strategy.cluster_environment is not None
        os.environ["MASTER_PORT"] = str(self._strategy.cluster_environment.main_port)
        forked = self._start_method == "fork"
        state = None if forked else GlobalState.capture()
        context = multiprocessing.get_context(self._start_method)
        pipes: list[Connection] = []

        def start_rank(local_rank: int, incarnation: int) -> Handle:
            receiver, sender = context.Pipe(duplex=False)
            rank_args = (local_rank, incarnation, sender, (trainer, function, args, kwargs), state)
            process = context.Process(target=self._run_rank, args=rank_args, name=f"rank {local_rank}")  # type: ignore[attr-defined]
            with explaining_pickling(self._start_method):
                process.start()
            sender.close()
            pipes.append(receiver)
            return Forked(process)

        reports = RankReports()
        supervision = self.watch(training, "fork" if forked else "program", start_rank, lambda: reports.read(pipes))
        reports.read(pipes)
        code = max((worker.code or 0 for worker in supervision.workers), default=0)
        output = reports.result(supervision, code)
        if trainer is None:
            return output
        self._already_fit |= training
        self._recover_results_in_main_process(output, trainer)
        return output.trainer_results

    def _run_rank(
        self,
        local_rank: int,
        incarnation: int,
        pipe: Connection,
        call: tuple[Trainer | None, Callable[..., Any], Any, Any],
        state: Any,
    ) -> None:
        starter = multiprocessing.parent_process()
        assert starter is not None
        end_with_parent(starter.pid)
        os.environ[INCARNATION] = str(incarnation)
        try:
            # Lightning's launcher puts rank 0's result into a queue. This object has the queue's method `put`, and
            # sends the result through the pipe instead.
            queue: Any = SimpleNamespace(put=lambda value: pipe.send(("result", local_rank, value)))
            with ends_on_signals():
                self._wrapping_function(local_rank, *call, queue, state)
        except RunEnded as ended:
            print(f"Rank {local_rank} ends: {ended}", file=sys.stderr, flush=True)
            pipe.send(("ended", local_rank, str(ended)))
            sys.exit(ENDED)
        except Exception as error:
            # Lightning would call this hook only in the process that called `fit`. The error occurred in this rank, so
            # the hook is called here.
            self._strategy.on_exception(error)
            pipe.send(("failed", local_rank, traceback.format_exc()))  # The process that called `fit` raises the error.
            sys.exit(1)
        finally:
            strategy: Any = self._strategy
            strategy.leave_session()

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_supervision": None}


class WatchingScriptLauncher(_Watching, ScriptLauncher):
    """Launcher that runs the script once for each rank, and watches the ranks.

    If another launcher such as torchrun has started the ranks, this launcher starts and watches nothing.
    """

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self._strategy = strategy

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Start the ranks, wait until they have ended, and end this process.

        If this process is a rank, run the function instead, and return its result.

        Raises:
            SystemExit: This process has started the ranks, and all ranks have ended.
        """
        training = self.check(trainer)
        if self.cluster_environment.creates_processes_externally:
            end_with_supervision()  # The command line has done this already, but a user's script has not.
            return super().launch(function, *args, trainer=trainer, **kwargs)
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        supervision = self.watch(training, "program", self.start_rank)
        sys.exit(exit_code([worker.code or 0 for worker in supervision.workers], supervision.stop_signal))

    def start_rank(self, local_rank: int, incarnation: int) -> Handle:
        """Start the script as a rank, and return the rank's process.

        Args:
            local_rank: Local rank of the process.
            incarnation: Number of times that the rank was started before.
        """
        environment = {
            **os.environ,
            "MASTER_ADDR": self.cluster_environment.main_address,
            "MASTER_PORT": str(self.cluster_environment.main_port),
            "NODE_RANK": str(self.cluster_environment.node_rank()),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.num_processes * self.num_nodes),
            INCARNATION: str(incarnation),
            ENDS_WITH: str(os.getpid()),
        }
        return subprocess.Popen(script_command(), env=environment)


def exit_code(codes: Sequence[int], stop_signal: int | None) -> int:
    """Return the exit code of the process that has started the ranks of a node.

    Args:
        codes: Exit codes of the ranks. A negative code means that a rank was killed and not restarted.
        stop_signal: Signal that was passed on to the ranks to stop the run; None if there was no signal.
    """
    if (code := 2 if 2 in codes else max(0, *codes)) > 0:
        return code
    if stop_signal is not None and min(codes) < 0:
        return 128 + stop_signal  # The rank has not stopped in time, or a second signal has ended the rank.
    # Other workers continue the run of a killed worker, so the run has failed only if all workers were killed.
    return int(all(code < 0 for code in codes))


class RankReports:
    """RankReports that the ranks send when they end.

    Attributes:
        received: Kind, rank and value of each report. The value of kind ``result`` is the result of the rank's
            function. The value of kind ``failed`` is a traceback. The value of kind ``ended`` is the reason why the run
            has ended.
    """

    def __init__(self) -> None:
        self.received: list[tuple[str, int, Any]] = []

    def read(self, pipes: list[Connection]) -> None:
        """Read all reports that have arrived.

        Call this repeatedly while the ranks run: a rank cannot end before a large result has been read from its pipe.
        """
        for pipe in list(pipes):
            try:
                while pipe.poll():
                    self.received.append(pipe.recv())
            except (EOFError, OSError):
                pipes.remove(pipe)

    def result(self, supervision: Supervision, code: int) -> Any:
        """Return the result of rank 0, or raise the error that has ended the ranks.

        Args:
            supervision: The supervision of the ranks, which have ended.
            code: Largest exit code of a rank.

        Raises:
            ProcessRaisedException: A rank has raised an error. If several ranks have raised errors, a
                ConfigurationError is preferred.
            SystemExit: The ranks were stopped by a signal, or the user's code has ended all ranks with exit code 0.
            RunEnded: The run could not continue.
        """
        failed = [(rank, text) for kind, rank, text in self.received if kind == "failed"]
        failed.sort(key=lambda failure: "ConfigurationError" not in failure[1])
        for rank, text in failed:
            message = f"\n\n-- Process {rank} terminated with the following error:\n{text}"
            raise ProcessRaisedException(message, rank, os.getpid())
        for kind, _, value in self.received:
            if kind == "result":
                return value
        if code > 128:
            sys.exit(code)
        if supervision.stop_signal is not None:
            sys.exit(128 + supervision.stop_signal)  # The ranks were killed before they stopped by themselves.
        for kind, _, value in self.received:
            if kind == "ended":
                raise RunEnded(value)
        if all(worker.code == 0 for worker in supervision.workers):
            sys.exit(0)
        raise RunEnded(
            "; ".join(supervision.deaths) or f"the ranks ended with exit code {code}, and returned no result"
        )
