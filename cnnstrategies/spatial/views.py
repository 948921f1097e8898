"""Views, permutations and concatenations: the rows stay where they are, or are fetched if a view moves them."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cnnstrategies.placed.call_site import call_site
from cnnstrategies.placed.messages import RefusedError
from cnnstrategies.spatial.layout import Bounds, RowLayout, split_view, viewed
from cnnstrategies.spatial.rows_tensor import Memory, RowsTensor, local_shape, memory_format_of

if TYPE_CHECKING:
    from cnnstrategies.spatial.parts import SpatialParts


def permute(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Reorder dimensions: permute, transpose and t."""
    tensor: RowsTensor = arguments["self"]
    dimensions = tensor.dim()
    order = list(range(dimensions))
    if "dims" in arguments:
        order = [dimension % dimensions for dimension in arguments["dims"]]
    elif dimensions > 1:
        first, second = arguments.get("dim0", 0) % dimensions, arguments.get("dim1", 1) % dimensions
        order[first], order[second] = order[second], order[first]
    layout = _layout_of(tensor)
    return _alias(parts, tensor, func(**(arguments | {"self": tensor.rows})), layout.at(order.index(layout.axis)))


def view(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Change the shape: view, reshape and their variants."""
    tensor: RowsTensor = arguments["self"]
    layout = _layout_of(tensor)
    if "size" not in arguments:
        return NotImplemented
    shape = _resolved(arguments["size"], tensor.numel())
    new, rows, memory = viewed(layout, tensor.shape, shape), tensor.rows, tensor.memory
    if new is None:
        coarse = split_view(layout, tensor.shape, shape)
        if coarse is None:
            return NotImplemented
        rows, memory = parts.part(tensor, coarse).contiguous(), Memory()
        new = viewed(coarse, tensor.shape, shape)
        assert new is not None
    local = local_shape(shape, new, parts.own(new.size))
    return RowsTensor.create(parts, rows.reshape(local) if not rows.numel() else rows.view(local), new, memory)


def unsqueeze(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Add a dimension."""
    tensor: RowsTensor = arguments["self"]
    layout, dimension = _layout_of(tensor), arguments["dim"] % (tensor.dim() + 1)
    return _alias(parts, tensor, tensor.rows.unsqueeze(dimension), layout.at(layout.axis + (dimension <= layout.axis)))


def squeeze(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Remove dimensions of size 1, unless one of them is divided."""
    tensor: RowsTensor = arguments["self"]
    layout = _layout_of(tensor)
    dimensions = arguments.get("dim", range(tensor.dim()))
    dimensions = [dimensions] if isinstance(dimensions, int) else dimensions
    removed = sorted({dimension % tensor.dim() for dimension in dimensions})
    removed = [dimension for dimension in removed if tensor.shape[dimension] == 1]
    if layout.axis in removed:
        return NotImplemented
    rows = tensor.rows
    for dimension in reversed(removed):
        rows = rows.squeeze(dimension)
    return _alias(parts, tensor, rows, layout.at(layout.axis - sum(dimension < layout.axis for dimension in removed)))


def expand(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Repeat a tensor along dimensions of size 1."""
    tensor: RowsTensor = arguments["self"]
    layout, size = _layout_of(tensor), list(arguments["size"])
    axis = layout.axis + len(size) - tensor.dim()
    if size[axis] not in (-1, tensor.shape[layout.axis]):
        return NotImplemented
    size[axis] = -1
    return _alias(parts, tensor, tensor.rows.expand(size), layout.at(axis))


def one_dimension(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Take parts along a dimension that is not divided: select, split, unbind, cumsum, softmax and similar."""
    tensor: RowsTensor = arguments["self"]
    layout, dimension = _layout_of(tensor), arguments["dim"] % tensor.dim()
    if dimension == layout.axis:
        return NotImplemented
    result = func(**(arguments | {"self": tensor.rows}))
    results = result if isinstance(result, (list, tuple)) else [result]
    is_removed = results[0].dim() < tensor.dim() and dimension < layout.axis
    wrapped = [_alias(parts, tensor, rows, layout.at(layout.axis - is_removed)) for rows in results]
    return type(result)(wrapped) if isinstance(result, (list, tuple)) else wrapped[0]


def slice_rows(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Take a slice of a dimension, with rows from other ranks if the dimension is divided."""
    tensor: RowsTensor = arguments["self"]
    layout, dimension = _layout_of(tensor), arguments["dim"] % tensor.dim()
    if dimension != layout.axis:
        return _alias(parts, tensor, func(**(arguments | {"self": tensor.rows})), layout)
    length = tensor.shape[dimension]
    start, stop, step = slice(arguments["start"], arguments["end"], arguments["step"]).indices(length)
    if (start, step) == (0, 1) and stop >= length:
        return _alias(parts, tensor, tensor.rows, layout)
    return take_rows(parts, tensor, range(start, stop, step))


def slice_backward(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Return the gradient of a tensor of which a slice or one index was taken."""
    grad: RowsTensor = arguments["grad_output"]
    layout, sizes = _layout_of(grad), list(arguments["input_sizes"])
    dimension = arguments["dim"] % len(sizes)
    axis = layout.axis + (len(sizes) > grad.dim() and dimension <= layout.axis)
    if dimension != axis or len(sizes) > grad.dim():
        sizes[axis] = layout.length(parts.own(layout.size))
        return RowsTensor.create(
            parts, func(**(arguments | {"grad_output": grad.rows, "input_sizes": sizes})), layout.at(axis)
        )
    start, _, step = slice(arguments["start"], arguments["end"], arguments["step"]).indices(sizes[dimension])
    if step != 1 or layout.outer > 1:
        return NotImplemented
    return shift_rows(parts, grad, start, sizes[dimension])


def pad(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Pad with a constant, or cut off where the padding is negative."""
    tensor: RowsTensor = arguments["self"]
    layout, padding = _layout_of(tensor), list(arguments["pad"])
    position = 2 * (tensor.dim() - 1 - layout.axis)
    if position >= len(padding):
        return RowsTensor.create(parts, func(**(arguments | {"self": tensor.rows})), layout)
    if layout.outer > 1:
        return NotImplemented
    before, after = padding[position : position + 2]
    padding[position : position + 2] = [0, 0]
    moved = shift_rows(parts, tensor, before, tensor.shape[layout.axis] + before + after, arguments["value"])
    if not any(padding):
        return moved
    return RowsTensor.create(parts, func(**(arguments | {"self": moved.rows, "pad": padding})), moved.row_layout)


def cat(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Concatenate tensors."""
    tensors = [tensor for tensor in arguments["tensors"] if tuple(tensor.shape) != (0,)]
    first = next(tensor for tensor in tensors if isinstance(tensor, RowsTensor))
    layout, dimension = _layout_of(first), arguments["dim"] % first.dim()
    if dimension != layout.axis:
        rows = [parts.part(tensor, layout) for tensor in tensors]
        return RowsTensor.create(parts, func(rows, dimension), layout)
    # Each rank gets its rows of the result from all tensors.
    size = sum(tensor.shape[dimension] for tensor in tensors)
    wanted, pieces, start = parts.bounds(size), [], 0
    for tensor in tensors:
        stop = start + tensor.shape[dimension]
        ranges = tuple((max(low, start) - start, max(min(high, stop), max(low, start)) - start) for low, high in wanted)
        pieces.append(_fetched(parts, tensor, dimension, ranges))
        start = stop
    return RowsTensor.create(parts, func(pieces, dimension), RowLayout(dimension, size))


def stack(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Concatenate tensors along a new dimension."""
    first = next(tensor for tensor in arguments["tensors"] if isinstance(tensor, RowsTensor))
    layout, dimension = _layout_of(first), arguments["dim"] % (first.dim() + 1)
    rows = [parts.part(tensor, layout) for tensor in arguments["tensors"]]
    return RowsTensor.create(parts, func(rows, dimension), layout.at(layout.axis + (dimension <= layout.axis)))


def flip(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Reverse dimensions."""
    tensor: RowsTensor = arguments["self"]
    layout = _layout_of(tensor)
    dimensions = {dimension % tensor.dim() for dimension in arguments["dims"]}
    others = sorted(dimensions - {layout.axis})
    flipped = RowsTensor.create(parts, func(tensor.rows, others), layout)
    if layout.axis not in dimensions:
        return flipped
    return take_rows(parts, flipped, range(tensor.shape[layout.axis] - 1, -1, -1))


def roll(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Roll dimensions."""
    tensor: RowsTensor = arguments["self"]
    layout = _layout_of(tensor)
    if not arguments["dims"] or layout.outer > 1:
        return NotImplemented
    shifts = {dimension % tensor.dim(): 0 for dimension in arguments["dims"]}
    for dimension, shift in zip(arguments["dims"], arguments["shifts"], strict=True):
        shifts[dimension % tensor.dim()] += shift
    length = tensor.shape[layout.axis]
    shift = shifts.pop(layout.axis, 0) % max(length, 1)
    rows = func(tensor.rows, list(shifts.values()), list(shifts)) if shifts else tensor.rows
    rolled = RowsTensor.create(parts, rows, layout)
    if not shift:
        return rolled
    wanted = parts.bounds(length)
    ends = [_fetched(parts, rolled, layout.axis, _clipped(wanted, by, length)) for by in (length - shift, -shift)]
    return RowsTensor.create(parts, torch.cat(ends, layout.axis), RowLayout(layout.axis, length))


def as_strided(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Refuse strides, which would be those of all rows.

    Raises:
        RefusedError: In each call. Autograd calls the operation for a tensor that was written through a view.
    """
    raise RefusedError(
        f"as_strided at {call_site()} needs the storage of all rows: use operations on dimensions, and run the program "
        "inside of `with parts:`"
    )


def index(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Take or put elements of a list of indices of one dimension that is not divided."""
    tensor, values = arguments["self"], arguments.get("values", arguments.get("source"))
    if not isinstance(tensor, RowsTensor):
        return NotImplemented
    layout = _layout_of(tensor)
    if "indices" in arguments:
        indexed = [(dimension, item) for dimension, item in enumerate(arguments["indices"]) if item is not None]
    else:
        indexed = [(arguments["dim"] % tensor.dim(), arguments["index"])]
    dimension, indices = indexed[0]
    is_list = len(indexed) == 1 and not isinstance(indices, RowsTensor) and indices.dim() == 1
    if not is_list or dimension == layout.axis or indices.dtype in (torch.bool, torch.uint8):
        return NotImplemented
    local = {"self": tensor.rows}
    if values is not None:
        if values.dim() != tensor.dim() or values.shape[layout.axis] != tensor.shape[layout.axis]:
            return NotImplemented
        local["values" if "values" in arguments else "source"] = parts.part(values, layout)
    result = func(**(arguments | local))
    return tensor if func.overloadpacket.__name__.endswith("_") else RowsTensor.create(parts, result, layout)


def pixel_shuffle(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Move channels into rows and columns."""
    tensor: RowsTensor = arguments["self"]
    layout = _layout_of(tensor)
    if layout.outer > 1 or layout.axis < tensor.dim() - 2:
        return NotImplemented
    layout = RowLayout(layout.axis, tensor.shape[layout.axis])
    rows, factor = parts.part(tensor, layout), arguments["upscale_factor"]
    *batch, channels, height, width = rows.shape
    # torch's own operation returns another shape if there are no rows.
    rows = rows.reshape(*batch, channels // factor**2, factor, factor, height, width)
    rows = rows.movedim((-2, -4, -1, -3), (-4, -3, -2, -1))
    rows = rows.reshape(*batch, channels // factor**2, height * factor, width * factor)
    return RowsTensor.create(parts, rows, RowLayout(layout.axis, layout.size, 1, factor))


def pixel_unshuffle(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Move rows and columns into channels."""
    tensor: RowsTensor = arguments["self"]
    layout, factor = _layout_of(tensor), arguments["downscale_factor"]
    if layout.outer > 1 or layout.axis < tensor.dim() - 2:
        return NotImplemented
    divided = RowLayout(layout.axis, tensor.shape[layout.axis] // factor, 1, factor)
    rows = parts.part(tensor, divided)
    *batch, channels, height, width = rows.shape
    rows = rows.reshape(*batch, channels, height // factor, factor, width // factor, factor)
    rows = rows.movedim((-3, -1, -4, -2), (-4, -3, -2, -1))
    rows = rows.reshape(*batch, channels * factor**2, height // factor, width // factor)
    return RowsTensor.create(parts, rows, RowLayout(layout.axis, divided.size))


def along_dimension(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Take or put elements along a dimension that is not divided: gather, scatter and scatter_add."""
    tensor = arguments["self"]
    first = next(value for value in arguments.values() if isinstance(value, RowsTensor))
    layout = _layout_of(first)
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    lengths = {value.shape[layout.axis] if value.dim() == first.dim() else -1 for value in tensors.values()}
    is_written = func.overloadpacket.__name__.endswith("_")
    if arguments["dim"] % first.dim() == layout.axis or len(lengths) > 1:
        return NotImplemented
    if is_written and getattr(tensor, "row_layout", None) != layout:
        return NotImplemented
    result = func(**(arguments | {name: parts.part(value, layout) for name, value in tensors.items()}))
    return tensor if is_written else RowsTensor.create(parts, result, layout)


def take_rows(parts: "SpatialParts", tensor: RowsTensor, indices: range) -> Any:
    """Return a tensor with the given rows of a tensor."""
    layout = _layout_of(tensor)
    if layout.outer > 1:
        return NotImplemented
    windows = []
    for low, high in parts.bounds(len(indices)):
        ends = (indices[low], indices[high - 1]) if low < high else (0, -1)
        windows.append((min(ends), max(ends) + 1) if low < high else (0, 0))
    rows = _fetched(parts, tensor, layout.axis, tuple(windows))
    if indices.step < 0:
        rows = rows.flip(layout.axis)
    if abs(indices.step) > 1:
        rows = rows[(slice(None),) * layout.axis + (slice(None, None, abs(indices.step)),)]
    rows = rows.contiguous(memory_format=memory_format_of(tensor))
    return RowsTensor.create(parts, rows, RowLayout(layout.axis, len(indices)))


def shift_rows(parts: "SpatialParts", tensor: RowsTensor, before: int, length: int, fill: float = 0) -> RowsTensor:
    """Return a tensor of another length in which the rows have been moved.

    Args:
        parts: The rules of this rank.
        tensor: The tensor.
        before: Number of rows that are added before the first row.
        length: Number of rows of the result.
        fill: Value of added rows.
    """
    axis = _layout_of(tensor).axis
    wanted = tuple((low - before, high - before) for low, high in parts.bounds(length))
    rows = _fetched(parts, tensor, axis, wanted, fill)
    return RowsTensor.create(parts, rows.contiguous(memory_format=memory_format_of(tensor)), RowLayout(axis, length))


def _fetched(parts: "SpatialParts", tensor: Tensor, axis: int, wanted: Bounds, fill: float = 0) -> Tensor:
    """Return ranges of the elements along a dimension, which is the divided one if the tensor is divided."""
    layout = RowLayout(axis, tensor.shape[axis])
    return parts.fetch(parts.part(tensor, layout), axis, parts.bounds(layout.size), wanted, fill)


def _clipped(ranges: Bounds, offset: int, length: int) -> Bounds:
    """Return the parts of moved ranges that are rows."""
    return tuple((min(max(low + offset, 0), length), min(max(high + offset, 0), length)) for low, high in ranges)


def _resolved(size: Any, elements: int) -> list[int]:
    """Return a shape without -1."""
    shape = list(size)
    if -1 in shape:
        known = 1
        for length in shape:
            known *= length if length != -1 else 1
        shape[shape.index(-1)] = elements // known if known else 0
    return shape


def _layout_of(tensor: RowsTensor) -> RowLayout:
    assert tensor.row_layout is not None
    return tensor.row_layout


def _alias(parts: "SpatialParts", tensor: RowsTensor, rows: Tensor, layout: RowLayout) -> RowsTensor:
    return RowsTensor.create(parts, rows, layout, tensor.memory)
