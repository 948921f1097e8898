"""Callbacks that run before and between the epochs of a pipeline: the model summary, and the common end of epochs."""

from collections.abc import Callable, Iterable
from functools import partial

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from cnnstrategies._lightning_private import asks_of_sigterm


class EndTogether(Callback):
    """Callback that makes all ranks check, at the end of an epoch, that all of them have reached it.

    It must be the trainer's first callback, because a rank that has ended must not exchange anything else before.

    Args:
        meet: Function that raises an error if a rank is in the middle of the epoch. All ranks must call this function.
            The argument says whether Lightning asks before each batch for a signal that rank 0 has got.
    """

    def __init__(self, meet: Callable[[bool], None]) -> None:
        self._meet = meet

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._meet(asks_of_sigterm(trainer))

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._meet(False)

    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._meet(asks_of_sigterm(trainer))


def summarise_whole(trainer: Trainer, module: LightningModule, callbacks: Iterable[Callback]) -> None:
    """Make each ModelSummary print now, and not in ``on_fit_start``, when this rank has only one stage of the network.

    The summary does not pass the module's example input through the network, which may be too large for one device.
    """
    for callback in callbacks:
        if isinstance(callback, ModelSummary):
            example, module.example_input_array = module.example_input_array, None
            callback.on_fit_start(trainer, module)
            module.example_input_array = example
            vars(callback)["on_fit_start"] = partial(_skip, callback)


def _skip(callback: Callback, trainer: Trainer, module: LightningModule) -> None:
    del vars(callback)["on_fit_start"]  # This function, which hides the method.
