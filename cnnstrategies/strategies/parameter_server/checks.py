"""What the parameter server cannot train or use of modules, callbacks, optimizers and trainers."""

import math
from collections.abc import Iterator, Sequence

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import LBFGS, Optimizer

from cnnstrategies._lightning_private import acts_within_epochs, ends_after_search
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.specification import hyperparameters
from cnnstrategies.strategies.parameter_server.options import Options

GATHERS = "gather_distributed"  # The end of the names of such options of losses and memories, as lightly has them.


def check_module(module: LightningModule, options: Options) -> None:
    """Refuse a module that the parameter server cannot train."""
    if options.mode != "local" and is_overridden("configure_gradient_clipping", module):
        raise ConfigurationError(
            f"{type(module).__name__}.configure_gradient_clipping would clip each worker's own gradient, and not their "
            "mean: with strategy parameter_server the servers clip; set trainer.gradient_clip_val and "
            "trainer.gradient_clip_algorithm, or use strategy ddp"
        )
    if not module.automatic_optimization:
        raise ConfigurationError(
            f"{type(module).__name__} sets automatic_optimization=False: with strategy parameter_server the servers "
            "make the optimizer's step; leave it on, or use strategy ddp"
        )
    for name, child in module.named_modules():
        if options.mode != "local" and isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            raise ConfigurationError(
                f"{name} is {type(child).__name__}(sparse=True), and the servers take dense gradients: use "
                "sparse=False, mode: local, or strategy ddp"
            )
        for attribute in (one for one, value in vars(child).items() if value is True and one.endswith(GATHERS)):
            raise ConfigurationError(
                f"{name}.{attribute}=True gathers the outputs of all processes, and strategy parameter_server has no "
                "process group of torch.distributed, without which such a loss gathers nothing: set it to False, which "
                "compares a process's own images, or use strategy ddp"
            )


def check_callbacks(callbacks: Sequence[Callback], options: Options, returns: bool) -> None:
    """Refuse callbacks that search or average, and could not do it right.

    Args:
        callbacks: The trainer's.
        options: The strategy's.
        returns: Whether what a callback finds is where the script goes on.
    """
    for callback in callbacks:
        if isinstance(callback, StochasticWeightAveraging):
            raise ConfigurationError(
                "StochasticWeightAveraging puts averaged weights into the network at the end, and the servers' would "
                "take their place: use Lightning's WeightAveraging or EMAWeightAveraging, or strategy ddp"
            )
        if isinstance(callback, BatchSizeFinder):
            raise ConfigurationError(
                "BatchSizeFinder: Lightning searches on one device only: do so with strategy: auto, train without it"
            )
        if not isinstance(callback, LearningRateFinder):
            continue
        if options.max_restarts:
            raise ConfigurationError(
                f"LearningRateFinder with max_restarts={options.max_restarts}: a worker that is started again in the "
                "middle of the search has not seen its beginning; search with max_restarts: 0, and train without it"
            )
        if options.endpoints:
            raise ConfigurationError(
                "LearningRateFinder with endpoints: after the search training needs fresh servers, and dedicated ones "
                "serve one training; search with endpoints left out, and train without it"
            )
        if ends_after_search(callback) and not returns:
            raise ConfigurationError(
                "Tuner.lr_find: what is found stays in the processes that start_method fork or spawn has started; use "
                "start_method: popen, or the callback LearningRateFinder in the fit itself"
            )


def check_optimizers(optimizers: list[Optimizer], options: Options) -> None:
    """Refuse what the servers cannot do."""
    if len(optimizers) != 1:
        raise ConfigurationError(
            f"configure_optimizers gave {len(optimizers)} optimizers: the servers run one; use its parameter groups"
        )
    if isinstance(optimizers[0], LBFGS):
        raise ConfigurationError(
            "LBFGS evaluates the loss several times in a step, which servers cannot: use SGD, Adam or another "
            "optimizer that takes one gradient, or strategy ddp"
        )
    if options.mode != "local":  # There each worker runs its own.
        _check_served(optimizers[0])


def _check_served(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        raise ConfigurationError(
            f"{name} keeps other weights for training than for evaluation (its methods train and eval), and servers "
            "have one set: use mode: local, or strategy ddp"
        )
    for number, group in enumerate(hyperparameters(optimizer)):
        for option, value in group.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigurationError(
                    f"{name} has {option}={value} in parameter group {number}: the servers take finite numbers only; "
                    "give another, or use mode: local or strategy ddp"
                )


def check_dispatch(trainer: Trainer, options: Options) -> None:
    """Refuse a training that counts steps, or stops for something within an epoch, while workers take what they can."""
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
