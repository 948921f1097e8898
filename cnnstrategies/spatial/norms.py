"""Normalisation with the statistics of whole images."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cnnstrategies._torch_private import schema_of
from cnnstrategies.spatial.rows_tensor import RowsTensor

if TYPE_CHECKING:
    from cnnstrategies.spatial.parts import SpatialParts

# Dtype in which statistics are computed.
STATISTICS = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def batch_norm(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Run batch norm. Its statistics are those of all rows, and so are the running statistics."""
    source = arguments["input"]
    if not isinstance(source, RowsTensor) or source.row_layout is None or source.row_layout.axis == 1:
        return NotImplemented
    layout, rows = source.row_layout, source.rows
    running = arguments.get("running_mean"), arguments.get("running_var")
    weight, bias, eps = (
        arguments["weight"],
        arguments["bias"],
        arguments["epsilon" if "epsilon" in arguments else "eps"],
    )
    if not arguments.get("training", True):
        mean, variance = running
        assert mean is not None
        assert variance is not None
        inverse = mean.new_empty(0)
        saved = (inverse, inverse)
    else:
        mean, variance = statistics(parts, rows, [dimension for dimension in range(rows.dim()) if dimension != 1])
        saved = (mean, torch.rsqrt(variance + eps))
        if running[0] is not None and running[1] is not None:
            count = source.numel() // source.shape[1]
            momentum = arguments["momentum" if "momentum" in arguments else "exponential_average_factor"]
            running[0].mul_(1 - momentum).add_(mean, alpha=momentum)
            running[1].mul_(1 - momentum).add_(variance * (count / max(count - 1, 1)), alpha=momentum)
    result = RowsTensor.create(parts, _normalised(rows, weight, bias, mean, variance, eps), layout)
    reserve = (rows.new_empty(0, dtype=torch.uint8),) if len(schema_of(func).returns) == 4 else ()
    return (result, *saved, *reserve)


