"""Lightning's fine-tuning callbacks under a pipeline: they see the whole network while they freeze and unfreeze."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning

from cnnstrategies.strategies.hybrid_pipeline.divided_module import DividedModule

_HOOKS = ("on_fit_start", "on_train_epoch_start")


def show_whole_network(callbacks: Iterable[Any], divided: DividedModule) -> None:
    """Have the callbacks that add parameters to optimizers do so on every rank for the network of all stages.

    They compare the parameters by their values, so these are brought together before; a collective in each hook.

    Args:
        callbacks: Those of the trainer.
        divided: The module.
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
