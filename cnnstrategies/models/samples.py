"""Functions that return the number of samples of a batch."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


def count_samples(batch: Any) -> int:
    """Return the number of samples of a batch: the size of the first dimension of the batch's first tensor.

    If an entry of the batch is a list of mappings, such as the boxes of each image, the result is its length.

    The result is 0 if no tensor is found, for example because the batch is an object of a user's own class. Lightning's
    ``extract_batch_size`` raises an error in this case, and warns if the tensors have different sizes.
    """
    for entry in batch if isinstance(batch, list | tuple) else ():
        if isinstance(entry, list) and entry and all(isinstance(item, Mapping) for item in entry):
            return len(entry)
    return next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), 0)


def samples_of(loader: Any, datamodule: Any) -> int | None:
    """Return the ``batch_size`` of a process's loader, or of the data module if the loader has no batch size.

    The result is None if the data module has no batch size either.
    """
    for holder in (loader, getattr(loader, "batch_sampler", None), datamodule):
        size = getattr(holder, "batch_size", None)
        if isinstance(size, int):
            return size
    return None
