"""A tensor of which each rank has some rows. Its shape and its values are those of the whole tensor."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from cnnstrategies._torch_private import NO_OWN_FUNCTIONS, allow_in_lists, tensor_without_storage
from cnnstrategies.placed.messages import RefusedError
from cnnstrategies.spatial.layout import RowLayout


class RowRules(Protocol):
    """The rules of a rank, which `SpatialParts` implements."""

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation by the rules."""

    def gather(self, tensor: Tensor, why: str) -> Tensor:
        """Return a tensor with all rows on all ranks."""


class Memory:
    """The memory that a tensor and its views share.

    Attributes:
        writes: Number of operations that have written the memory.
    """

    def __init__(self) -> None:
        self.writes = 0


@dataclass
class Origin:
    """The view that a tensor would be on one device, although its rows are copies here.

    Attributes:
        base: The tensor of which it would be a view.
        call: The operation that takes the view, its arguments after the first one, and its named arguments.
        index: Index of the view, if the operation returns several.
        writes: Number of writes of the base's memory that the copy contains.
    """

    base: "RowsTensor"
    call: tuple[Any, Any, Any]
    index: int
    writes: int


class RowsTensor(Tensor):
    """A tensor of which each rank has some rows.

    Autograd, hooks and autocast see an ordinary tensor with the shape of the whole image. Below them an operation
    becomes operations on the rows of each rank, so gradients, saved tensors and shapes need no rules of their own.

    Attributes:
        parts: The rules of this rank.
        rows: This rank's rows; the whole tensor if `row_layout` is None.
        row_layout: The dimension that is divided; None for a whole tensor that is a copy of a view.
        memory: The memory that the tensor shares with its views.
        origin: The view that the tensor would be on one device, if it is a copy here.
    """

    parts: RowRules
    rows: Tensor
    row_layout: RowLayout | None
    memory: Memory
    origin: Origin | None

    @staticmethod
    def create(
        parts: RowRules,
        rows: Tensor,
        layout: RowLayout | None,
        memory: Memory | None = None,
        origin: Origin | None = None,
    ) -> "RowsTensor":
        """Create a tensor from this rank's rows."""
        shape, stride = (rows.shape, rows.stride()) if layout is None else whole_form(rows, layout)
        tensor: RowsTensor = tensor_without_storage(RowsTensor, shape, stride, rows.dtype, rows.device)
        tensor.parts, tensor.rows, tensor.row_layout = parts, rows, layout
        tensor.memory, tensor.origin = memory or Memory(), origin
        return tensor

    __torch_function__ = NO_OWN_FUNCTIONS  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation by the rules."""
        return next(rows_in(args, kwargs or {})).parts.run(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        """Return the shape and the layout. The values of all rows would need messages."""
        return f"tensor(size={tuple(self.shape)}, dtype={self.dtype}, divided as {self.row_layout})"

    # Functions that read or copy the storage without an operation.

    def whole(self, why: str) -> Tensor:
        """Return the tensor with all rows. All ranks must call this."""
        return self.parts.gather(self.detach(), why)

    def tolist(self) -> Any:
        """Return the values of all rows."""
        return self.whole("tolist").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values of all rows as an array."""
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        return self.whole("numpy").numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        """Return the values of all rows as an array."""
        return self.whole("__array__").__array__(dtype)  # type: ignore[no-untyped-call]

    def __dlpack__(self, **options: Any) -> Any:
        """Return the values of all rows for another library."""
        return self.whole("__dlpack__").__dlpack__(**options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy of the rows, as torch copies a leaf."""
        if id(self) not in memo:
            if not self.is_leaf:
                raise RuntimeError(
                    "Only Tensors created explicitly by the user (graph leaves) support deepcopy: call detach()"
                )
            memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the values of all rows."""
        whole = self.whole("pickle").requires_grad_(self.requires_grad)
        return whole.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @property
    def data(self) -> Any:
        """The tensor without its history."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise RefusedError(f"a value is assigned to the data of {self!r}: use copy_, or create a new tensor")

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise RefusedError(f"{self!r} does not have a storage of its own: use tensor.numpy() on all ranks")

    untyped_storage = storage = data_ptr = _refuse


allow_in_lists(RowsTensor)


def rows_in(args: Any, kwargs: Any) -> Iterator[RowsTensor]:
    """Yield the divided tensors among an operation's arguments."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if type(value) is RowsTensor:
            yield value
        elif isinstance(value, (list, tuple)):
            for item in value:
                if type(item) is RowsTensor:
                    yield item


def whole_form(rows: Tensor, layout: RowLayout) -> tuple[list[int], list[int]]:
    """Return the shape and the strides of the whole tensor, in which the dimensions have the order of the rows'."""
    shape, strides = list(rows.shape), list(rows.stride())
    axis, length = layout.axis, shape[layout.axis]
    shape[axis] = whole = layout.length(layout.size)
    least = max(length, 1)
    step = strides[axis] * least
    for dimension, stride in enumerate(strides):
        if dimension != axis and stride >= step > 0:
            strides[dimension] = stride * max(whole, 1) // least
    return shape, strides


def local_shape(shape: Sequence[int], layout: RowLayout, rows: int) -> list[int]:
    """Return the shape of a part with a number of rows."""
    local = list(shape)
    local[layout.axis] = layout.length(rows)
    return local


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return a contiguous view of a dense tensor, with its elements in the order in which they are in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def memory_format_of(tensor: Tensor) -> torch.memory_format:
    """Return the memory format in which torch's operations return results for a tensor, which depends on its strides.

    A slice of a tensor in `channels_last` has its strides, although `is_contiguous` is false for it.
    """
    if tensor.is_contiguous():
        return torch.contiguous_format
    for order, memory_format in (((1, 3, 2, 0), torch.channels_last), ((1, 4, 3, 2, 0), torch.channels_last_3d)):
        if tensor.dim() == len(order) and (
            tensor.is_contiguous(memory_format=memory_format) or _has_order(tensor.shape, tensor.stride(), order)
        ):
            return memory_format
    return torch.contiguous_format


def _has_order(shape: Sequence[int], strides: Sequence[int], order: Sequence[int]) -> bool:
    """Whether torch takes strides for those of an order of dimensions (`is_channels_last_strides_2d` in C++)."""
    least = 0
    for dimension in order:
        if shape[dimension] == 0 or strides[dimension] < least or (dimension == 0 and least == strides[1]):
            return False
        least = strides[dimension] * shape[dimension]
    return strides[1] > 0
