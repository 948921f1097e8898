"""The number of samples of a batch."""

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


def count_samples(batch: Any) -> int:
    """Return the number of rows of the batch's first tensor; 0 without a tensor, as in a batch of a user's own class.

    Lightning's ``extract_batch_size`` takes the first object that has a length, which may be the name of a file.
    """
    return next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), 0)


def samples_of(loader: Any, datamodule: Any) -> int | None:
    """Return the ``batch_size`` of one process, from its loader or else the data module; None if neither has one."""
    for holder in (loader, getattr(loader, "batch_sampler", None), datamodule):
        size = getattr(holder, "batch_size", None)
        if isinstance(size, int):
            return size
    return None
