"""Count the bytes of the tensors that a function makes, as long as they exist."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class HeldBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which the storages of new tensors are counted from the operation that makes them to their end.

    The count has what autograd saves and what the backward makes. It does not have what an operation allocates and
    frees inside itself, such as the workspace of a convolution. On CUDA, torch's allocator counts these as well.

    Attributes:
        now: Bytes of the counted storages that exist.
        most: Largest value of `now`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # Keys are ids of storages.

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count the storages of its results that are not those of its arguments."""
        kwargs = kwargs or {}
        before = {id(storage): storage for storage in _storages((args, kwargs))}
        result = func(*args, **kwargs)
        for storage in _storages(result):
            if id(storage) not in before and id(storage) not in self._known:
                self._count(storage)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        size, key = storage.nbytes(), id(storage)

        def end(_: weakref.ref[torch.UntypedStorage]) -> None:
            self.now -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, end)
        self.now += size
        self.most = max(self.most, self.now)


def _storages(value: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


class AllocatedBytes:
    """A context in which torch's allocator counts the bytes that it gives away, besides those given away before.

    Args:
        device: A CUDA device.

    Attributes:
        most: The largest number of bytes.
    """

    def __init__(self, device: torch.device) -> None:
        self.most = 0
        self._device = device
        self._before = 0

    def __enter__(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def __exit__(self, *_: object) -> None:
        self.most = torch.cuda.max_memory_allocated(self._device) - self._before


def counted(device: torch.device) -> HeldBytes | AllocatedBytes:
    """Return a context that counts the bytes of new tensors on a device."""
    return AllocatedBytes(device) if device.type == "cuda" else HeldBytes()


def allocated(device: torch.device) -> int:
    """Return the bytes that torch's allocator has given away on a CUDA device; 0 for other devices."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
