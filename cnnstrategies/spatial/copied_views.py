"""Parts of a tensor across its rows, such as one row: views on one device, and copies here.

A copy remembers of what it is a view. It is taken again if the program has written the tensor since, and what is
written to the copy is written to the tensor.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from cnnstrategies.spatial.rows_tensor import Origin, RowsTensor

if TYPE_CHECKING:
    from cnnstrategies.spatial.parts import SpatialParts


def with_origin(parts: "SpatialParts", base: RowsTensor, view: Tensor, call: Any, index: int) -> Tensor:
    """Return the result of an operation that returns a view on one device.

    Args:
        parts: The rules of this rank.
        base: The tensor of which the result is a view.
        view: The result.
        call: The operation, its arguments after the first one, and its named arguments.
        index: Index of the result, if the operation returns several.
    """
    if type(view) is RowsTensor and view.memory is base.memory and base.origin is None:
        return view
    rows, layout = (view.rows, view.row_layout) if type(view) is RowsTensor else (view, None)
    return RowsTensor.create(parts, rows, layout, origin=Origin(base, call, index, base.memory.writes))


def refresh(parts: "SpatialParts", tensor: RowsTensor) -> None:
    """Take a copy again if its tensor has been written since."""
    origin = tensor.origin
    if origin is None:
        return
    refresh(parts, origin.base)
    if origin.writes != origin.base.memory.writes:
        view = _replayed(origin, origin.base)
        tensor.rows = view.rows if type(view) is RowsTensor else view
        origin.writes = origin.base.memory.writes
        tensor.memory.writes += 1


def write_through(parts: "SpatialParts", tensor: RowsTensor) -> None:
    """Write the values of a copy to the tensor of which it would be a view."""
    origin = tensor.origin
    if origin is None:
        return
    base = origin.base
    whole = parts.gather(base, "a write across rows")
    _replayed(origin, whole).copy_(parts.gather(tensor, "a write across rows"))
    if base.row_layout is not None:
        base.rows.copy_(parts.take(whole, base.row_layout))
    base.memory.writes += 1
    write_through(parts, base)
    origin.writes = base.memory.writes


def _replayed(origin: Origin, base: Tensor) -> Tensor:
    func, args, kwargs = origin.call
    result = func(base, *args, **kwargs)
    view: Tensor = result[origin.index] if isinstance(result, (list, tuple)) else result
    return view