def batch_norm_backward(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Compute the gradients of batch norm."""
    source = arguments["input"]
    if not isinstance(source, RowsTensor) or source.row_layout is None or source.row_layout.axis == 1:
        return NotImplemented
    layout, rows, weight = source.row_layout, source.rows, arguments["weight"]
    grad = parts.part(arguments["grad_out" if "grad_out" in arguments else "grad_output"], layout)
    is_training = arguments.get("train", True)
    mask = arguments.get("output_mask", [True, True, True])
    if is_training:
        mean, inverse = arguments.get("save_mean"), arguments.get("save_invstd", arguments.get("save_var"))
    else:
        mean, variance = arguments["running_mean"], arguments["running_var"]
        inverse = torch.rsqrt(variance + arguments["eps"])
    assert mean is not None
    assert inverse is not None
    # In evaluation mode, torch's own operation returns the sums of the gradients, and of the gradients times the
    # normalised values.
    _, products, sums = torch.ops.aten.native_batch_norm_backward(
        grad, rows, None, mean, inverse.square().reciprocal(), None, None, False, 0.0, [False, True, True]
    )
    products, sums = parts.reduce(torch.stack([products, sums]))
    input_grad = None
    if mask[0]:
        scale = inverse if weight is None else inverse * weight
        shape = [-1 if dimension == 1 else 1 for dimension in range(rows.dim())]
        if is_training:
            count = source.numel() // source.shape[1]
            slope = -scale * inverse * products / count
            shift = -(slope * mean + scale * sums / count)
            input_grad = _scaled(rows, slope, shift).addcmul_(grad, scale.view(shape))
        else:
            input_grad = grad * scale.view(shape)
        input_grad = RowsTensor.create(parts, input_grad.to(rows.dtype), layout)
    return input_grad, products if mask[1] else None, sums if mask[2] else None


def statistics(
    parts: "SpatialParts", rows: Tensor, dimensions: list[int], keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the mean and the biased variance over all rows, computed by Chan's formula from those of each rank.

    Args:
        parts: The rules of this rank.
        rows: This rank's rows.
        dimensions: The dimensions over which the values are taken, of which the divided one is one.
        keepdim: Whether the results keep these dimensions.
    """
    values = rows.to(STATISTICS.get(rows.dtype, rows.dtype))
    if not rows.numel():
        mean = values.sum(dimensions, keepdim=keepdim)
        variance = torch.zeros_like(mean)
    elif not (keepdim or rows.is_meta) and dimensions == [dim for dim in range(rows.dim()) if dim != 1]:
        # This operation is several times as fast as `var_mean`. It does not exist on the meta device.
        mean, variance = torch.batch_norm_update_stats(values, None, None, 0.0)
    else:
        variance, mean = torch.var_mean(values, dimensions, correction=0, keepdim=keepdim)
    count = torch.full_like(mean, rows.numel() / max(mean.numel(), 1))
    all_ranks = mean.new_zeros((parts.count, 3, *mean.shape))
    all_ranks[parts.rank] = torch.stack([count, mean, variance])
    counts, means, variances = parts.reduce(all_ranks).unbind(1)
    total = counts.sum(0)
    mean = (counts * means).sum(0) / total
    return mean, (counts * (variances + (means - mean).square())).sum(0) / total


def _normalised(
    rows: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
) -> Tensor:
    if weight is not None:
        mean, variance = mean.to(weight.dtype), variance.to(weight.dtype)
    result: Tensor = torch.ops.aten.native_batch_norm(rows, weight, bias, mean, variance, False, 0.0, eps)[0]
    return result


def _scaled(rows: Tensor, slope: Tensor, shift: Tensor) -> Tensor:
    """Return ``rows * slope + shift`` with factors and terms of channels."""
    if rows.dtype == slope.dtype:
        # Batch norm in evaluation mode takes half as long on a CPU as an operation on tensors of two shapes.
        return _normalised(rows, slope, shift, torch.zeros_like(shift), torch.ones_like(slope), 0.0)
    shape = [-1 if dimension == 1 else 1 for dimension in range(rows.dim())]
    return torch.addcmul(shift.view(shape), rows, slope.view(shape))


def group_norm(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Run group norm with the statistics of all rows."""
    source, (batch, groups) = arguments["input"], (arguments["N"], arguments["group"])
    if not isinstance(source, RowsTensor) or source.row_layout is None or source.row_layout.axis < 2:
        return NotImplemented
    rows, weight, bias = source.rows, arguments["weight"], arguments["bias"]
    mean, variance = statistics(parts, rows.reshape(batch * groups, -1), [1])
    mean, inverse = mean.view(batch, groups), torch.rsqrt(variance + arguments["eps"]).view(batch, groups)
    scale = _by_channel(inverse, rows) * (1 if weight is None else weight)
    shift = -_by_channel(mean, rows) * scale + (0 if bias is None else bias)
    result = torch.addcmul(_expanded(shift, rows), rows, _expanded(scale, rows)).to(rows.dtype)
    return RowsTensor.create(parts, result, source.row_layout), mean.to(rows.dtype), inverse.to(rows.dtype)


def group_norm_backward(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Compute the gradients of group norm."""
    source, groups = arguments["input"], arguments["group"]
    if not isinstance(source, RowsTensor) or source.row_layout is None or source.row_layout.axis < 2:
        return NotImplemented
    rows, weight, layout = source.rows, arguments["weight"], source.row_layout
    grad = parts.part(arguments["grad_out"], layout)
    mean, inverse = arguments["mean"], arguments["rstd"]
    spatial = list(range(2, rows.dim()))
    dtype = STATISTICS.get(rows.dtype, rows.dtype)
    products, sums = parts.reduce(
        torch.stack([(grad * rows).sum(spatial, dtype=dtype), grad.sum(spatial, dtype=dtype)])
    )
    channel_mean, channel_inverse = _by_channel(mean, rows), _by_channel(inverse, rows)
    weighted = [values if weight is None else values * weight for values in (products, sums)]
    of_group = [values.view(*mean.shape, -1).sum(2) for values in weighted]
    count = source.numel() // source.shape[0] // groups
    slope = (of_group[1] * mean - of_group[0]) * inverse**3 / count
    shift = -slope * mean - of_group[1] * inverse / count
    scale = channel_inverse if weight is None else channel_inverse * weight
    input_grad = torch.addcmul(_expanded(_by_channel(shift, rows), rows), grad, _expanded(scale, rows))
    input_grad = input_grad.addcmul_(rows, _expanded(_by_channel(slope, rows), rows)).to(rows.dtype)
    mask = arguments["output_mask"]
    return (
        RowsTensor.create(parts, input_grad, layout) if mask[0] else None,
        ((products - sums * channel_mean) * channel_inverse).sum(0).to(rows.dtype) if mask[1] else None,
        sums.sum(0).to(rows.dtype) if mask[2] else None,
    )


def layer_norm(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Run layer norm of dimensions that are not divided."""
    source = arguments["input"]
    if not isinstance(source, RowsTensor) or not _is_outside(source, arguments["normalized_shape"]):
        return NotImplemented
    results = func(**(arguments | {"input": source.rows}))
    return tuple(RowsTensor.create(parts, rows, source.row_layout) for rows in results)


def layer_norm_backward(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Compute the gradients of layer norm."""
    source = arguments["input"]
    if not isinstance(source, RowsTensor) or not _is_outside(source, arguments["normalized_shape"]):
        return NotImplemented
    layout = source.row_layout
    assert layout is not None
    local = {name: parts.part(arguments[name], layout) for name in ("grad_out", "input", "mean", "rstd")}
    input_grad, *grads = func(**(arguments | local))
    if input_grad is not None:
        input_grad = RowsTensor.create(parts, input_grad, layout)
    return input_grad, *(None if grad is None else parts.reduce(grad) for grad in grads)


def _is_outside(source: RowsTensor, normalized_shape: list[int]) -> bool:
    """Whether the divided dimension is not normalised."""
    return source.row_layout is not None and source.row_layout.axis < source.dim() - len(normalized_shape)


def _by_channel(values: Tensor, rows: Tensor) -> Tensor:
    """Return values of groups, in shape (batch, groups), for each channel."""
    return values.repeat_interleave(rows.shape[1] // values.shape[1], 1)


def _expanded(values: Tensor, rows: Tensor) -> Tensor:
    """Return values of channels as a tensor that can be multiplied by images."""
    return values.view(*values.shape, *(1,) * (rows.dim() - 2))
