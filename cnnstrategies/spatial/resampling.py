"""Resampling: an output row is a weighted sum of a few input rows.

Examples are interpolation, adaptive average pooling, and padding with rows of the image.

Along the divided dimension the rows and their weights are computed here, for all rows of the whole image. torch's own
operation resamples the other dimensions, for the rows of each rank.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cnnstrategies.spatial.layout import Bounds, RowLayout
from cnnstrategies.spatial.rows_tensor import RowsTensor, memory_format_of

if TYPE_CHECKING:
    from cnnstrategies.spatial.parts import SpatialParts


def resample(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Interpolate an image, or average its parts."""
    source = arguments["self"]
    size_out = _size_out(arguments, source.shape)
    plan = _Plan.of(parts, func, arguments, source.row_layout, list(source.shape), size_out, source.dtype)
    if plan is None:
        return NotImplemented
    window = parts.fetch(parts.part(source, RowLayout(plan.axis, plan.size)), plan.axis, plan.held, plan.windows)
    if not window.numel():
        shape = [*source.shape[: -len(size_out)], *size_out]
        shape[plan.axis] = parts.own(plan.outputs.size)
        return RowsTensor.create(parts, window.new_zeros(shape), plan.outputs)
    if plan.changes_others:
        window = func(**(arguments | {"self": window} | plan.local(window.shape[plan.axis])))
    result = plan.rows_of(window).contiguous(memory_format=_memory_format(func, arguments))
    return RowsTensor.create(parts, result, plan.outputs)


def resample_backward(parts: "SpatialParts", func: Any, arguments: dict[str, Any]) -> Any:
    """Compute the gradient of :func:`resample`."""
    grad = arguments["grad_output"]
    size_in = list(arguments["self"].shape if "self" in arguments else arguments["input_size"])
    layout = grad.row_layout if isinstance(grad, RowsTensor) else arguments["self"].row_layout
    spatial = func.overloadpacket.__name__.count("3d") + 2 - func.overloadpacket.__name__.count("1d")
    size_out = list(grad.shape[-spatial:])
    plan = _Plan.of(parts, func, arguments, layout, size_in, size_out, grad.dtype)
    if plan is None:
        return NotImplemented
    values = plan.returned(parts.part(grad, plan.outputs))
    window = values.shape[plan.axis]
    local_in = list(size_in)
    local_in[plan.axis] = window
    if not values.numel():
        values = values.new_zeros(local_in)
    elif plan.changes_others:
        local = plan.local(window) | {"grad_output": values}
        if "self" in arguments:
            local["self"] = values.new_empty(local_in)
        else:
            local["input_size"] = local_in
        values = func(**{name: (arguments | local)[name] for name in arguments})
    result = parts.give_back(values, plan.axis, plan.held, plan.windows)
    return RowsTensor.create(parts, result, RowLayout(plan.axis, plan.size))


def _memory_format(func: Any, arguments: dict[str, Any]) -> torch.memory_format:
    """Return the memory format that the result has on one device, on which the order of random numbers depends."""
    source = arguments["self"]
    if source.dim() < 4 or not func.overloadpacket.__name__.startswith("upsample"):
        return torch.contiguous_format
    whole = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta")
    return memory_format_of(func(**(arguments | {"self": whole})))


class _Plan:
    """The rows of each rank for one resampling.

    Attributes:
        axis: The dimension that is divided.
        size: Number of rows of the input.
        outputs: Layout of the output.
        held: Rows of the input that each rank has.
        windows: Rows of the input that each rank needs.
        changes_others: Whether other dimensions are resampled as well.
    """

    @classmethod
    def of(
        cls,
        parts: "SpatialParts",
        func: Any,
        arguments: dict[str, Any],
        layout: RowLayout | None,
        size_in: list[int],
        size_out: list[int],
        dtype: torch.dtype,
    ) -> "_Plan | None":
        """Return the rows for a resampling, or None if another dimension than those of the images is divided."""
        if layout is None or layout.outer > 1 or layout.axis < len(size_in) - len(size_out) or not min(size_out):
            return None
        return cls(parts, func, arguments, layout.axis, size_in, size_out, dtype)

    def __init__(
        self,
        parts: "SpatialParts",
        func: Any,
        arguments: dict[str, Any],
        axis: int,
        size_in: list[int],
        size_out: list[int],
        dtype: torch.dtype,
    ) -> None:
        self._parts, self.axis, self.size = parts, axis, size_in[axis]
        self._size_out, self._dimension = size_out, axis - len(size_in) + len(size_out)
        length = size_out[self._dimension]
        self.outputs = RowLayout(axis, length)
        self._padding = list(arguments.get("padding", []))
        self._scales = [name for name in arguments if name.startswith("scales")]
        scale = arguments[self._scales[self._dimension]] if self._scales else None
        name: str = func.overloadpacket.__name__
        if self._padding:
            position = 2 * (len(size_out) - 1 - self._dimension)
            indices, weights = padded(name, self.size, *self._padding[position : position + 2]), None
            self._padding[position : position + 2] = [0, 0]
        else:
            indices, weights = taps(name, self.size, length, bool(arguments.get("align_corners")), scale, dtype)
        self.held = parts.bounds(self.size)
        windows = []
        for low, high in parts.bounds(length):
            needed = indices[:, low:high]
            windows.append((int(needed.min()), int(needed.max()) + 1) if low < high else (0, 0))
        self.windows: Bounds = tuple(windows)
        low, high = parts.bounds(length)[parts.rank]
        self._indices = indices[:, low:high] - self.windows[parts.rank][0]
        self._weights = None if weights is None else weights[:, low:high]
        others = [size for index, size in enumerate(size_in[-len(size_out) :]) if index != self._dimension]
        self.changes_others = others != [
            size for index, size in enumerate(size_out) if index != self._dimension
        ] or any(
            arguments[name] not in (None, 1) for index, name in enumerate(self._scales) if index != self._dimension
        )

    def local(self, window: int) -> dict[str, Any]:
        """Return the arguments of an operation that resamples the other dimensions only."""
        if self._padding:
            return {"padding": self._padding}
        size = list(self._size_out)
        size[self._dimension] = window
        return {"output_size": size} | ({self._scales[self._dimension]: None} if self._scales else {})

    def rows_of(self, window: Tensor) -> Tensor:
        """Return this rank's rows of the output."""
        total: Tensor | None = None
        for tap, indices in enumerate(self._indices.to(window.device)):
            rows = self._weighted(window.index_select(self.axis, indices), tap)
            total = rows if total is None else total.add_(rows)
        assert total is not None
        return total.to(window.dtype)

    def returned(self, grad: Tensor) -> Tensor:
        """Return the gradient of this rank's window."""
        low, high = self.windows[self._parts.rank]
        shape = list(grad.shape)
        shape[self.axis] = high - low
        total = torch.zeros(shape, dtype=self._dtype(grad), device=grad.device)
        for tap, indices in enumerate(self._indices.to(grad.device)):
            total.index_add_(self.axis, indices, self._weighted(grad, tap))
        return total.to(grad.dtype)

    def _dtype(self, rows: Tensor) -> torch.dtype:
        return rows.dtype if self._weights is None else self._weights.dtype

    def _weighted(self, rows: Tensor, tap: int) -> Tensor:
        if self._weights is None:
            return rows
        shape = [1] * rows.dim()
        shape[self.axis] = -1
        return rows * self._weights[tap].to(rows.device).view(shape)


