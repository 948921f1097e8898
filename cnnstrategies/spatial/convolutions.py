"""Convolutions: each rank fetches the rows at the edges of its part, and returns their gradients to their owners."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from cnnstrategies.spatial.edges import Edges
from cnnstrategies.spatial.gradient_sums import sum_gradients
from cnnstrategies.spatial.layout import Bounds, RowLayout, kernel_windows
from cnnstrategies.spatial.rows_tensor import RowsTensor, memory_format_of

if TYPE_CHECKING:
    from cnnstrategies.spatial.parts import SpatialParts

# Least number of elements of a rank's rows for each element of the weight with which the edges are convolved by
# themselves. This reads the weight again, which costs more than a copy of a few rows.
ROWS_PER_WEIGHT = 1


def convolution(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Run a convolution or a transposed convolution."""
    source = arguments["input"]
    if not _is_spatial(arguments) or not isinstance(source, RowsTensor):
        return NotImplemented
    plan = _Kernel(parts, arguments, source)
    if arguments["transposed"]:
        return plan.transposed(func, arguments)
    rows = parts.part(source, plan.inputs)
    if plan.is_local:
        return RowsTensor.create(parts, func(**(arguments | {"input": rows})), plan.outputs)
    if plan.edges is not None:
        return RowsTensor.create(parts, plan.edges.run(parts, func, arguments, rows, plan.padding), plan.outputs)
    window = parts.fetch(rows, plan.axis, plan.held, plan.windows)
    if not window.shape[plan.axis]:
        return RowsTensor.create(parts, plan.empty(window, arguments), plan.outputs)
    return RowsTensor.create(parts, func(**(arguments | {"input": window, "padding": plan.padding})), plan.outputs)


