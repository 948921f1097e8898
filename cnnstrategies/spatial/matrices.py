"""Products of matrices, such as linear layers of pixels and attention between them."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from cnnstrategies.spatial.rows_tensor import RowsTensor

if TYPE_CHECKING:
    from cnnstrategies.spatial.parts import SpatialParts

_NAMES = {"mm": ("self", "mat2"), "bmm": ("self", "mat2"), "addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2")}


def product(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Multiply matrices, or batches of matrices, and add a tensor."""
    if "out" in arguments:
        return NotImplemented
    name: str = func.overloadpacket.__name__
    first_name, second_name = _NAMES[name]
    first, second = arguments[first_name], arguments[second_name]
    inside = first.dim() - 1, second.dim() - 2
    first_layout, second_layout = (
        tensor.row_layout if isinstance(tensor, RowsTensor) else None for tensor in (first, second)
    )
    is_sum = "add" in name
    if first_layout is None and second_layout is None:
        return NotImplemented
    if (first_layout is None or first_layout.axis == inside[0]) and (
        second_layout is None or second_layout.axis == inside[1]
    ):
        # The rows are summed, so each rank contributes the products of its rows.
        layout = first_layout or second_layout
        assert layout is not None
        products = parts.part(first, layout.at(inside[0])) @ parts.part(second, layout.at(inside[1]))
        total = parts.reduce(products)
        return total.mul_(arguments["alpha"]).add_(arguments["self"] * arguments["beta"]) if is_sum else total
    if first_layout is not None and first_layout.axis != inside[0]:
        layout = first_layout
        is_batch = layout.axis == 0 and first.dim() == 3
        rows = {first_name: first.rows, second_name: _other(parts, second, name, layout if is_batch else None)}
    else:
        assert second_layout is not None
        layout = second_layout
        is_batch = layout.axis == 0 and first.dim() == 3
        rows = {second_name: second.rows, first_name: _other(parts, first, name, layout if is_batch else None)}
    if is_sum:
        added = arguments["self"]
        axis = layout.axis - first.dim() + added.dim()
        has_rows = axis >= 0 and added.shape[axis] > 1
        rows["self"] = parts.part(added, layout.at(axis)) if has_rows else parts.gather(added, name)
    return RowsTensor.create(parts, func(**(arguments | rows)), layout)


def _other(parts: "SpatialParts", tensor: Tensor, name: str, layout: Any) -> Tensor:
    return parts.gather(tensor, name) if layout is None else parts.part(tensor, layout, name)
