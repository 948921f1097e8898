"""How many samples a batch has."""

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


def count_samples(batch: Any) -> int:
    """By its first tensor with rows; 0 where there is none, as in a batch of a class of the user's own.

    Lightning's ``extract_batch_size`` takes the first thing that has a length, such as the name of a file.
    """
    return next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), 0)


def samples_of(loader: Any, datamodule: Any) -> int | None:
    """Samples of a batch of one process, as its loader or else the data module says; None if neither does."""
    for holder in (loader, getattr(loader, "batch_sampler", None), datamodule):
        size = getattr(holder, "batch_size", None)
        if isinstance(size, int):
            return size
    return None
