"""Bring tensors that the user's code has kept in attributes to all ranks. The code may read them after the run."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from cnnstrategies._torch_private import swap_contents
from cnnstrategies.placed import ForeignTensor, Places
from cnnstrategies.strategies.hybrid_pipeline.network import tensors_of

DEPTH = 8  # Largest number of objects and containers around a tensor.
LONG = 10_000  # A longer list is only searched if it begins with a tensor.
BYTES = 1 << 26  # Tensors of about this number of bytes are sent together.
# First names of the packages whose objects are not searched, except modules and callbacks.
LIBRARIES = ("torch", "lightning", "lightning_fabric", "pytorch_lightning", "torchmetrics", "numpy", "cnnstrategies")
# Data, and objects that belong to the whole run.
NOT_SEARCHED = (
    *(str, bytes, int, float, type(None), type, Dataset, DataLoader, LightningDataModule, Trainer),
    *(nn.UninitializedParameter, nn.UninitializedBuffer),
)


def bring_kept_values(places: Places, module: nn.Module, callbacks: Iterable[Any]) -> None:
    """Give all ranks the values of tensors in attributes of a module and of callbacks. All ranks must call this.

    The tensors may be in lists, tuples, dictionaries and objects of the user's own classes. If the ranks have kept
    different tensors, for example because only rank 0 has kept a tensor, nothing is sent.

    Args:
        places: The rules of this rank.
        module: The module, whose parameters and buffers already have their values on all ranks.
        callbacks: The trainer's callbacks.
    """
    seen = {id(tensor) for _, tensor in tensors_of(module)}
    tensors = [tensor for holder in (module, *callbacks) for tensor in _tensors_in(holder, seen, 0)]
    kept = [tensor for tensor in tensors if places.place_of(tensor) is not None]
    forms = [(tuple(tensor.shape), str(tensor.dtype), places.place_of(tensor)) for tensor in kept]
    everyone = places.exchange(forms, range(places.world_size), "kept values")
    if any(other != forms for other in everyone):
        return
    part: list[Tensor] = []
    for tensor in kept:
        part.append(tensor)
        if sum(each.nbytes for each in part) > BYTES:
            _bring(places, part)
            part = []
    _bring(places, part)


def _bring(places: Places, tensors: list[Tensor]) -> None:
    by_place: dict[tuple[int, ...], list[Tensor]] = {}
    for tensor in tensors:
        by_place.setdefault(places.place_of(tensor) or (), []).append(tensor)
    for place, of_place in sorted(by_place.items()):
        # The names of tensors may differ between ranks, so the message has no names.
        values = places.tell(place, partial(list, of_place), "kept values", f"{len(of_place)} tensors")
        for tensor, value in zip(of_place, values, strict=True):
            if isinstance(tensor, ForeignTensor):
                with places.local():
                    try:
                        swap_contents(tensor, value.to(tensor.device))
                    except RuntimeError:  # A weak reference to the tensor exists, or an autograd graph uses the tensor.
                        continue


def _tensors_in(value: Any, seen: set[int], depth: int) -> Iterator[Tensor]:
    """Yield the tensors in an object, in an order that is the same on all ranks."""
    if depth > DEPTH or id(value) in seen or isinstance(value, NOT_SEARCHED):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, (list, tuple, deque)):
        is_long_table = len(value) > LONG and not isinstance(value[0], Tensor)
        items = () if is_long_table else value
    elif isinstance(value, nn.Module):
        # Submodules do not count as further levels of nesting.
        modules = list(value.modules())
        seen.update(map(id, modules))
        items = [item for module in modules for item in vars(module).values()]
    elif isinstance(value, Callback) or _is_users(value):
        items = vars(value).values()
    for item in list(items):
        yield from _tensors_in(item, seen, depth + 1)


def _is_users(value: Any) -> bool:
    """Whether an object is an instance of a class of the user, with attributes."""
    package = type(value).__module__.partition(".")[0]
    return hasattr(value, "__dict__") and package not in LIBRARIES
