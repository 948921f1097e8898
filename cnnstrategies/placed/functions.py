"""Functions of torch that read or replace a tensor's storage without an operation, which no operation mode intercepts.

Foreign tensors have methods of their own for these functions. This mode does the same on the ranks that have the
tensor, so that they send the values.
"""

import inspect
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from cnnstrategies._torch_private import without_modes
from cnnstrategies.placed.foreign import ForeignTensor
from cnnstrategies.placed.messages import RefusedError
from cnnstrategies.placed.partial import PartialTensor

if TYPE_CHECKING:
    from cnnstrategies.placed.places import Places

READS = {Tensor.tolist: "tolist", Tensor.numpy: "numpy", Tensor.__array__: "__array__", Tensor.__dlpack__: "__dlpack__"}
# Functions that make a new tensor of values, among which may be tensors.
MAKERS = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}
# The setter of `Tensor.data`.
PUT_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
# Functions whose C++ code reads other values of foreign tensors than of other tensors, so that the ranks would diverge.
INDEXING = {Tensor.__getitem__, Tensor.__setitem__}
ONE_HOT = torch.nn.functional.one_hot
# Functions whose C++ code reads the places at which a tensor is split from a tensor's memory.
SPLITS = {torch.tensor_split, Tensor.tensor_split}
# Functions that show or copy a tensor on this rank only.
ALONE = {Tensor.__repr__, Tensor.__deepcopy__}
# Functions that pickling calls. Of a tensor without Python attributes, a mode can only intercept the second one.
PICKLES = {Tensor.__reduce_ex__, Tensor.untyped_storage}
INTERCEPTED = {*READS, *MAKERS, *INDEXING, *SPLITS, *ALONE, *PICKLES, PUT_DATA, ONE_HOT}


class Functions(TorchFunctionMode):
    """The mode that intercepts the functions."""

    def __init__(self, places: "Places") -> None:
        super().__init__()
        self._places = places

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, with values of other ranks if the function reads values."""
        kwargs = kwargs or {}
        if func not in INTERCEPTED or not self._places.active:
            return func(*args, **kwargs)
        if func in READS:
            return self._read(func, args, kwargs)
        if func is Tensor.new_tensor and self._places.place_of(args[0]) is not None:
            # Only the dtype and the device of the first tensor are used, so its values need not be sent.
            func, args, kwargs = torch.tensor, args[1:], {"dtype": args[0].dtype, "device": args[0].device, **kwargs}
        if func in MAKERS:
            return self._make(func, args, kwargs)
        if func == PUT_DATA:
            return self._put_data(*args)
        if func in INDEXING:
            return func(args[0], self._index(args[1]), *args[2:], **kwargs)
        if func is ONE_HOT:
            return self._one_hot(func, *args, **kwargs)
        if func in PICKLES:
            if self._places.place_of(args[0]) is not None and is_pickling(inspect.currentframe()):
                self._places.everywhere(args[0].detach(), "pickle")
            return func(*args, **kwargs)
        if func in SPLITS:
            splits = {name: self._split(value) for name, value in kwargs.items()}
            return func(args[0], *map(self._split, args[1:]), **splits)
        return self._alone(func, args, kwargs)

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._places.place_of(args[0]) is None:
            return func(*args, **kwargs)
        if func is Tensor.numpy and args[0].requires_grad:
            return func(*args, **kwargs)
        return func(self._places.everywhere(args[0].detach(), READS[func]), *args[1:], **kwargs)

    def _make(self, func: Any, args: Any, kwargs: Any) -> Any:
        placed = [tensor for tensor in _tensors((args, kwargs)) if self._places.place_of(tensor) is not None]
        if not placed:
            return func(*args, **kwargs)
        copies = {id(tensor): self._places.everywhere(tensor.detach(), func.__name__) for tensor in placed}
        args, kwargs = tree_map(lambda value: copies.get(id(value), value), (args, kwargs))
        return func(*args, **kwargs)

    def _put_data(self, tensor: Tensor, value: Tensor) -> None:
        """Assign to ``tensor.data``. The tensor keeps its place, and the value is brought there.

        The assignment of a foreign tensor to a tensor with a storage would end the process.
        """
        places, value = self._places, value.detach()
        if isinstance(tensor, PartialTensor):
            if value.shape != tensor.shape:
                raise RefusedError(
                    f"a value of shape {tuple(value.shape)} is assigned to the data of {tensor!r}: assign a value of "
                    "the same shape, or create a new tensor"
                )
            tensor = tensor.checked_whole()
        place = places.place_of(tensor)
        if place is not None and places.place_of(value) is None:
            value = places.take(value, place, places.label_of(tensor))
        else:
            value = places.at_exactly(value, place, "data")
        with without_modes():
            PUT_DATA(tensor, value)
        if isinstance(tensor, ForeignTensor):
            tensor.label = self._places.label_of(value)

    def _index(self, index: Any) -> Any:
        """Return an index with numbers in place of tensors that contain one number."""
        if isinstance(index, tuple):
            return tuple(self._index(item) for item in index)
        if not isinstance(index, Tensor) or index.dim() or index.dtype in (torch.bool, torch.uint8):
            return index
        return index if self._places.place_of(index) is None else index.item()

    def _split(self, argument: Any) -> Any:
        """Return an argument of a split. The values of a tensor at a place become known to all ranks."""
        if not isinstance(argument, Tensor) or self._places.place_of(argument) is None:
            return argument
        return self._places.everywhere(argument.detach(), "tensor_split").tolist()

    def _one_hot(self, func: Any, tensor: Tensor, num_classes: int = -1) -> Tensor:
        if self._places.place_of(tensor) is None:
            return func(tensor, num_classes)  # type: ignore[no-any-return]
        if num_classes == -1:
            num_classes = int(tensor.max().item()) + 1
        return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).long()

    def _alone(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._places.sums.settle_for(args[:1])
        with self._places.local():
            result = func(*args, **kwargs)
        if func is Tensor.__deepcopy__:
            self._mark_copy(args[0], result)
        return result

    def _mark_copy(self, tensor: Tensor, copy: Tensor) -> None:
        """Mark a tensor's copy, its gradient and its attributes as at the places of the originals."""
        pairs = [(tensor, copy), (tensor.grad if tensor.is_leaf else None, copy.grad)]
        pairs += [(value, vars(copy).get(name)) for name, value in vars(tensor).items()]
        for original, copied in pairs:
            if isinstance(original, Tensor) and isinstance(copied, Tensor):
                place = self._places.place_of(original)
                if place is not None:
                    self._places.mark(copied, place)


def is_pickling(frame: FrameType | None) -> bool:
    """Whether a function of a tensor is called because the tensor is pickled, as by `torch.save`.

    `copy.copy` calls the same function, but a shallow copy of a tensor shares its storage and needs no values.

    Args:
        frame: The innermost frame of the call.
    """
    is_reduced = False
    while frame is not None and frame.f_globals.get("__name__") in (__name__, "torch._tensor", "torch.overrides"):
        is_reduced |= frame.f_code.co_name == "__reduce_ex__"
        frame = frame.f_back
    return is_reduced and frame is not None and frame.f_globals.get("__name__") != "copy"


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and dicts. Lists of many numbers are frequent."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, (Tensor, list, tuple, dict)):
                yield from _tensors(item)
