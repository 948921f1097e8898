"""Lightning's ModelSummary of a network that is about to be divided."""

from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary


def summarise_whole(trainer: Trainer, module: LightningModule, callbacks: Iterable[Callback]) -> None:
    """Have each ModelSummary print now, and not in ``on_fit_start``, where it would take a stage for the network.

    Args:
        trainer: The trainer, which calls ``on_fit_start`` next.
        module: The module, whose network is whole and may be too large for one device: its example input, which
            ModelSummary would send through it, stays out.
        callbacks: Those of the trainer.
    """
    for callback in callbacks:
        if isinstance(callback, ModelSummary):
            example, module.example_input_array = module.example_input_array, None
            callback.on_fit_start(trainer, module)
            module.example_input_array = example
            _skip_next(callback)


def _skip_next(callback: Any) -> None:
    def skip(trainer: Trainer, module: LightningModule) -> None:
        del callback.on_fit_start  # This function, which hides the method.

    callback.on_fit_start = skip
