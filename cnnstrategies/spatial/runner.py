"""Run an operation with divided tensors: by its rule, or on all ranks with all rows."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

from cnnstrategies._torch_private import schema_of
from cnnstrategies.placed.call_site import call_site
from cnnstrategies.placed.messages import RefusedError
from cnnstrategies.placed.operations import with_tensors
from cnnstrategies.spatial import convolutions, losses, matrices, norms, pooling, reductions, resampling, views
from cnnstrategies.spatial.pointwise import draw, dropout, is_pointwise, new_like, pointwise
from cnnstrategies.spatial.rows_tensor import Origin, RowsTensor, rows_in

if TYPE_CHECKING:
    from cnnstrategies.spatial.parts import SpatialParts

# The table of rules. An operation that is not in the table runs on all ranks with all rows, which is always right.
# A rule gets the rules of the rank, the operation and its arguments by name, and returns the results.
# `NotImplemented` means that the operation needs all rows.
Rule = Callable[[Any, Any, dict[str, Any]], Any]

_GROUPS: Mapping[Rule, str] = {
    convolutions.convolution: "convolution",
    convolutions.convolution_backward: "convolution_backward",
    norms.batch_norm: "native_batch_norm cudnn_batch_norm miopen_batch_norm",
    norms.batch_norm_backward: "native_batch_norm_backward cudnn_batch_norm_backward miopen_batch_norm_backward",
    norms.group_norm: "native_group_norm",
    norms.group_norm_backward: "native_group_norm_backward",
    norms.layer_norm: "native_layer_norm",
    norms.layer_norm_backward: "native_layer_norm_backward",
    matrices.product: "mm bmm addmm baddbmm",
    pooling.max_pool: "max_pool2d_with_indices max_pool3d_with_indices",
    pooling.max_pool_backward: "max_pool2d_with_indices_backward max_pool3d_with_indices_backward",
    pooling.average_pool: "avg_pool2d avg_pool3d",
    pooling.average_pool_backward: "avg_pool2d_backward avg_pool3d_backward",
    resampling.resample: (
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
        "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d "
        "_adaptive_avg_pool2d _adaptive_avg_pool3d reflection_pad1d reflection_pad2d reflection_pad3d "
        "replication_pad1d replication_pad2d replication_pad3d"
    ),
    resampling.resample_backward: (
        "upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward "
        "_upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward "
        "upsample_linear1d_backward upsample_bilinear2d_backward upsample_trilinear3d_backward "
        "upsample_bicubic2d_backward _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward "
        "reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward "
        "replication_pad2d_backward replication_pad3d_backward"
    ),
    losses.element_loss: "mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits",
    losses.element_loss_backward: "mse_loss_backward smooth_l1_loss_backward huber_loss_backward "
    "soft_margin_loss_backward binary_cross_entropy_backward",
    losses.class_loss: "nll_loss_forward nll_loss2d_forward",
    losses.class_loss_backward: "nll_loss_backward nll_loss2d_backward",
    reductions.mean: "mean",
    reductions.variance: "var std var_mean std_mean",
    reductions.extreme: "max min",
    reductions.local_reduction: "argmax argmin linalg_vector_norm logsumexp",
    reductions.softmax: "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data glu_backward",
    reductions.reduction("sum"): "sum",
    reductions.reduction("max"): "amax any",
    reductions.reduction("min"): "amin all",
    draw: (
        "bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_ rand_like randn_like "
        "randint_like"
    ),
    dropout: "native_dropout",
    new_like: "new_empty new_zeros new_ones new_full new_empty_strided",
    views.permute: "permute transpose t",
    views.view: "view _unsafe_view _reshape_alias",
    views.unsqueeze: "unsqueeze",
    views.squeeze: "squeeze",
    views.expand: "expand",
    views.one_dimension: "select split split_with_sizes unbind cumsum cumprod glu",
    views.index: "index index_put index_put_ _index_put_impl_ index_select index_add index_add_",
    views.along_dimension: "gather scatter scatter_ scatter_add scatter_add_",
    views.slice_rows: "slice",
    views.slice_backward: "slice_backward select_backward",
    views.as_strided: "as_strided",
    views.pixel_shuffle: "pixel_shuffle",
    views.pixel_unshuffle: "pixel_unshuffle",
    views.pad: "constant_pad_nd",
    views.cat: "cat",
    views.stack: "stack",
    views.flip: "flip",
    views.roll: "roll",
}
NAMES: Mapping[str, Rule] = {name: rule for rule, names in _GROUPS.items() for name in names.split()}


def rule_of(func: Any) -> Rule | None:
    """Return an operation's rule."""
    namespace, _, name = schema_of(func).name.partition("::")
    if namespace != "aten":
        return None
    return NAMES.get(name) or (pointwise if is_pointwise(func) else None)


