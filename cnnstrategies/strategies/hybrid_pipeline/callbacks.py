"""Lightning's callbacks under a pipeline, which find a stage in the place of the network."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, ModelSummary
from typing_extensions import override

from cnnstrategies.strategies.hybrid_pipeline.divided_module import DividedModule


class EndTogether(Callback):
    """Has all ranks meet where a rank is that has ended an epoch, before it exchanges anything else there.

    It must be the trainer's first callback. To meet raises if a rank is in the middle of the epoch; a collective.
    """

    def __init__(self, meet: Callable[[], None]) -> None:
        self._meet = meet

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._meet()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._meet()


_HOOKS = ("on_fit_start", "on_train_epoch_start")


def show_whole_network(callbacks: Iterable[Any], divided: DividedModule) -> None:
    """Have the callbacks that add parameters to optimizers do so on every rank for the network of all stages.

    They compare the parameters by their values, so these are brought together before; a collective in each hook.
    """
    for callback in callbacks:
        if isinstance(callback, BaseFinetuning):
            for name in _HOOKS:
                vars(callback)[name] = partial(_with_whole_network, getattr(callback, name), divided)


def show_own_stage(callbacks: Iterable[Any]) -> None:
    """Undo :func:`show_whole_network`."""
    for callback in callbacks:
        if isinstance(callback, BaseFinetuning):
            for name in _HOOKS:
                vars(callback).pop(name, None)


def _with_whole_network(
    hook: Callable[[Trainer, LightningModule], None], divided: DividedModule, trainer: Trainer, module: LightningModule
) -> None:
    with divided.whole():
        hook(trainer, module)


def summarise_whole(trainer: Trainer, module: LightningModule, callbacks: Iterable[Callback]) -> None:
    """Have each ModelSummary print now, and not in ``on_fit_start``, where it would take a stage for the network.

    The whole network may be too large for one device: the module's example input, which ModelSummary would send
    through it, stays out.
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
