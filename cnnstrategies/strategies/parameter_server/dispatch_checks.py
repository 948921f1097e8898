"""What a trainer has all workers do at one step: with batches that are given out they have none in common."""

from collections.abc import Iterator

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from cnnstrategies._lightning_private import acts_within_epochs
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies.parameter_server.options import Options


def check_dispatch(trainer: Trainer, options: Options) -> None:
    """Refuse a training that counts steps, or stops for something within an epoch, while workers take what they can.

    Args:
        trainer: It.
        options: The strategy's.

    Raises:
        ConfigurationError: Some workers would be in the middle of an epoch, where others wait for them.
    """
    if options.data_dispatch == "static" or trainer.state.fn != TrainerFn.FITTING:
        return
    for what, instead in _within_epochs(trainer):
        raise ConfigurationError(
            f"{what}: with data_dispatch: dynamic workers make different numbers of steps, and are together only at "
            f"the end of an epoch; use {instead}, or data_dispatch: static"
        )


def _within_epochs(trainer: Trainer) -> Iterator[tuple[str, str]]:
    """What a trainer does within an epoch, and what it could do in its place."""
    if trainer.val_check_interval != 1.0:
        yield f"val_check_interval={trainer.val_check_interval}", "1.0"
    if trainer.max_steps != -1 and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        yield f"max_steps={trainer.max_steps}", "max_epochs"
    if trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
        # Some would ask for the loader of the next epoch while others are in this one.
        yield f"reload_dataloaders_every_n_epochs={trainer.reload_dataloaders_every_n_epochs}", "0"  # type: ignore[attr-defined]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        argument = acts_within_epochs(callback)
        if argument is not None:
            instead = "every_n_epochs" if isinstance(callback, ModelCheckpoint) else "the callback with interval: epoch"
            yield f"{type(callback).__name__} with {argument}", instead
        if isinstance(callback, LearningRateFinder):
            yield "LearningRateFinder", "a run of its own for it"
