"""A callback through which all ranks of a run end within seconds after an exception on one rank, or on all."""

import itertools
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from typing_extensions import override

from cnnstrategies._torch_private import default_store
from cnnstrategies.errors import StoppedTogether
from cnnstrategies.paramserver.core.view import RunEnded
from cnnstrategies.runtime.failure_store import FailureStore, RankFailure
from cnnstrategies.runtime.failure_watch import FailureWatch
from cnnstrategies.runtime.memory_records import exit_at_once
from cnnstrategies.runtime.out_of_memory import OutOfMemory, held_bytes, is_out_of_memory, line_of
from cnnstrategies.runtime.stalls import MoveWatch, StallWatch, WorkerStallWatch
from cnnstrategies.strategies.meeting import MeetingDDPStrategy
from cnnstrategies.strategies.protocol import facts_of

# Longest time in seconds for which a failed rank waits until all other ranks have failed as well. Only ranks that have
# all failed can save a checkpoint together.
TOGETHER = 5.0
_calls = itertools.count()


class FailTogether(Callback):
    """Callback that reports a failure of this rank to the other ranks, and avoids waiting for ranks that never come.

    All ranks save a checkpoint together. If all ranks have failed at the same step, the callbacks that save a
    checkpoint after an exception therefore work. If some ranks have not failed, they wait in a collective of the
    training for this rank, and Lightning would wait forever. These callbacks are then skipped, and a line of output
    says so.

    The trainer must call this callback before the callbacks that save checkpoints.

    Args:
        explain: Function that returns an error message of one line for an exception, or None if users need the
            traceback. The message is printed if this process must be ended before it prints the exception itself. None
            to print tracebacks only.

    Attributes:
        cause: First exception of this rank; None if the rank has not failed. Hooks that run after the exception can
            raise other exceptions, which would hide the cause.
    """

    def __init__(self, explain: Callable[[BaseException], str | None] | None = None) -> None:
        self.cause: BaseException | None = None
        self._explain = explain
        self._watch: FailureWatch | None = None
        self._stalls: MoveWatch | None = None
        self._first: RankFailure | None = None
        self._is_rank = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the thread, because a copy of a trainer does not watch the ranks."""
        return {**vars(self), "_watch": None, "_stalls": None}

    @property
    def first(self) -> RankFailure | None:
        """Report of the rank that has failed first; None if this process knows of no failure."""
        return self._first if self._watch is None else self._watch.first

    def watch(self, trainer: Trainer) -> None:
        """Begin to watch the other ranks. All ranks must call this after the process group was created."""
        self._is_rank = True
        self.cause = None
        if self._watch is not None or trainer.world_size == 1 or not dist.is_initialized():
            return
        rank, folder = trainer.global_rank, Path(trainer.default_root_dir, "stalls")
        if facts_of(trainer.strategy).connects_hosts:
            # The coordinator of the parameter servers watches its workers itself, and their process group has no store.
            self._stalls = self._stalls or WorkerStallWatch(rank, folder).start()
            return
        call = next(_calls)
        self._watch = FailureWatch(
            FailureStore(default_store(), call, trainer.world_size), rank, partial(self._end, trainer)
        )
        places = PrefixStore(f"cnnstrategies_stalls_{call}", default_store())
        self._stalls = StallWatch(places, rank, trainer.world_size, folder).start()

    def close(self) -> None:
        """End the watch, because this process leaves the trainer."""
        watch = self._watch
        if self._stalls is not None:
            self._stalls.close()
            self._stalls = None
        if watch is not None:
            watch.close()
            self._first, self._watch = watch.first, None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.watch(trainer)

    def move(self, *args: Any, **kwargs: Any) -> None:
        """Record that this rank begins or ends a batch."""
        if self._stalls is not None:
            self._stalls.move()

    on_train_batch_start = on_train_batch_end = move
    on_validation_batch_start = on_validation_batch_end = move
    on_test_batch_start = on_test_batch_end = move
    on_predict_batch_start = on_predict_batch_end = move

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.report(trainer, exception)
        self.skip_savers(trainer, exception)

    def report(self, trainer: Trainer, exception: BaseException) -> None:
        """Report a failure of this rank to the other ranks."""
        if isinstance(exception, StoppedTogether):
            return
        self.cause = self.cause or exception
        self.explain_memory(trainer, exception)
        if self._watch is not None:
            place = trainer.global_rank, socket.gethostname(), os.getpid()
            self._watch.report(exception, RankFailure(*place, last_line(exception), self._exit_code(exception)))

    def explain_memory(self, trainer: Trainer, exception: BaseException) -> None:
        """Add a line to an allocator's error that names the rank, the step, the peaks and a remedy."""
        if isinstance(exception, RunEnded) or not is_out_of_memory(exception):
            return  # The text of a RunEnded is the reason of another process.
        device = trainer.strategy.root_device
        held = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else held_bytes()
        OutOfMemory(
            f"rank {trainer.global_rank}",
            socket.gethostname(),
            trainer.global_step,
            f"{held / 1e6:,.0f} MB",
            self.predicted_peak(trainer),
            self.plan_that_fits(trainer, held) or remedy_for(trainer),
        ).attach(exception)

    def predicted_peak(self, trainer: Trainer) -> str:
        """Return a text with the predicted peak of this rank; empty if it is not known."""
        return ""

    def plan_that_fits(self, trainer: Trainer, held: int) -> str:
        """Return a text about a plan that fits by prediction; empty if none is known.

        Args:
            trainer: The trainer.
            held: Largest number of bytes that this process has held.
        """
        return ""

    def skip_savers(self, trainer: Trainer, exception: BaseException) -> None:
        """Make the trainer skip callbacks that save a checkpoint after an exception, if this rank cannot save it."""
        savers = _savers(trainer)
        if not savers or isinstance(exception, StoppedTogether) or self._saves_together(trainer, exception):
            return
        for callback in savers:
            vars(callback)["on_exception"] = partial(_do_not_save, callback)
        is_cause = not isinstance(exception, RunEnded) if self.first is None else self.first.rank == trainer.global_rank
        if self._is_rank and is_cause:
            names = ", ".join(sorted({type(callback).__name__ for callback in savers}))
            print(
                f"{names}: no checkpoint is saved after the exception, because all ranks must save it together, and "
                f"other ranks have not failed at step {trainer.global_step}: continue from the last checkpoint",
                file=sys.stderr,
                flush=True,
            )

    def fail_in_rank(self, trainer: Trainer, exception: BaseException) -> None:
        """Report a failure in a spawned or forked rank, and call the callbacks that save a checkpoint if they can.

        The other callbacks are called in the process that has started the ranks.

        Args:
            trainer: The trainer.
            exception: The exception of this rank.
        """
        self.report(trainer, exception)
        self.skip_savers(trainer, exception)
        for callback in _savers(trainer):
            try:
                callback.on_exception(trainer, trainer.lightning_module, exception)
            except Exception as error:
                print_second(error)
        self.close()

    def _saves_together(self, trainer: Trainer, exception: BaseException) -> bool:
        """Return whether a checkpoint can be saved: this rank is the only rank, or all other ranks save it as well."""
        if not self._is_rank or trainer.world_size == 1:
            return self._is_rank
        point = f"{trainer.state.fn}, {trainer.state.stage}, {trainer.current_epoch}, {trainer.global_step}"
        if self._watch is not None:
            return self._watch.fail_together(point, TOGETHER)
        return facts_of(trainer.strategy).fail_together(point, TOGETHER, exception)

    def _line(self, exception: BaseException) -> str | None:
        return None if self._explain is None else self._explain(exception)

    def _exit_code(self, exception: BaseException) -> int:
        if isinstance(exception, SystemExit):
            return exception.code & 0xFF if isinstance(exception.code, int) else int(exception.code is not None)
        if isinstance(exception, KeyboardInterrupt):
            return 128 + signal.SIGINT
        return 1 if self._line(exception) is None else 2

    def _end(self, trainer: Trainer, first: RankFailure, exception: BaseException | None) -> None:
        """End this process, because a rank has failed, and this process has not ended by itself.

        Args:
            trainer: The trainer.
            first: Report of the rank that has failed first.
            exception: This process's own exception; None if the process has not failed itself.
        """
        if first.rank == trainer.global_rank and exception is not None:
            line = self._line(exception)
            text = "".join(traceback.format_exception(exception)) if line is None else f"cnnstrategies: error: {line}\n"
            print(text, end="", file=sys.stderr, flush=True)
        elif first.host != socket.gethostname():
            print(ends_because(trainer.global_rank, first), file=sys.stderr, flush=True)
        if trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(signal.SIGKILL)
        exit_at_once(first.code)


