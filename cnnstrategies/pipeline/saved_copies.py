"""Let autograd save copies of tensors that are changed in place."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from cnnstrategies._torch_private import writes

# A saved tensor with its version; a copy has no version.
_Saved = tuple[Tensor, int | None]


def saving_copies(tensors: Iterable[Tensor]) -> AbstractContextManager[object]:
    """Return a context in which autograd saves copies of some tensors for the backward.

    A forward that changes a buffer in place and then computes with the buffer needs the changed values in its backward.
    In a pipeline the buffer has other values by then, because other microbatches begin with the values from before.

    Args:
        tensors: The tensors, before the forward.
    """
    addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors} - {0}
    if not addresses:
        return nullcontext()

    def pack(tensor: Tensor) -> _Saved:
        # A tensor with a graph would keep the graph that keeps the tensor.
        saved = tensor.detach()
        if tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() in addresses:
            return saved.clone(), None
        return saved, writes(saved)

    return saved_tensors_hooks(pack, _unpack)


def _unpack(saved: _Saved) -> Tensor:
    """Return a saved tensor.

    Raises:
        RuntimeError: The tensor was changed in place. Without hooks, autograd raises this error itself.
    """
    tensor, version = saved
    if version is not None and writes(tensor) != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {tuple(tensor.shape)} is at version {writes(tensor)}; expected version {version} instead"
        )
    return tensor
