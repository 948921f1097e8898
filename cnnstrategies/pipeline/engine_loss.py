"""The loss of a batch, computed in parts: one part for each microbatch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cnnstrategies.pipeline.engine_batch import Batch

Loss = Callable[[Any, Any], Tensor]


class MeanLoss:
    """A loss that is a mean, computed in parts. The sum of all parts of a batch is the loss of the whole batch.

    Args:
        loss: Function that returns the mean loss from outputs and targets (n, ...).
        weight: Function that returns the divisor of the mean from targets, such as the number of pixels that are not
            ignored. By default the divisor is the number of samples.
    """

    def __init__(self, loss: Loss, weight: Callable[[Any], Any] | None = None) -> None:
        self.loss = loss
        self.weight = weight

    def begin(self, batch: Batch) -> None:
        """Begin a batch, before its first part is computed."""
        self._batch = batch
        self._whole = None if self.weight is None else self.weight(_targets(batch.rest))

    def part(self, outputs: Any, microbatch: int) -> Tensor:
        """Return the part of the batch's loss that comes from one microbatch."""
        targets = _targets(self._batch.rest_of(microbatch))
        mean = self.loss(outputs, targets)
        if self.weight is None:
            return mean * (self._batch.split.sizes[microbatch] / self._batch.split.samples)
        # If the divisor of the whole batch is 0, no microbatch has a gradient, as on one device.
        is_empty = not isinstance(self._whole, Tensor) and not self._whole
        share = 0 if is_empty else self.weight(targets) / self._whole
        # The mean of a microbatch is not a number if its divisor is 0.
        if isinstance(share, Tensor):
            share = share.nan_to_num()
            return torch.where(share > 0, mean, _zero(outputs)) * share.to(mean.dtype)
        return mean * share if share else _zero(outputs)


def _targets(rest: tuple[Tensor, ...]) -> Any:
    """Return what a batch has besides the images: one tensor, or a tuple of tensors."""
    return rest[0] if len(rest) == 1 else rest


def _zero(outputs: Any) -> Tensor:
    """Return a loss of zero whose gradients are zero."""
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return torch.stack([tensor.sum() * 0 for tensor in tensors]).sum()