def convolution_backward(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Compute the gradients of a convolution or of a transposed convolution."""
    source = arguments["input"]
    if not _is_spatial(arguments) or not isinstance(source, RowsTensor):
        return NotImplemented
    plan = _Kernel(parts, arguments, source)
    wants_input, wants_weight, wants_bias = arguments["output_mask"]
    grad, rows = parts.part(arguments["grad_output"], plan.outputs), parts.part(source, plan.inputs)
    weight, bias_grad = arguments["weight"], None
    is_transposed, axis = arguments["transposed"], plan.axis
    if plan.edges is not None:
        gradients = plan.edges.run_backward(parts, func, arguments, rows, grad, plan.padding, plan.output_padding)
        return _wrapped(parts, gradients, plan.inputs, arguments["output_mask"])
    if is_transposed:
        # Windows of several ranks contain the same rows of the output.
        bias_grad = grad.sum([dimension for dimension in range(grad.dim()) if dimension != 1])
        grad = parts.fetch(grad, axis, plan.bounds_out, plan.windows)
    elif not plan.is_local:
        # Only the gradient of the weight depends on the values.
        rows = parts.fetch(rows, axis, plan.held, plan.windows) if wants_weight else plan.window_like(rows)
    mask = [wants_input, wants_weight, wants_bias and not is_transposed]
    local: dict[str, Any] = {"grad_output": grad, "input": rows, "output_mask": mask}
    if not plan.is_local:
        local |= {"padding": plan.padding, "output_padding": plan.output_padding}
    if rows.shape[axis] and grad.shape[axis]:
        input_grad, weight_grad, own_bias_grad = func(**(arguments | local))
        bias_grad = own_bias_grad if bias_grad is None else bias_grad
    else:
        input_grad, weight_grad = rows.new_zeros(rows.shape), weight.new_zeros(weight.shape)
        bias_grad = grad.new_zeros(grad.shape[1]) if bias_grad is None else bias_grad
    if wants_input and not is_transposed and not plan.is_local:
        input_grad = parts.give_back(input_grad, axis, plan.held, plan.windows)
    return _wrapped(parts, (input_grad, weight_grad, bias_grad), plan.inputs, arguments["output_mask"])


def _wrapped(parts: "SpatialParts", gradients: Any, inputs: RowLayout, mask: list[bool]) -> Any:
    """Return the gradients of a convolution, of which those of the weight and the bias are summed over the ranks."""
    wanted = {place: gradients[place] for place in (1, 2) if mask[place]}
    sums = sum_gradients(parts, "ConvolutionBackward0", wanted)
    return RowsTensor.create(parts, gradients[0], inputs) if mask[0] else None, sums.get(1), sums.get(2)


def _is_spatial(arguments: dict[str, Any]) -> bool:
    """Whether a dimension of the images is divided, and nothing else."""
    tensors = [value for value in arguments.values() if isinstance(value, RowsTensor)]
    layouts = {tensor.row_layout for tensor in tensors}
    return {"weight", "bias"}.isdisjoint(
        name for name, value in arguments.items() if isinstance(value, RowsTensor)
    ) and all(layout is not None and layout.axis >= 2 and layout.outer == 1 for layout in layouts)


class _Kernel:
    """The rows of each rank for one convolution.

    Attributes:
        axis: The dimension that is divided.
        inputs: Layout of the input.
        outputs: Layout of the output.
        held: Rows of the input that each rank has.
        bounds_out: Rows of the output that each rank has.
        windows: Rows that each rank's kernel reads. A transposed convolution writes these rows of its output.
        padding: Padding of the convolution of one rank, whose window contains the padding of the divided dimension.
        output_padding: The same for the padding of the output.
        edges: Edges of this rank's rows, if its own rows and the rows at the edges are convolved by themselves.
        is_local: Whether each output row needs only the input row with the same number.
    """

    def __init__(self, parts: "SpatialParts", arguments: dict[str, Any], source: RowsTensor) -> None:
        assert source.row_layout is not None
        self._parts, self.axis = parts, source.row_layout.axis
        dimension = self.axis - 2

        def at(name: str) -> int:
            values = arguments[name]
            return int(values[dimension if len(values) > 1 else 0])

        kernel, stride, padding, dilation = (
            arguments["weight"].shape[self.axis],
            *map(at, ("stride", "padding", "dilation")),
        )
        size = source.shape[self.axis]
        reach = dilation * (kernel - 1) + 1
        if arguments["transposed"]:
            size_out = (size - 1) * stride - 2 * padding + reach + at("output_padding")
        else:
            size_out = (size + 2 * padding - reach) // stride + 1
        self.inputs, self.outputs = RowLayout(self.axis, size), RowLayout(self.axis, size_out)
        self.held, self.bounds_out = parts.bounds(size), parts.bounds(size_out)
        fine = self.held if arguments["transposed"] else self.bounds_out
        self.windows: Bounds = kernel_windows(fine, kernel, stride, padding, dilation)
        spatial = source.dim() - 2
        self.padding, self.output_padding = (
            [0 if index == dimension else (values[index] if len(values) > 1 else values[0]) for index in range(spatial)]
            for values in (arguments["padding"], arguments["output_padding"])
        )
        self.edges: Edges | None = None
        has_many_rows = source.numel() // parts.count >= ROWS_PER_WEIGHT * arguments["weight"].numel()
        if not arguments["transposed"] and has_many_rows:
            form = (reach, stride, padding)
            self.edges = Edges.of(self.axis, self.held, self.bounds_out, self.windows, parts.rank, form)
        self.is_local = (kernel, stride, padding) == (1, 1, 0) and size == size_out and parts.own(size) > 0

    def transposed(self, func: Any, arguments: dict[str, Any]) -> RowsTensor:
        """Run a transposed convolution: several ranks may contribute to a row of the output."""
        parts, source = self._parts, arguments["input"]
        rows, bias = parts.part(source, self.inputs), arguments["bias"]
        if rows.shape[self.axis]:
            local = {"input": rows, "bias": None, "padding": self.padding, "output_padding": self.output_padding}
            values = func(**(arguments | local))
        else:
            values = self.empty(rows, arguments)
        values = parts.give_back(values, self.axis, self.bounds_out, self.windows)
        if bias is not None:
            values += bias.reshape(-1, *(1,) * (values.dim() - 2))
        return RowsTensor.create(parts, values, self.outputs)

    def empty(self, rows: Tensor, arguments: dict[str, Any]) -> Tensor:
        """Return the output of a rank without rows."""
        shape = list(rows.shape)
        weight, dimensions = arguments["weight"], range(2, rows.dim())
        shape[1] = weight.shape[1] * arguments["groups"] if arguments["transposed"] else weight.shape[0]
        for dimension in dimensions:
            values = [arguments[name] for name in ("stride", "padding", "dilation", "output_padding")]
            stride, padding, dilation, extra = (value[dimension - 2 if len(value) > 1 else 0] for value in values)
            reach = dilation * (weight.shape[dimension] - 1) + 1
            size = shape[dimension]
            if arguments["transposed"]:
                shape[dimension] = (size - 1) * stride - 2 * padding + reach + extra
            else:
                shape[dimension] = (size + 2 * padding - reach) // stride + 1
        shape[self.axis] = 0
        return rows.new_empty(shape)

    def window_like(self, rows: Tensor) -> Tensor:
        """Return a tensor with the shape of this rank's window, and without values."""
        low, high = self.windows[self._parts.rank]
        shape = list(rows.shape)
        shape[self.axis] = high - low
        return rows.new_empty(shape).contiguous(memory_format=memory_format_of(rows))
