"""Callback that saves a checkpoint and ends a run between two steps, after Ctrl-C, SIGTERM or a scheduler's warning."""

import contextlib
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from tqdm import tqdm  # type: ignore[import-untyped]
from typing_extensions import override

from cnnstrategies._lightning_private import ask_of_sigterm, leave_signals
from cnnstrategies.errors import StoppedTogether
from cnnstrategies.quantities import Duration, seconds
from cnnstrategies.runtime.helper_processes import shield_helpers
from cnnstrategies.runtime.memory_records import exit_at_once
from cnnstrategies.runtime.stop_signals import LimitsStop, Repeated, acting_on, expected_repeats, settle
from cnnstrategies.strategies.protocol import FINDING, facts_of

CHECK_SECONDS = 0.5  # Seconds between two exchanges of the flags that tell whether a rank has received a signal.
# Largest number of steps by which a stop is postponed. Without this limit, a run that logs or validates after every
# step would never stop.
MOST_POSTPONED = 3
LOST_WORKER = "DataLoader worker"  # Beginning of torch's error messages about a loader worker that has ended.
BARS = ("val", "train")  # Prefixes of the properties of TQDMProgressBar that return the bars of a training run.


class GracefulStop(LimitsStop, Callback):
    """Callback that stops a run after SIGINT, SIGTERM or a scheduler's warning, with a checkpoint ``last.ckpt``.

    A run stops only after a batch in which the optimizer has made a step, because a checkpoint does not contain
    gradients that are still being accumulated. Lightning logs and validates after this callback has run. If Lightning
    is about to log or validate, the stop is postponed by up to three steps. Without this delay, the run would stop
    before the logging or the validation, and a resumed run would skip it.

    Lightning's own signal handler runs a broadcast, which can go wrong in the middle of another collective. In this
    class a signal only sets a flag. The ranks exchange their flags about twice a second, at steps that rank 0
    announces, and all ranks stop after the same step. A signal to one rank therefore stops all ranks, for example when
    a pod is evicted. Loader workers ignore the signals, because the rank still needs them.

    If a process has not ended after ``grace`` seconds, for example because its step is long, the process is killed.
    Even then the last checkpoint is complete, because each checkpoint is written under a temporary name and then
    renamed. A second signal, more than a second after the first signal, kills the run immediately.

    The warning is a signal that a scheduler such as SLURM sends some time before it ends a job. The run has more time
    to stop after a warning than after the other signals, and repeated warnings are ignored.

    The exit code is 128 + the signal's number, so that a job script can distinguish a stopped run from a failed run.

    Args:
        grace: Longest time that the run may take to stop after a signal, in seconds or as ``minutes:seconds``.
        warning_signal: The signal that the scheduler sends as a warning.
        warning_grace: Longest time that the run may take to stop after a warning, in seconds or as
            ``minutes:seconds``.
        on_each_node: Whether every node ends with the signal's exit code, and not only the node of rank 0. Use this
            with a launcher that restarts each node's process independently, such as Kubernetes.
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
        self._signals = Repeated()
        self._acting: contextlib.ExitStack | None = None
        self._next_check = 0
        self._step_at_start = 0
        self._checked_at = 0.0
        self._checked_step = 0
        self._postponed = 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        leave_signals(trainer)

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._install(trainer)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._install(trainer)
        ask_of_sigterm(trainer, self._acting is None)
        self._next_check = trainer.global_step
        self._checked_step = trainer.global_step
        self._checked_at = time.monotonic()

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # All ranks exchange flags in the first step of an epoch, because a restarted rank begins with a new epoch and
        # does not know the step that rank 0 announced earlier.
        self._next_check = trainer.global_step

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._step_at_start = trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        # If the optimizer has not made a step in this batch, gradients are being accumulated. A checkpoint does not
        # contain them, so the run does not stop here.
        if step == self._step_at_start or step < self._next_check:
            return
        settle()  # A signal that has arrived before this point counts.
        facts = facts_of(trainer.strategy)
        if not facts.steps_in_lockstep:
            # The ranks make their steps independently of each other, so they cannot exchange flags by a collective. The
            # strategy itself makes all ranks stop.
            stop = facts.agree_on_stop(self._signals.received)
            if stop not in (None, FINDING):
                self._stop(trainer, stop)
            return
        now = time.monotonic()
        pace = max(now - self._checked_at, 1e-6) / (step - self._checked_step)
        self._checked_at, self._checked_step = now, step
        announced = step + max(1, min(1000, int(CHECK_SECONDS / pace))) if trainer.is_global_zero else 0
        received = self._signals.received or facts.requested_stop() or 0
        flags = torch.tensor([received, announced], device=trainer.strategy.root_device)
        stop, self._next_check = trainer.strategy.reduce(flags, reduce_op="max").tolist()
        if not stop:
            return
        if self._postponed < MOST_POSTPONED and _more_follows(trainer, batch_idx):
            self._postponed += 1
            self._next_check = step + 1
            return
        self._stop(trainer, stop)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        signum = self._signals.received
        if signum is not None and isinstance(exception, RuntimeError) and str(exception).startswith(LOST_WORKER):
            # The loader worker has not ignored the signal, for example because a user's code has started it.
            name = signal.Signals(signum).name
            self._say_last(
                trainer, f"Stopped at once by {name}, because a loader worker has ended; the last checkpoint is kept"
            )
            self._kill()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._acting is not None:
            self._acting.close()
            self._acting = None
        ask_of_sigterm(trainer, True)

    def _install(self, trainer: Trainer) -> None:
        self._trainer = trainer
        if self._acting is not None or threading.current_thread() is not threading.main_thread():
            return
        self._signals = Repeated(expected_repeats())
        self._acting = contextlib.ExitStack()
        self._acting.enter_context(acting_on((signal.SIGINT, signal.SIGTERM, self._warning), self._on_signal))
        shield_helpers()
        self._acting.callback(shield_helpers, False)

    def _on_signal(self, signum: int) -> None:
        """Act on a signal. A thread calls this method, so that it works while the main thread runs C++ code."""
        warned = signum == self._warning
        if self._signals.received is not None:
            if not warned and self._signals.note(signum):
                self._kill()
            return
        self._signals.note(signum)
        grace = self.warning_grace if warned else self.grace
        timer = threading.Timer(grace, self._kill)
        timer.daemon = True
        timer.start()
        assert self._trainer is not None
        self._announce(self._trainer, signum)

    def _announce(self, trainer: Trainer, signum: int) -> None:
        warned = signum == self._warning
        grace = self.warning_grace if warned else self.grace
        text = f"{signal.Signals(signum).name}: stopping after this step, within {grace:g} s"
        self._say(trainer, text + ("" if warned else "; send the signal again to stop at once"))

    def _say(self, trainer: Trainer, text: str) -> None:
        """Print a line on rank 0, above the progress bar if there is one."""
        if trainer.is_global_zero:
            with contextlib.suppress(Exception), tqdm.external_write_mode(sys.stderr):
                print(text, file=sys.stderr, flush=True)

    def _say_last(self, trainer: Trainer, text: str) -> None:
        """Print a line on rank 0, and end the progress bar first, which would overwrite the line."""
        bar = trainer.progress_bar_callback
        if bar is not None:
            bar.teardown(trainer, trainer.lightning_module, "fit")
        if isinstance(bar, TQDMProgressBar):
            for name in BARS:
                with contextlib.suppress(AttributeError, TypeError):  # The bar has not been shown yet.
                    getattr(bar, f"{name}_progress_bar").close()
        self._say(trainer, text)

    def _stop(self, trainer: Trainer, signum: int) -> None:
        if self._signals.received is None:
            self._announce(trainer, signum)  # Only other processes have received the signal.
        checkpoint = trainer.checkpoint_callback
        outcome = "checkpoints are off, so nothing was saved"
        if (
            isinstance(checkpoint, ModelCheckpoint) and checkpoint.dirpath is not None and not trainer.fast_dev_run  # type: ignore[attr-defined]  # set outside the class
        ):
            path = Path(checkpoint.dirpath) / f"{checkpoint.CHECKPOINT_NAME_LAST}{checkpoint.FILE_EXTENSION}"
            trainer.save_checkpoint(path)
            outcome = f"continue with --ckpt_path {path}"
        self._say_last(trainer, f"Stopped by {signal.Signals(signum).name} after step {trainer.global_step}; {outcome}")
        # Rank 0 gives the run its exit code. The other ranks exit with 0, because a launcher that watches them would
        # treat another exit code as a failure.
        reports_signal = trainer.local_rank == 0 if self.on_each_node else trainer.is_global_zero
        raise StoppedTogether(128 + signum if reports_signal else 0)

    def _kill(self) -> None:
        assert self._trainer is not None
        launcher = self._trainer.strategy.launcher
        if launcher is not None:
            launcher.kill(signal.SIGKILL)
        exit_at_once(128 + (self._signals.received or signal.SIGKILL))


def _more_follows(trainer: Trainer, batch_idx: int) -> bool:
    """Whether Lightning will log, validate or end the epoch directly after the callbacks of this step."""
    validate_every = trainer.val_check_batch
    validates = isinstance(validate_every, int) and (batch_idx + 1) % validate_every == 0
    logs = bool(trainer.loggers) and trainer.global_step % trainer.log_every_n_steps == 0  # type: ignore[attr-defined]
    return trainer.is_last_batch or validates or logs
