"""Parts of the hosts of storm.py besides the training: records of finished batches, and long epochs of digits."""

import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer

from cnnstrategies.data import DigitsDataModule
from cnnstrategies.data.loading import TensorSource


class Done(NamedTuple):
    """A batch that a worker has worked on.

    Attributes:
        at: When, on the clock that all processes of the machine share, in seconds.
        epoch: Of the trainer.
        samples: How many.
    """

    at: float
    epoch: int
    samples: int


class Validated(NamedTuple):
    """Result of a validation.

    Attributes:
        at: When, in seconds.
        epoch: Of the trainer.
        accuracy: From 0 to 1.
    """

    at: float
    epoch: int
    accuracy: float


class Notes(Callback):
    """Writes down each batch of this host, and on rank 0 the validations, as they are done."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Add a line."""
        self._note(f"batches-{os.environ['HOST']}", trainer.current_epoch, len(args[1][1]))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add a line."""
        if trainer.is_global_zero:
            self._note("validations", trainer.current_epoch, float(trainer.callback_metrics["val_acc"]))

    def _note(self, name: str, *words: float) -> None:
        with Path(name).open("a") as file:
            print(time.monotonic(), *words, file=file)


def batches(folder: Path, host: int) -> list[Done]:
    """All batches of a host."""
    return [Done(float(at), int(epoch), int(samples)) for at, epoch, samples in _lines(folder / f"batches-{host}")]


def validations(folder: Path) -> list[Validated]:
    """All validations."""
    return [Validated(float(at), int(epoch), float(accuracy)) for at, epoch, accuracy in _lines(folder / "validations")]


def _lines(path: Path) -> list[list[str]]:
    """The words of each whole line: a process may be killed while it writes one."""
    text = path.read_text() if path.exists() else ""
    return [words for words in map(str.split, text[: text.rfind("\n") + 1].splitlines()) if len(words) == 3]


class RepeatedDigits(DigitsDataModule):
    """The digits several times in an epoch, each time shifted otherwise.

    Args:
        repeats: How many times.
        batch_size: Samples per batch and process.
    """

    def __init__(self, repeats: int, batch_size: int = 32) -> None:
        super().__init__(batch_size=batch_size)
        self.repeats = repeats

    def setup(self, stage: str) -> None:
        """Make the sources."""
        super().setup(stage)
        once = self.train_source
        assert isinstance(once, TensorSource)
        self.train_source = TensorSource(once.images.repeat(self.repeats, 1, 1, 1), once.targets.repeat(self.repeats))