class _InRank:
    """A trainer function in a spawned or forked rank, where Lightning calls no hook `on_exception`.

    Args:
        function: The trainer's function.
        trainer: The trainer.
        callback: The callback that reports a failure.
    """

    def __init__(self, function: Callable[..., Any], trainer: Trainer, callback: FailTogether) -> None:
        self._function = function
        self._trainer = trainer
        self._callback = callback

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            result = self._function(*args, **kwargs)
        except BaseException as error:
            self._callback.fail_in_rank(self._trainer, error)
            raise
        self._callback.close()
        return result


def report_from_ranks(launcher: Any, callback: FailTogether) -> None:
    """Make the spawned or forked ranks of a launcher report their failures, at the next call of ``launch``.

    Args:
        launcher: The launcher.
        callback: The callback that reports a failure. The trainer must have it.
    """

    def launch(function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        del launcher.launch
        reporting = function if trainer is None else _InRank(function, trainer, callback)
        return launcher.launch(reporting, *args, trainer=trainer, **kwargs)

    launcher.launch = launch


def print_second(error: BaseException) -> None:
    """Print an exception that was raised by a hook after the exception that ends the run. That exception follows it."""
    print(f"After the exception below, the run has also had {last_line(error)}", file=sys.stderr, flush=True)


def ends_because(rank: int, first: RankFailure) -> str:
    """Return the output of a rank that ends because another rank has failed. The last line is the exception."""
    return f"rank {rank} on {socket.gethostname()} ends, because {first}"


def watch_failures(trainer: Trainer) -> FailTogether:
    """Return the trainer's callback :class:`FailTogether`, which is added if it is missing, and begin to watch."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    callback = next((callback for callback in callbacks if isinstance(callback, FailTogether)), None)
    if callback is None:
        callback = FailTogether()
        callbacks.insert(0, callback)
    callback.watch(trainer)
    return callback


class FailingTogetherDDPStrategy(MeetingDDPStrategy):
    """Base class of the strategies of this package that use a process group: their ranks fail together.

    See :class:`FailTogether`. The command line adds this callback to other strategies.
    """

    _fails_together: FailTogether | None = None

    @property
    def failed_elsewhere(self) -> bool:
        """Whether another rank has failed first, so that a failure of this rank is not the cause."""
        first = None if self._fails_together is None else self._fails_together.first
        return first is not None and first.rank != self.global_rank

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        assert self.lightning_module is not None
        self._fails_together = watch_failures(self.lightning_module.trainer)

    @override
    def teardown(self) -> None:
        super().teardown()
        if self._fails_together is not None:
            self._fails_together.close()
        self._fails_together = None


def remedy_for(trainer: Trainer) -> str:
    """Return what to do if a rank has run out of memory."""
    facts, again = facts_of(trainer.strategy), "activation_checkpointing"
    batches = f"--trainer.accumulate_grad_batches={2 * trainer.accumulate_grad_batches} with half the batch size"
    largest = "cnnstrategies plan --largest_batch finds the largest batch that fits"
    if facts.step_kind == "stages":
        return f"set the strategy's option {again}: always, use more stages or microbatches; {largest}"
    callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set outside the class
    has_callback = any(type(callback).__name__ == "ActivationCheckpointing" for callback in callbacks)
    remedies = [] if has_callback else ["--trainer.callbacks+=ActivationCheckpointing"]
    if facts.ranks_per_batch > 1:
        remedies += ["more parts with --trainer.strategy.init_args.parts", batches]
    else:
        remedies += [batches, "strategy hybrid_pipeline"]
    return f"use {', or '.join(remedies)}; {largest}"


def last_line(exception: BaseException) -> str:
    """Return the last line of an exception's traceback: the exception's class and its message."""
    if (line := line_of(exception)) is not None:
        return line
    return " ".join(traceback.format_exception_only(exception)[0].split())


def _savers(trainer: Trainer) -> list[Checkpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if _saves_on_exception(callback)]


def _saves_on_exception(callback: Checkpoint) -> bool:
    if isinstance(callback, ModelCheckpoint):
        return bool(callback.save_on_exception)
    return type(callback).on_exception is not Callback.on_exception


def _do_not_save(callback: Callback, *_: Any) -> None:
    del vars(callback)["on_exception"]  # This function, which hides the method.
