"""Random numbers: every rank draws those of the whole tensor, and keeps its rows, as one device would draw them."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cnnstrategies.spatial.layout import RowLayout
from cnnstrategies.spatial.rows_tensor import RowsTensor

if TYPE_CHECKING:
    from cnnstrategies.spatial.parts import SpatialParts


def draw(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Draw random numbers for a divided tensor, or in place of its values."""
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
