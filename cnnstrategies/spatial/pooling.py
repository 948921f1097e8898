"""Pooling: max pooling with positions in the whole image, and average pooling with the divisors of the whole image."""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cnnstrategies.spatial.layout import RowLayout, kernel_windows
from cnnstrategies.spatial.rows_tensor import RowsTensor

if TYPE_CHECKING:
    from cnnstrategies.spatial.parts import SpatialParts


def max_pool(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Run max pooling, which also returns the positions of the maxima."""
    pool = _Pool.of(parts, arguments)
    if pool is None:
        return NotImplemented
    lowest = -float("inf") if pool.rows.is_floating_point() else torch.iinfo(pool.rows.dtype).min
    window = parts.fetch(pool.rows, pool.axis, pool.held, pool.windows, lowest)
    if not window.shape[pool.axis]:
        values = window.new_empty(pool.shape_out)
        positions = torch.empty(pool.shape_out, dtype=torch.int64, device=window.device)
    else:
        values, positions = func(**(arguments | {"self": window} | pool.local))
        positions = pool.moved(positions, pool.local_length, pool.size, pool.first)
    return RowsTensor.create(parts, values, pool.outputs), RowsTensor.create(parts, positions, pool.outputs)


def max_pool_backward(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Compute the gradient of max pooling."""
    pool = _Pool.of(parts, arguments)
    if pool is None:
        return NotImplemented
    grad = parts.part(arguments["grad_output"], pool.outputs)
    positions = pool.moved(parts.part(arguments["indices"], pool.outputs), pool.size, pool.local_length, -pool.first)
    return pool.returned(func, arguments | {"grad_output": grad, "indices": positions}, grad)


def average_pool(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Run average pooling: sums of windows, divided by the numbers of elements in the whole image."""
    pool = _Pool.of(parts, arguments)
    if pool is None:
        return NotImplemented
    window = parts.fetch(pool.rows, pool.axis, pool.held, pool.windows)
    if not window.shape[pool.axis]:
        return RowsTensor.create(parts, window.new_empty(pool.shape_out), pool.outputs)
    sums = func(**(arguments | {"self": window} | pool.local | {"divisor_override": 1}))
    return RowsTensor.create(parts, sums / pool.divisor(arguments), pool.outputs)


def average_pool_backward(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Compute the gradient of average pooling."""
    pool = _Pool.of(parts, arguments)
    if pool is None:
        return NotImplemented
    grad = parts.part(arguments["grad_output"], pool.outputs) / pool.divisor(arguments)
    return pool.returned(func, arguments | {"grad_output": grad, "divisor_override": 1}, grad)


class _Pool:
    """The rows of each rank for one pooling.

    Attributes:
        axis: The dimension that is divided.
        size: Number of rows of the input.
        outputs: Layout of the output.
        shape_out: Shape of this rank's rows of the output.
        rows: This rank's rows of the input.
        held: Rows of the input that each rank has.
        windows: Rows of the input that each rank needs.
        first: First row of this rank's window.
        local_length: Number of rows of this rank's window.
        local: Arguments of the pooling of one rank, whose window contains the padding of the divided dimension.
    """

    @classmethod
    def of(cls, parts: "SpatialParts", arguments: dict[str, Any]) -> "_Pool | None":
        """Return the rows for a pooling, or None if another dimension than those of the images is divided."""
        source = arguments["self"]
        spatial = len(arguments["kernel_size"])
        if not isinstance(source, RowsTensor) or source.row_layout is None or source.row_layout.outer > 1:
            return None
        return cls(parts, arguments, source) if source.row_layout.axis >= source.dim() - spatial else None

    def __init__(self, parts: "SpatialParts", arguments: dict[str, Any], source: RowsTensor) -> None:
        assert source.row_layout is not None
        self._parts, self.axis, self.size = parts, source.row_layout.axis, source.shape[source.row_layout.axis]
        self._spatial = len(arguments["kernel_size"])
        dimension = self.axis - source.dim() + self._spatial
        self._forms = [_Form(arguments, source, index) for index in range(self._spatial)]
        form = self._forms[dimension]
        self.outputs = RowLayout(self.axis, form.size_out)
        self.rows, self.held = parts.part(source, RowLayout(self.axis, self.size)), parts.bounds(self.size)
        outputs = parts.bounds(form.size_out)
        self.windows = kernel_windows(outputs, form.kernel, form.stride, form.padding, form.dilation)
        self.first, last = self.windows[parts.rank]
        self.local_length = last - self.first
        self.shape_out = [*source.shape[: -self._spatial], *(form.size_out for form in self._forms)]
        self.shape_out[self.axis] = parts.own(form.size_out)
        padding = [form.padding for form in self._forms]
        padding[dimension] = 0
        self.local: dict[str, Any] = {
            "stride": [form.stride for form in self._forms], "padding": padding,
        }  # fmt: skip

    def moved(self, positions: Tensor, length: int, new_length: int, offset: int) -> Tensor:
        """Return positions in images with another number of rows. A position is an index into the flattened image."""
        dimension = self.axis - positions.dim() + self._spatial
        sizes = [form.size for form in self._forms]
        inner = prod(sizes[dimension + 1 :])
        if dimension == 0:
            return positions + offset * inner
        rest, block = positions % inner, positions // inner
        return (block // length * new_length + block % length + offset) * inner + rest

    def divisor(self, arguments: dict[str, Any]) -> Tensor | int:
        """Return the number of elements by which each sum is divided."""
        if arguments.get("divisor_override") is not None:
            return int(arguments["divisor_override"])
        low, high = self._parts.bounds(self.outputs.size)[self._parts.rank]
        total: Tensor | int = 1
        for index, form in enumerate(self._forms):
            counts = form.counts(arguments["count_include_pad"])
            if index == self.axis - self.rows.dim() + self._spatial:
                counts = counts[low:high]
            shape = [-1 if other == index else 1 for other in range(self._spatial)]
            total = total * torch.tensor(counts, dtype=torch.int64).view(shape)
        assert isinstance(total, Tensor)
        return total.to(self.rows.device)

    def returned(self, func: Any, arguments: dict[str, Any], grad: Tensor) -> RowsTensor:
        """Return the gradient of the input, to which several ranks contribute."""
        shape = list(self.rows.shape)
        shape[self.axis] = self.local_length
        window = self.rows.new_empty(1).expand(shape)
        values = (
            func(**(arguments | {"self": window.contiguous()} | self.local)) if grad.numel() else grad.new_zeros(shape)
        )
        return RowsTensor.create(
            self._parts,
            self._parts.give_back(values, self.axis, self.held, self.windows),
            RowLayout(self.axis, self.size),
        )


class _Form:
    """Sizes of a pooling along one dimension of the images."""

    def __init__(self, arguments: dict[str, Any], source: Tensor, index: int) -> None:
        def at(name: str, default: int) -> int:
            values: Sequence[int] = arguments.get(name) or [default]
            return int(values[index] if len(values) > 1 else values[0])

        spatial = len(arguments["kernel_size"])
        self.size = source.shape[index - spatial]
        self.kernel, self.padding, self.dilation = at("kernel_size", 1), at("padding", 0), at("dilation", 1)
        self.stride = at("stride", self.kernel)
        reach = self.dilation * (self.kernel - 1) + 1
        is_ceil = arguments["ceil_mode"]
        self.size_out = (self.size + 2 * self.padding - reach + (self.stride - 1 if is_ceil else 0)) // self.stride + 1
        if is_ceil and (self.size_out - 1) * self.stride >= self.size + self.padding:
            self.size_out -= 1

    def counts(self, includes_padding: bool) -> list[int]:
        """Return the number of elements in each window along this dimension."""
        starts = [output * self.stride - self.padding for output in range(self.size_out)]
        ends = [min(start + self.kernel, self.size + self.padding) for start in starts]
        if includes_padding:
            return [end - start for start, end in zip(starts, ends, strict=True)]
        return [min(end, self.size) - max(start, 0) for start, end in zip(starts, ends, strict=True)]
