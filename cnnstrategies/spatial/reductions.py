"""Reductions: each rank reduces its rows, and the ranks combine the results if rows are reduced."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from cnnstrategies.spatial.layout import RowLayout
from cnnstrategies.spatial.norms import STATISTICS, statistics
from cnnstrategies.spatial.rows_tensor import RowsTensor
from cnnstrategies.spatial.views import one_dimension

if TYPE_CHECKING:
    from cnnstrategies.spatial.parts import SpatialParts


def _dimensions(arguments: dict[str, Any], dimensions: int) -> list[int]:
    """Return the dimensions that are reduced."""
    value = arguments.get("dim")
    if value is None or value == []:
        return list(range(dimensions))
    return [dimension % dimensions for dimension in ([value] if isinstance(value, int) else value)]


def _kept(parts: "SpatialParts", rows: Tensor, layout: RowLayout, reduced: list[int], keepdim: bool) -> RowsTensor:
    """Return the result of a reduction of other dimensions than the divided one."""
    removed = 0 if keepdim else sum(dimension < layout.axis for dimension in reduced)
    return RowsTensor.create(parts, rows, layout.at(layout.axis - removed))


def reduction(operation: str) -> Callable[..., Any]:
    """Return the rule of a reduction whose results of several ranks are combined by a sum, maximum or minimum."""

    def rule(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
        tensor = arguments["self"]
        if not isinstance(tensor, RowsTensor) or tensor.row_layout is None or "out" in arguments:
            return NotImplemented
        layout, reduced = tensor.row_layout, _dimensions(arguments, tensor.dim())
        if layout.axis in reduced and operation != "sum" and layout.size < parts.count:
            return NotImplemented  # Some ranks have no rows of which they could return an extreme.
        result = func(**(arguments | {"self": tensor.rows}))
        if layout.axis in reduced:
            return parts.reduce(result, operation)
        return _kept(parts, result, layout, reduced, arguments.get("keepdim", False))

    return rule


def local_reduction(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Reduce dimensions that are not divided: logsumexp, argmax, and norms of vectors."""
    tensor: RowsTensor = arguments["self"]
    layout, reduced = tensor.row_layout, _dimensions(arguments, tensor.dim())
    assert layout is not None
    if layout.axis in reduced:
        return NotImplemented
    return _kept(parts, func(**(arguments | {"self": tensor.rows})), layout, reduced, arguments["keepdim"])


def extreme(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Return maxima or minima of a dimension with their positions, or the maximum or minimum of all elements."""
    tensor = arguments["self"]
    if "dim" in arguments:
        return one_dimension(parts, func, arguments)
    layout = tensor.row_layout if isinstance(tensor, RowsTensor) else None
    if "other" in arguments or layout is None or layout.size < parts.count:
        return NotImplemented
    return parts.reduce(func(tensor.rows), func.overloadpacket.__name__)


def mean(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Compute a mean."""
    tensor: RowsTensor = arguments["self"]
    layout, reduced = tensor.row_layout, _dimensions(arguments, tensor.dim())
    assert layout is not None
    if layout.axis not in reduced:
        return _kept(
            parts, func(**(arguments | {"self": tensor.rows})), layout, reduced, arguments.get("keepdim", False)
        )
    count = 1
    for dimension in reduced:
        count *= tensor.shape[dimension]
    dtype = arguments["dtype"] or tensor.dtype
    total = tensor.rows.sum(reduced, keepdim=arguments.get("keepdim", False), dtype=STATISTICS.get(dtype, dtype))
    return parts.reduce(total).div_(count).to(dtype)


def variance(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Compute a variance or a standard deviation, and for some operations the mean."""
    tensor: RowsTensor = arguments["self"]
    layout, reduced = tensor.row_layout, _dimensions(arguments, tensor.dim())
    assert layout is not None
    keepdim = arguments.get("keepdim", False)
    name = func.overloadpacket.__name__
    if layout.axis not in reduced:
        result = func(**(arguments | {"self": tensor.rows}))
        if isinstance(result, tuple):
            return tuple(_kept(parts, rows, layout, reduced, keepdim) for rows in result)
        return _kept(parts, result, layout, reduced, keepdim)
    correction = arguments.get("correction", 1 if arguments.get("unbiased", True) else 0)
    correction = 1 if correction is None else correction
    count = 1
    for dimension in reduced:
        count *= tensor.shape[dimension]
    average, spread = statistics(parts, tensor.rows, reduced, keepdim)
    spread = (spread * (count / (count - correction) if count > correction else float("nan"))).to(tensor.dtype)
    if name.startswith("std"):
        spread = spread.sqrt()
    return (spread, average.to(tensor.dtype)) if name.endswith("_mean") else spread


def softmax(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Run softmax, log_softmax or their gradients along a dimension that is not divided."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    first = next(value for value in tensors.values() if isinstance(value, RowsTensor))
    layout = first.row_layout
    assert layout is not None
    if arguments["dim"] % first.dim() == layout.axis:
        return NotImplemented
    rows = {name: parts.part(value, layout) for name, value in tensors.items()}
    return RowsTensor.create(parts, func(**(arguments | rows)), layout)