def _size_out(arguments: dict[str, Any], shape: Sequence[int]) -> list[int]:
    """Return the size of the output of an interpolation, an adaptive pooling or a padding."""
    if "output_size" in arguments:
        return [int(length) for length in arguments["output_size"]]
    padding = arguments["padding"]
    pairs = zip(padding[::2], padding[1::2], strict=True)
    return [shape[-1 - index] + before + after for index, (before, after) in enumerate(pairs)][::-1]


def padded(name: str, size: int, before: int, after: int) -> Tensor:
    """Return the input row of each output row, in shape (1, output rows), for a padding with rows of the image."""
    rows = torch.arange(-before, size + after)
    if name.startswith("replication"):
        return rows.clamp(0, size - 1).unsqueeze(0)
    rows = rows.abs()
    return (size - 1 - (size - 1 - rows).abs()).unsqueeze(0)


@lru_cache(maxsize=256)
def taps(
    name: str, size: int, size_out: int, align_corners: bool, scale: float | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return the input rows of each output row, and their weights. Both have shape (taps, output rows).

    Args:
        name: Name of the operation.
        size: Number of input rows.
        size_out: Number of output rows.
        align_corners: Whether the centres of the first and last rows lie on each other.
        scale: Output rows for each input row, if the program has given it.
        dtype: Dtype of the image. torch computes positions in double precision only for images in double precision.
    """
    precise = torch.float64 if dtype == torch.float64 and "nearest" not in name else torch.float32
    if "adaptive" in name:
        starts = [row * size // size_out for row in range(size_out)]
        lengths = [-(-(row + 1) * size // size_out) - start for row, start in enumerate(starts)]
        steps = torch.arange(max(lengths)).unsqueeze(1)
        first, count = torch.tensor(starts), torch.tensor(lengths)
        return (first + steps).clamp(max=size - 1), ((steps < count) / count.double()).to(precise)
    rows = torch.arange(size_out, dtype=precise)
    if align_corners:
        step = (
            torch.tensor(size - 1, dtype=precise) / (size_out - 1) if size_out > 1 else torch.tensor(0, dtype=precise)
        )
    elif scale:
        step = torch.tensor(1 / scale, dtype=precise)
    else:
        step = torch.tensor(size, dtype=precise) / size_out
    if "nearest" in name:
        positions = (rows + 0.5 * ("exact" in name)) * step
        return positions.floor().long().clamp(max=size - 1).unsqueeze(0), None
    positions = rows * step if align_corners else (step * (rows + 0.5) - 0.5)
    if "cubic" in name:
        first = positions.floor()
        steps = torch.arange(-1, 3).unsqueeze(1)
        return (first.long() + steps).clamp(0, size - 1), _cubic((positions - first - steps).abs())
    positions = positions.clamp(min=0)
    first = positions.long().clamp(max=size - 1)
    weight = (positions - first).clamp(0, 1)
    return torch.stack([first, (first + 1).clamp(max=size - 1)]), torch.stack([1 - weight, weight])


def _cubic(distance: Tensor) -> Tensor:
    """Return the weights of cubic interpolation with the coefficient -0.75, for distances up to 2."""
    a = -0.75
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((distance - 5) * distance + 8) * distance * a - 4 * a
    return torch.where(distance <= 1, near, far)
