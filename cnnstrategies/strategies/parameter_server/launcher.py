"""Launchers that watch the ranks: one that is killed is started again, or the others go on without it.

The process that launches only watches: rank 0 is one of its children, and may die like the others.
"""

import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType, SimpleNamespace
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
from cnnstrategies.runtime.processes import end_with_parent
from cnnstrategies.strategies.parameter_server.checks import check_callbacks, check_dispatch
from cnnstrategies.strategies.parameter_server.run import INCARNATION, SESSIONS, choose_rendezvous, open_supervision

ENDED = 75  # exit code of a rank whose run was ended by another's failure: EX_TEMPFAIL
FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@contextlib.contextmanager
def forwarding(supervision: Supervision) -> Iterator[None]:
    """Signals to this process go on to the workers, which stop at the end of their step.

    Ctrl-C reaches them from the terminal itself.
    """

    def forward(signum: int, frame: FrameType | None) -> None:
        supervision.send_signal(signum)

    handlers = {signum: signal.signal(signum, forward) for signum in FORWARDED}
    handlers[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


class _Watching:
    """What both launchers have in common: the ranks of this node, watched."""

    _strategy: Any
    _supervision: Supervision | None = None

    def check(self, trainer: Trainer | None) -> bool:
        """Refuse what cannot be done here; whether there is something to train."""
        if trainer is None:
            return False
        self._strategy.check()
        if trainer.state.fn != TrainerFn.FITTING:
            return False
        check_callbacks(trainer.callbacks)  # type: ignore[attr-defined]
        check_dispatch(trainer, self._strategy.options)
        return True

    def watch(
        self,
        training: bool,
        method: StartMethod,
        start: Callable[[int, int], Handle],
        tick: Callable[[], None] = lambda: None,
    ) -> Supervision:
        """Start the coordinator, servers and ranks of this node, until the ranks have ended; nothing of them is left.

        Args:
            method: How the others than ranks are started.
            start: Starts a rank, given its number on this node and how often it was started before.
            tick: Called many times a second.
        """
        options, layout = self._strategy.options, self._strategy.layout()
        place = choose_rendezvous(options, layout, SESSIONS.launch(), supervised=True)
        place.publish()
        try:
            with open_supervision(options, layout, place, training, method) as supervision:
                self._supervision = supervision
                for local_rank in range(layout.processes):
                    rank = layout.node * layout.processes + local_rank
                    supervision.start(Watched(WORKER, rank, partial(start, local_rank), options.max_restarts))
                with forwarding(supervision):
                    supervision.watch(tick)
        finally:
            self._supervision = None
            if place.directory is not None:
                shutil.rmtree(place.directory, ignore_errors=True)
                let_go(Path(place.directory))
        return supervision

    def kill(self, signum: int) -> None:
        """Send a signal to the ranks; Lightning asks for it."""
        if self._supervision is not None:
            self._supervision.send_signal(signum)


class WatchingProcessLauncher(_Watching, MultiProcessingLauncher):
    """Starts the ranks by fork or spawn and watches them."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """What a function returned on rank 0 of those that run it.

        Raises:
            RunEnded: The run could not go on; the message says who died.
            ProcessRaisedException: It raised on a rank.
        """
        check_start(self._start_method, self._strategy.root_device)
        training = self.check(trainer)
        if self._already_fit and training:
            raise NotImplementedError(
                "Calling `trainer.fit()` twice on the same Trainer: its loops stay in the ranks that start_method "
                f"{self._start_method} has started; make a new Trainer, and give its fit a checkpoint of the first"
            )
        assert self._strategy.cluster_environment is not None
        os.environ["MASTER_PORT"] = str(self._strategy.cluster_environment.main_port)
        forked = self._start_method == "fork"
        state = None if forked else GlobalState.capture()
        context = multiprocessing.get_context(self._start_method)
        pipes: list[Connection] = []
        dispositions = {signum: signal.getsignal(signum) for signum in (*FORWARDED, signal.SIGINT)} if forked else {}

        def start_rank(local_rank: int, incarnation: int) -> Handle:
            receiver, sender = context.Pipe(duplex=False)
            rank_args = (local_rank, incarnation, sender, dispositions, (trainer, function, args, kwargs), state)
            process = context.Process(target=self._run_rank, args=rank_args, name=f"rank {local_rank}")  # type: ignore[attr-defined]
            process.start()
            sender.close()
            pipes.append(receiver)
            return Forked(process)

        news = _News()
        supervision = self.watch(training, "fork" if forked else "program", start_rank, lambda: news.read(pipes))
        news.read(pipes)
        code = max((worker.code or 0 for worker in supervision.workers), default=0)
        output = news.result(supervision.deaths, code)
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
        dispositions: dict[int, Any],
        call: tuple[Trainer | None, Callable[..., Any], Any, Any],
        state: Any,
    ) -> None:
        for signum, handler in dispositions.items():
            signal.signal(signum, handler)
        starter = multiprocessing.parent_process()
        assert starter is not None
        end_with_parent(starter.pid)
        os.environ[INCARNATION] = str(incarnation)
        try:
            # In the place of the queue into which Lightning puts rank 0's result.
            queue: Any = SimpleNamespace(put=lambda value: pipe.send(("result", local_rank, value)))
            self._wrapping_function(local_rank, *call, queue, state)
        except RunEnded as ended:
            print(f"Rank {local_rank} ends: {ended}", file=sys.stderr, flush=True)
            pipe.send(("ended", local_rank, str(ended)))
            sys.exit(ENDED)
        except Exception as error:
            # Lightning does this in the process that has called `fit`, which here is not the one that has failed.
            self._strategy.on_exception(error)
            pipe.send(("failed", local_rank, traceback.format_exc()))  # Raised by the process that has called `fit`.
            sys.exit(1)
        finally:
            strategy: Any = self._strategy
            strategy.leave_session()

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_supervision": None}


class WatchingScriptLauncher(_Watching, ScriptLauncher):
    """Starts this program once for each rank and watches them; where something else starts the ranks, does nothing."""

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self._strategy = strategy

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Run this program on every rank, and end with them; on a rank, run the function.

        Raises:
            SystemExit: In the process that has watched the ranks: it has nothing more to do.
        """
        training = self.check(trainer)
        if self.cluster_environment.creates_processes_externally:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        supervision = self.watch(training, "program", self._start_rank)
        codes = [worker.code or 0 for worker in supervision.workers]
        # A worker that was killed and not replaced has not ended the run, unless the others say so.
        sys.exit(2 if 2 in codes else max(0, *codes) or int(all(code < 0 for code in codes)))

    def _start_rank(self, local_rank: int, incarnation: int) -> Handle:
        environment = {
            **os.environ,
            "MASTER_ADDR": self.cluster_environment.main_address,
            "MASTER_PORT": str(self.cluster_environment.main_port),
            "NODE_RANK": str(self.cluster_environment.node_rank()),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.num_processes * self.num_nodes),
            INCARNATION: str(incarnation),
        }
        return subprocess.Popen(script_command(), env=environment)


class _News:
    """What the ranks have said: a result, or why they ended."""

    def __init__(self) -> None:
        self.said: list[tuple[str, int, Any]] = []

    def read(self, pipes: list[Connection]) -> None:
        """Take what has come; a large result waits in the pipe until it is read."""
        for pipe in list(pipes):
            try:
                while pipe.poll():
                    self.said.append(pipe.recv())
            except (EOFError, OSError):
                pipes.remove(pipe)

    def result(self, deaths: list[str], code: int) -> Any:
        """The result of rank 0."""
        failed = [(rank, text) for kind, rank, text in self.said if kind == "failed"]
        failed.sort(key=lambda one: "ConfigurationError" not in one[1])
        for rank, text in failed:
            message = f"\n\n-- Process {rank} terminated with the following error:\n{text}"
            raise ProcessRaisedException(message, rank, os.getpid())
        for kind, _, value in self.said:
            if kind == "result":
                return value
        if code > 128:
            sys.exit(code)
        for kind, _, value in self.said:
            if kind == "ended":
                raise RunEnded(value)
        raise RunEnded("; ".join(deaths) or f"the ranks ended with exit code {code} and without a result")
