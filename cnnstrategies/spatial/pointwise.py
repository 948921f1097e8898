"""Operations that compute each element by itself, random numbers, and new tensors with a divided tensor's shape."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cnnstrategies.spatial.layout import RowLayout
from cnnstrategies.spatial.rows_tensor import RowsTensor, local_shape, rows_in

if TYPE_CHECKING:
    from cnnstrategies.spatial.parts import SpatialParts

# Operations without torch's tag "pointwise" that compute each element by itself, or copy it.
NAMES = {
    "alias", "clone", "copy_", "detach", "detach_", "elu_backward", "empty_like", "fill_", "floor_divide", "full_like",
    "hardshrink_backward", "hardsigmoid_backward", "hardswish", "hardswish_", "hardswish_backward", "hardtanh_backward",
    "imag", "leaky_relu", "leaky_relu_", "leaky_relu_backward", "lift_fresh", "log_sigmoid_backward",
    "log_sigmoid_forward", "mish_backward", "native_dropout_backward", "ones_like", "_prelu_kernel",
    "_prelu_kernel_backward", "real", "rsub", "softplus_backward", "softshrink_backward", "_to_copy", "zero_",
    "zeros_like",
}  # fmt: skip


def is_pointwise(func: Any) -> bool:
    """Whether an operation computes each element by itself."""
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    name: str = func.overloadpacket.__name__
    if name in NAMES or torch.Tag.pointwise in func.tags:
        return True
    # Some operations have the tag, but not their variant that writes the operand.
    packet = getattr(torch.ops.aten, name[:-1], None) if name.endswith("_") else None
    overload = None if packet is None else getattr(packet, packet.overloads()[0])
    return overload is not None and torch.Tag.pointwise in overload.tags


def pointwise(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Run the operation on the rows of each rank, with the same rows of the other operands."""
    if "out" in arguments:
        return NotImplemented
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    divided = list(rows_in((), arguments))
    dimensions = max(tensor.dim() for tensor in tensors.values())
    is_written = func.overloadpacket.__name__.endswith("_")
    layout = _common_layout(divided, list(tensors.values()), dimensions)
    if is_written:
        target = arguments["self"]
        if not isinstance(target, RowsTensor) or target.dim() != dimensions:
            return NotImplemented
        layout = target.row_layout
    if layout is None:
        return NotImplemented
    local = {name: _operand(parts, tensor, layout, dimensions) for name, tensor in tensors.items()}
    result = func(**(arguments | local))
    if is_written:
        return target
    memory = divided[0].memory if func.overloadpacket.__name__ in ("alias", "detach", "lift_fresh", "real") else None

    def wrapped(rows: Tensor) -> RowsTensor:
        return RowsTensor.create(parts, rows, layout, memory)

    return tuple(map(wrapped, result)) if isinstance(result, tuple) else wrapped(result)


def _common_layout(divided: list[RowsTensor], tensors: list[Tensor], dimensions: int) -> RowLayout | None:
    """Return the layout of the result, or None if the rows of each divided operand are repeated in the result."""
    for tensor in divided:
        layout = tensor.row_layout
        assert layout is not None
        axis = layout.axis + dimensions - tensor.dim()
        if all(length in (1, tensor.shape[layout.axis]) for length in _lengths(tensors, axis - dimensions)):
            return layout.at(axis)
    return None


def _lengths(tensors: list[Tensor], axis: int) -> list[int]:
    return [tensor.shape[axis] for tensor in tensors if tensor.dim() >= -axis]


def _operand(parts: "SpatialParts", tensor: Tensor, layout: RowLayout, dimensions: int) -> Tensor:
    """Return the rows of an operand that belong to this rank's rows of the result."""
    axis = layout.axis - dimensions + tensor.dim()
    whole = layout.length(layout.size)
    if axis < 0 or tensor.shape[axis] == 1 != whole:
        return parts.gather(tensor, "an operand that is repeated for each row")
    return parts.part(tensor, layout.at(axis))


def new_like(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Create a tensor, which is divided if it has as many rows as the divided tensor."""
    source: RowsTensor = arguments["self"]
    layout, size = source.row_layout, list(arguments["size"])
    assert layout is not None
    local: dict[str, Any] = {"self": source.rows}
    if len(size) != source.dim() or size[layout.axis] != source.shape[layout.axis]:
        return func(**(arguments | local))
    if "stride" in arguments:
        if size != list(source.shape) or list(arguments["stride"]) != list(source.stride()):
            return NotImplemented
        local["stride"] = source.rows.stride()
    local["size"] = local_shape(size, layout, parts.own(layout.size))
    return RowsTensor.create(parts, func(**(arguments | local)), layout)


def draw(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Draw random numbers for a divided tensor, or in place of its values.

    Every rank draws those of the whole tensor, as one device would draw them, and keeps its rows.
    """
    tensor = arguments["self"]
    others = [value for name, value in arguments.items() if name != "self" and isinstance(value, Tensor)]
    if not isinstance(tensor, RowsTensor) or others:
        return NotImplemented
    layout = _layout_of(tensor)
    drawn = parts.take(func(**(arguments | {"self": _empty_whole(tensor)})), layout)
    if func.overloadpacket.__name__.endswith("_"):
        tensor.rows.copy_(drawn)
        return tensor
    return RowsTensor.create(parts, drawn.clone(), layout)


def dropout(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Set random elements to zero."""
    tensor = arguments["input"]
    layout, p = _layout_of(tensor), arguments["p"]
    if not (arguments["train"] is None or arguments["train"]) or p in (0, 1):
        return NotImplemented
    _, mask = func(**(arguments | {"input": _empty_whole(tensor).zero_()}))
    mask = parts.take(mask, layout).clone()
    kept = tensor.rows * mask * (1 / (1 - p))
    return RowsTensor.create(parts, kept, layout), RowsTensor.create(parts, mask, layout)


def _empty_whole(tensor: RowsTensor) -> Tensor:
    # Random numbers are drawn in the order of the elements in memory.
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _layout_of(tensor: RowsTensor) -> RowLayout:
    assert tensor.row_layout is not None
    return tensor.row_layout
