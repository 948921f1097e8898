"""Ctrl-C, SIGTERM and a scheduler's warning end a run at a step boundary, with a checkpoint, on every rank."""

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from cnnstrategies._lightning_private import ask_of_sigterm
from cnnstrategies.quantities import Duration, seconds
from cnnstrategies.strategies.protocol import facts_of

CHECK_SECONDS = 0.5
# Where each step is logged or validated, there is no better one to wait for.
MOST_PUT_OFF = 3


class StoppedTogether(SystemExit):
    """Every rank has stopped after the same step: none waits for another one any more."""


class GracefulStop(Callback):
    """On SIGINT, SIGTERM or a warning, finishes the step, saves ``last.ckpt`` and ends every process.

    A step after which something is logged or validated is not the last: Lightning does that after this callback, and
    a resumed run would go on without it.

    Lightning's own handler runs a broadcast inside the signal handler, while a rank may be in the middle of another
    collective. Here the handler sets a flag. The ranks' flags are brought together about twice a second (at steps that
    rank 0 announces, so that all ranks take part), and all ranks leave after the same step: a signal to one of them
    does, as when a pod is evicted. Whatever does not end within
    ``grace`` seconds, because a step is long or a peer is gone, is killed; the last checkpoint is whole because it
    was renamed into place. A second signal kills at once.

    The warning is what a scheduler such as SLURM sends some time before it ends a job. It leaves more time than the
    other signals, and may come more than once.

    The exit code is 128 + the signal's number. By it a job's script tells a warned run from one that failed.

    Args:
        grace: Time, as seconds or ``minutes:seconds``, until a run that has not reached a step boundary is killed.
        warning_signal: The scheduler's signal.
        warning_grace: Time until that happens after a warning.
        on_each_node: End with the signal's exit code on every node and not on rank 0's alone, for launchers that start
            each node's process again by itself, as Kubernetes does.
    """

    def __init__(
        self,
        grace: Duration = 10.0,
        warning_signal: Literal["USR1", "USR2"] = "USR1",
        warning_grace: Duration = 60.0,
        on_each_node: bool = False,
    ) -> None:
        self.grace = seconds(grace, "stop.grace", least=0)
        self.warning_signal = warning_signal
        self.warning_grace = seconds(warning_grace, "stop.warning_grace", least=0)
        self.on_each_node = on_each_node
        self._warning = signal.Signals[f"SIG{warning_signal}"]
        self._trainer: Trainer | None = None
        self._received: int | None = None
        self._previous: dict[int, Any] = {}
        self._next_check = 0
        self._step_at_start = 0
        self._checked_at = 0.0
        self._checked_step = 0
        self._put_off = 0

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._install(trainer)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning installs its handlers after `setup` and `on_fit_start`; this hook comes later.
        self._install(trainer)
        ask_of_sigterm(trainer, not self._previous)
        self._next_check = trainer.global_step
        self._checked_step = trainer.global_step
        self._checked_at = time.monotonic()

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A rank that was started again begins here, and must ask at the same steps as the others.
        self._next_check = trainer.global_step

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._step_at_start = trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        # After a batch in which no optimizer has stepped, gradients are accumulated that no checkpoint holds.
        if step == self._step_at_start or step < self._next_check:
            return
        facts = facts_of(trainer.strategy)
        if not facts.steps_in_lockstep:
            # Ranks that take their steps independently must not wait for each other here.
            stop = facts.agree_on_stop(self._received)
            if stop is not None:
                self._stop(trainer, stop)
            return
        now = time.monotonic()
        pace = max(now - self._checked_at, 1e-6) / (step - self._checked_step)
        self._checked_at, self._checked_step = now, step
        announced = step + max(1, min(1000, int(CHECK_SECONDS / pace))) if trainer.is_global_zero else 0
        received = self._received or facts.requested_stop() or 0
        flags = torch.tensor([received, announced], device=trainer.strategy.root_device)
        stop, self._next_check = trainer.strategy.reduce(flags, reduce_op="max").tolist()
        if not stop:
            return
        if self._put_off < MOST_PUT_OFF and _more_follows(trainer, batch_idx):
            self._put_off += 1
            self._next_check = step + 1
            return
        self._stop(trainer, stop)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous.clear()
        ask_of_sigterm(trainer, True)

    def _install(self, trainer: Trainer) -> None:
        self._trainer = trainer
        if self._previous or threading.current_thread() is not threading.main_thread():
            return
        for signum in (signal.SIGINT, signal.SIGTERM, self._warning):
            self._previous[signum] = signal.signal(signum, self._on_signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        warned = signum == self._warning
        if self._received is not None:
            if warned:
                return
            self._kill()
        self._received = signum
        grace = self.warning_grace if warned else self.grace
        rank_zero_info(
            f"\n{signal.Signals(signum).name}: stopping after this step, within {grace:g} s"
            + ("" if warned else "; once more to stop at once")
        )
        timer = threading.Timer(grace, self._kill)
        timer.daemon = True
        timer.start()

    def _stop(self, trainer: Trainer, signum: int) -> None:
        checkpoint = trainer.checkpoint_callback
        place = "no checkpoint was asked for"
        if (
            isinstance(checkpoint, ModelCheckpoint) and checkpoint.dirpath is not None and not trainer.fast_dev_run  # type: ignore[attr-defined]  # set outside the class
        ):
            path = Path(checkpoint.dirpath) / f"{checkpoint.CHECKPOINT_NAME_LAST}{checkpoint.FILE_EXTENSION}"
            trainer.save_checkpoint(path)
            place = f"continue with --ckpt_path {path}"
        rank_zero_info(f"Stopped by {signal.Signals(signum).name} after step {trainer.global_step}; {place}")
        # Rank 0 speaks for the run; a launcher that watches the others would take their codes for failures.
        speaks = trainer.local_rank == 0 if self.on_each_node else trainer.is_global_zero
        raise StoppedTogether(128 + signum if speaks else 0)

    def _kill(self) -> None:
        assert self._trainer is not None
        launcher = self._trainer.strategy.launcher
        if launcher is not None:
            launcher.kill(signal.SIGKILL)
        os._exit(128 + (self._received or signal.SIGKILL))


def _more_follows(trainer: Trainer, batch_idx: int) -> bool:
    """Whether Lightning still logs or validates at this step, or ends the epoch."""
    validate_every = trainer.val_check_batch
    validates = isinstance(validate_every, int) and (batch_idx + 1) % validate_every == 0
    logs = bool(trainer.loggers) and trainer.global_step % trainer.log_every_n_steps == 0  # type: ignore[attr-defined]
    return trainer.is_last_batch or validates or logs