class OperationFacts:
    """Facts about an operation that do not depend on its operands.

    Attributes:
        name: Name for messages.
        rule: The operation's rule; None if all ranks run it with all rows.
        written: Positions and names of the arguments that the operation writes.
        is_view: Whether the result is a view of the first argument.
        arguments: Names and defaults of the operation's arguments.
    """

    def __init__(self, func: Any) -> None:
        schema = schema_of(func)
        self.name: str = func.overloadpacket.__name__
        self.rule: Rule | None = rule_of(func)
        self.written = [
            (position, argument.name)
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self.is_view = any(
            result.alias_info is not None and not result.alias_info.is_write for result in schema.returns
        )
        self.names = [argument.name for argument in schema.arguments]
        self.defaults = {argument.name: argument.default_value for argument in schema.arguments}

    def written_values(self, args: Any, kwargs: Any) -> list[Any]:
        """Return the arguments that the operation writes: tensors, lists of tensors, or None."""
        return [args[position] if position < len(args) else kwargs.get(name) for position, name in self.written]

    def bound(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """Return all arguments by name."""
        return {**self.defaults, **dict(zip(self.names, args, strict=False)), **kwargs}


facts_of: Callable[[Any], OperationFacts] = cache(OperationFacts)


def run(parts: "SpatialParts", func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation, of which some operands are divided."""
    facts = facts_of(func)
    parts.operation = facts.name
    operands = list(rows_in(args, kwargs))
    written = list(rows_in(facts.written_values(args, kwargs), {})) if facts.written else []
    viewed, call = (args[0], (func, args[1:], kwargs)) if facts.is_view else (None, None)
    if any(tensor.origin is not None for tensor in operands):
        for tensor in operands:
            refresh(parts, tensor)
        args, kwargs = with_tensors(_without_origin, args, kwargs)
        operands = list(rows_in(args, kwargs))
    result = NotImplemented if operands else func(*args, **kwargs)
    if operands and facts.rule is not None:
        result = facts.rule(parts, func, facts.bound(args, kwargs))
    if result is NotImplemented:
        result = _run_whole(parts, func, facts, operands, args, kwargs)
    else:
        result = _mapped(parts.with_enough_rows, result)
    for tensor in written:
        tensor.memory.writes += 1
        write_through(parts, tensor)
        if result is tensor.rows:
            result = tensor
    if type(viewed) is not RowsTensor:
        return result
    if isinstance(result, Tensor):
        return with_origin(parts, viewed, result, call, 0)
    return [with_origin(parts, viewed, view, call, index) for index, view in enumerate(result)]


def _without_origin(tensor: Tensor) -> Tensor:
    """Return a plain tensor for a copy that all ranks have."""
    return tensor.rows if type(tensor) is RowsTensor and tensor.row_layout is None else tensor


def _run_whole(
    parts: "SpatialParts", func: Any, facts: OperationFacts, operands: list[RowsTensor], args: Any, kwargs: Any
) -> Any:
    """Run an operation on all ranks with all rows."""
    wholes = {id(tensor): parts.gather(tensor, facts.name) for tensor in operands}
    whole_args, whole_kwargs = with_tensors(lambda tensor: wholes.get(id(tensor), tensor), args, kwargs)
    result = func(*whole_args, **whole_kwargs)
    for tensor in rows_in(facts.written_values(args, kwargs), {}):
        if wholes[id(tensor)].shape != tensor.shape:
            raise RefusedError(f"{facts.name} at {call_site()} changes the shape of {tensor!r}: use a new tensor")
        assert tensor.row_layout is not None
        tensor.rows.copy_(parts.take(wholes[id(tensor)], tensor.row_layout))
    originals = {id(wholes[id(tensor)]): tensor for tensor in operands}

    def returned(tensor: Tensor) -> Tensor:
        return originals[id(tensor)] if id(tensor) in originals else _divided_again(parts, operands[0], tensor)

    return _mapped(returned, result)


def _divided_again(parts: "SpatialParts", operand: RowsTensor, whole: Tensor) -> Tensor:
    """Return a result, divided as an operand if it has as many elements there."""
    layout = operand.row_layout
    assert layout is not None
    if whole.dim() != operand.dim() or whole.shape[layout.axis] != operand.shape[layout.axis]:
        return whole
    return RowsTensor.create(parts, parts.take(whole, layout).clone(), layout)


def _mapped(function: Callable[[Tensor], Tensor], result: Any) -> Any:
    """Return an operation's results with ``function(tensor)`` in place of each tensor."""
    if isinstance(result, Tensor):
        return function(result)
    if isinstance(result, (list, tuple)):
        return type(result)(_mapped(function, item) for item in result)
    return result


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
