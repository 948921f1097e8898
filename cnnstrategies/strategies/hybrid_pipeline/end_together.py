"""All ranks end an epoch at the same step, or none of them waits for the others without end."""

from collections.abc import Callable

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


class EndTogether(Callback):
    """Has all ranks meet where a rank is that has ended an epoch, before it exchanges anything else there.

    It must be the trainer's first callback.

    Args:
        meet: Raises if a rank is in the middle of the epoch; a collective.
    """

    def __init__(self, meet: Callable[[], None]) -> None:
        self._meet = meet

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._meet()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._meet()
