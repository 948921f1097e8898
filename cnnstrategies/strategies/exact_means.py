"""Means of integers over ranks, without rounding.

For the mean of a logged value over an epoch, Lightning divides the mean of the ranks' sums by the mean of the ranks'
numbers of samples. The numbers of samples are integers, and Lightning rounds the mean of integers down. Without this
module, ``self.log(..., sync_dist=True)`` is therefore wrong if the ranks have different numbers of samples: with 7
samples on 2 ranks, the constant 1.0 is logged as 1.167 (Lightning's issue 21859).
"""

from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from torch import Tensor
from torch.distributed import ReduceOp
from typing_extensions import override

MEANS = ("mean", "avg", "redoptype.avg")


def widened(value: Any, reduce_op: ReduceOp | str | None) -> Any:
    """Return a value in the form in which a strategy's ``reduce`` must combine it.

    If the reduction is a mean, a tensor of integers is returned as a new tensor of dtype float64. Any other value is
    returned as it is.

    Args:
        value: Value on this rank.
        reduce_op: Name of the reduction, as in Lightning's ``Strategy.reduce``.
    """
    is_integer = isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex()
    return value.to(torch.float64) if is_integer and str(reduce_op).lower() in MEANS else value


class ExactMeans(ParallelStrategy):
    """Base class of strategies that average integers without rounding."""

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: ReduceOp | str | None = "mean") -> Any:
        """Combine a value over all ranks, as Lightning's method does. The mean of integers is of dtype float64."""
        return super().reduce(widened(tensor, reduce_op), group, reduce_op)  # type: ignore[safe-super]


def average_exactly(trainer: Trainer) -> None:
    """Make the strategy of a trainer average integers without rounding.

    If the trainer has several ranks, the method ``reduce`` of the strategy object is replaced. Spawned ranks get the
    strategy as a pickle, with the replacement.

    Args:
        trainer: The trainer, which may have any strategy.
    """
    if trainer.world_size > 1:
        trainer.strategy.reduce = _ExactReduce(trainer.strategy)  # type: ignore[method-assign]


class _ExactReduce:
    """The method ``reduce`` of a strategy, with exact means of integers."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def __call__(self, tensor: Any, group: Any = None, reduce_op: ReduceOp | str | None = "mean") -> Any:
        return type(self._strategy).reduce(self._strategy, widened(tensor, reduce_op), group, reduce_op)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_ExactReduce":
        # Lightning copies the results of an epoch, which contain this object. The strategy must not be copied.
        return self
