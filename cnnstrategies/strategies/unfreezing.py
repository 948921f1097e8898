"""Parameters that only some backward passes train, for strategies that use DistributedDataParallel (DDP).

DDP decides when it wraps a module whose parameters' gradients it averages over the ranks. The gradients of parameters
that are unfrozen later are not averaged, so the ranks' weights drift apart without a warning, for example with
Lightning's callback BaseFinetuning. Therefore the module is wrapped again before the next batch if the set of trainable
parameters has changed.

A step with manual optimization may have several backward passes, each for some of the networks, as in a GAN. DDP then
must search each loss for the parameters that it uses, or else waits for gradients that do not come (Lightning's issue
20866).
"""

from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from cnnstrategies._lightning_private import search_unused
from cnnstrategies.errors import ConfigurationError

_WRAPPED = "_parameters_when_wrapped"  # Attribute of a strategy: the names of the parameters that DDP averages.


class WrapsAgain(DDPStrategy):
    """Base class of strategies that wrap the module again if parameters were frozen or unfrozen.

    For a module with manual optimization, DDP searches each loss for unused parameters, also if
    ``find_unused_parameters`` is false, unless ``static_graph`` is true.
    """

    @override
    def configure_ddp(self) -> None:
        if self.lightning_module is not None and not self.lightning_module.automatic_optimization:
            search_unused(self)
        super().configure_ddp()
        record_trainable(self)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        wrap_if_changed(self)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        check_gradients(self)


def follow_unfreezing(trainer: Trainer) -> None:
    """Make Lightning's own DDP strategy wrap the module again if parameters were frozen or unfrozen.

    The strategy object's class is replaced by :class:`WrapsAgain`. Other strategies are not changed.

    Args:
        trainer: The trainer, which may have any strategy.
    """
    if type(trainer.strategy) is DDPStrategy:
        trainer.strategy.__class__ = WrapsAgain
        vars(trainer.strategy)["strategy_name"] = "ddp"  # The start panel shows this name.


def record_trainable(strategy: DDPStrategy) -> None:
    """Record which parameters are trainable. Call this right after the module was wrapped."""
    assert isinstance(strategy.model, DistributedDataParallel)
    vars(strategy)[_WRAPPED] = _trainable(strategy.model.module)


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def wrap_if_changed(strategy: DDPStrategy) -> None:
    """Wrap the module again if the set of trainable parameters has changed. All ranks must call this."""
    wrapped, recorded = strategy.model, vars(strategy).get(_WRAPPED)
    # A subclass may wrap the module by itself, without a record.
    if recorded is None or not isinstance(wrapped, DistributedDataParallel):
        return
    module: Any = wrapped.module
    current = _trainable(module)
    if recorded.keys() == current.keys() and all(recorded[name] is current[name] for name in current):
        return
    for parameter in recorded.values():
        if not parameter.requires_grad:
            _average_gradient(strategy, parameter)
    # DDP copies the buffers of rank 0 to all ranks when it wraps a module. Ranks may have buffers of their own.
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    strategy.model = module
    strategy.configure_ddp()
    with torch.no_grad():
        for buffer, values in buffers:
            buffer.copy_(values)


def _average_gradient(strategy: DDPStrategy, parameter: nn.Parameter) -> None:
    """Average the gradient of a parameter that was frozen while gradients accumulate. All ranks must call this.

    DDP would average the gradient in the last backward of the accumulated batches, but not if the parameter is frozen.
    If the gradient is already averaged, it does not change.
    """
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    mean = strategy.reduce(gradient.detach().clone(), reduce_op="mean")
    if parameter.grad is not None or bool(mean.any()):
        parameter.grad = mean


def check_gradients(strategy: DDPStrategy) -> None:
    """Refuse parameters that were unfrozen during a batch, because their gradients were not averaged over the ranks.

    Raises:
        ConfigurationError: A parameter that DDP does not know has a gradient.
    """
    recorded = vars(strategy).get(_WRAPPED)
    if recorded is None or not isinstance(strategy.model, DistributedDataParallel):
        return
    for name, parameter in _trainable(strategy.model.module).items():
        if recorded.get(name) is not parameter and parameter.grad is not None:
            raise ConfigurationError(
                f"{name} was unfrozen during a batch, so its gradient was not averaged over the ranks: unfreeze it in "
                "on_train_batch_start, in on_train_epoch_start or in another hook that runs before the batch"
            )
