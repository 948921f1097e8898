"""A callback that makes a process of a run fail, with any strategy."""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


def fault_arguments(**fault_options: Any) -> list[str]:
    """Return the command-line arguments that add a :class:`Fault` with these options."""
    options = [f"--trainer.callbacks.init_args.{name}={value}" for name, value in fault_options.items()]
    return ["--trainer.callbacks+=tests.strategies.fault_injection.Fault", *options]


class Fault(Callback):
    """A fault after a given step, caused by a rank in its first incarnation.

    Args:
        how: Name of a signal, ``exception`` in a layer of the rank's stage, or ``asleep``.
        victim: Process that gets the signal: ``self``, ``parent``, or a service by its name.
        rank: Rank that causes the fault; None for all ranks.
        step: Number of steps before the fault.
        until_back: Train until a killed rank trains again.
    """

    def __init__(
        self, how: str = "SIGKILL", victim: str = "self", rank: int | None = 1, step: int = 7, until_back: bool = False
    ) -> None:
        self.how, self.victim, self.rank, self.step, self.until_back = how, victim, rank, step, until_back

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        incarnations = ("CNNSTRATEGIES_INCARNATION", "TORCHELASTIC_RESTART_COUNT")
        first = all(os.environ.get(incarnation, "0") == "0" for incarnation in incarnations)
        if self.rank not in (None, trainer.global_rank) or trainer.global_step != self.step or not first:
            return
        if self.how == "exception":
            pl_module.get_submodule(f"network.{5 * trainer.global_rank}").register_forward_pre_hook(fail)
        elif self.how == "asleep":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ending a process that ignores SIGTERM takes ten seconds.
            time.sleep(1000)
        else:
            victim = self.find()
            Path("killed").touch()
            os.kill(victim, signal.Signals[self.how])

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if os.environ.get("CNNSTRATEGIES_INCARNATION", "0") != "0" and not Path("back").exists():
            Path("back").write_text(str(trainer.current_epoch))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.until_back and trainer.strategy.reduce_boolean_decision(Path("back").exists(), all=False):
            trainer.should_stop = True

    def find(self) -> int:
        if self.victim in ("self", "parent"):
            return os.getpid() if self.victim == "self" else os.getppid()
        for status in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # Other processes may end meanwhile.
                name, _, rest = status.read_text().rpartition(")")
                if name.endswith(f"({self.victim}") and int(rest.split()[1]) == os.getppid():
                    return int(status.parent.name)
        raise AssertionError(f"no process {self.victim}")


class Pause(Callback):
    """A pause after each step of a run that trains until a test ends it, so that other programs get the processors."""

    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(0.1)


PAUSES = "--trainer.callbacks+=tests.strategies.fault_injection.Pause"


def fail(*_: object) -> None:
    raise ValueError("this layer does not like the batch")
