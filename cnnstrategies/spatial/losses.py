"""Losses with a reduction inside: each rank takes the loss of its rows, and the ranks sum and divide."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from cnnstrategies.spatial.layout import RowLayout
from cnnstrategies.spatial.rows_tensor import RowsTensor

if TYPE_CHECKING:
    from cnnstrategies.spatial.parts import SpatialParts

_NONE, _MEAN, _SUM = 0, 1, 2


def element_loss(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Compute a loss whose elements are losses of elements, such as the mean squared error."""
    layout, local = _local(parts, arguments)
    if layout is None:
        return NotImplemented
    reduction = arguments["reduction"]
    if reduction == _NONE:
        return RowsTensor.create(parts, func(**local), layout)
    total = parts.reduce(func(**(local | {"reduction": _SUM})))
    return total.div_(arguments["self"].numel()) if reduction == _MEAN else total


def element_loss_backward(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Compute the gradient of such a loss."""
    layout, local = _local(parts, arguments)
    if layout is None:
        return NotImplemented
    if arguments["reduction"] == _MEAN:
        local |= {"grad_output": arguments["grad_output"] / arguments["self"].numel(), "reduction": _SUM}
    return RowsTensor.create(parts, func(**local), layout)


def class_loss(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Compute the negative log-likelihood of maps. The divisor of a mean is the weight of all valid pixels."""
    layouts = _class_layouts(arguments)
    if layouts is None:
        return NotImplemented
    local = _local_classes(parts, arguments, layouts)
    if arguments["reduction"] == _NONE:
        result, weight = func(**local)
        return RowsTensor.create(parts, result, layouts[1]), weight
    result, weight = func(**(local | {"reduction": _SUM}))
    result, weight = parts.reduce(result), parts.reduce(weight)
    return (result / weight if arguments["reduction"] == _MEAN else result), weight


def class_loss_backward(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Compute the gradient of the negative log-likelihood of maps."""
    layouts = _class_layouts(arguments)
    if layouts is None:
        return NotImplemented
    local = _local_classes(parts, arguments, layouts)
    if arguments["reduction"] == _NONE:
        local["grad_output"] = parts.part(arguments["grad_output"], layouts[1])
    return RowsTensor.create(parts, func(**local), layouts[0])


def _class_layouts(arguments: dict[str, Any]) -> tuple[RowLayout, RowLayout] | None:
    """Return the layouts of the scores of all classes, and of the targets."""
    scores, targets = arguments["self"], arguments["target"]
    if isinstance(scores, RowsTensor):
        layout = scores.row_layout
        assert layout is not None
        return None if layout.axis == 1 else (layout, layout.at(max(layout.axis - 1, 0)))
    if not isinstance(targets, RowsTensor):
        return None
    layout = targets.row_layout
    assert layout is not None
    return layout.at(layout.axis + (layout.axis > 0)), layout


def _local_classes(
    parts: "SpatialParts", arguments: dict[str, Any], layouts: tuple[RowLayout, RowLayout]
) -> dict[str, Any]:
    """Return the arguments with this rank's rows of the scores and of the targets."""
    pairs = zip(("self", "target"), layouts, strict=True)
    return arguments | {name: parts.part(arguments[name], layout) for name, layout in pairs}


def _local(parts: "SpatialParts", arguments: dict[str, Any]) -> tuple[RowLayout | None, dict[str, Any]]:
    """Return the layout of the elements, and the arguments with this rank's rows of the tensors."""
    names = [name for name in ("self", "target", "weight", "pos_weight") if isinstance(arguments.get(name), Tensor)]
    shape = arguments["self"].shape
    if arguments["target"].shape != shape:
        return None, {}
    first = next(arguments[name] for name in (*names, "grad_output") if isinstance(arguments.get(name), RowsTensor))
    layout = first.row_layout
    assert layout is not None
    if first.shape != shape:
        return None, {}
    local = dict(arguments)
    if "grad_output" in arguments and arguments["grad_output"].shape == shape:
        names.append("grad_output")
    for name in names:
        tensor = arguments[name]
        axis = layout.axis - len(shape) + tensor.dim()
        if axis >= 0 and tensor.shape[axis] == shape[layout.axis]:
            local[name] = parts.part(tensor, layout.at(axis))
        else:
            local[name] = parts.gather(tensor, "an operand that is repeated for each row")
    return layout, local
