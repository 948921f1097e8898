"""Which rows of a tensor each rank has, and which rows it needs: functions of sizes alone, so all ranks agree."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

# For each rank, the first row and the row after the last one.
Bounds = tuple[tuple[int, int], ...]


@cache
def bounds(size: int, count: int) -> Bounds:
    """Return the rows of each rank. The bounds follow from the number of rows alone, so equal sizes have equal bounds.

    Args:
        size: Number of rows.
        count: Number of ranks. Some ranks have no rows if there are fewer rows than ranks. A tensor with fewer than two
            rows for each rank is not divided; see `SpatialParts.with_enough_rows`.
    """
    return tuple((size * rank // count, size * (rank + 1) // count) for rank in range(count))


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The dimension of a tensor that is divided.

    The dimension usually consists of the rows alone. After a `view` or `flatten` it may contain other dimensions as
    well, and then has ``outer * size * inner`` elements. The ranks still have whole rows.

    Attributes:
        axis: The dimension.
        size: Number of rows of the whole tensor.
        outer: Number of elements of the dimensions that were merged before the rows.
        inner: Number of elements of the dimensions that were merged after the rows.
    """

    axis: int
    size: int
    outer: int = 1
    inner: int = 1

    def at(self, axis: int) -> "RowLayout":
        """Return the layout of a tensor in which the dimension has moved."""
        return RowLayout(axis, self.size, self.outer, self.inner)

    def length(self, rows: int) -> int:
        """Return the size of the dimension in a tensor with the given number of rows."""
        return self.outer * rows * self.inner


def scaled(ranges: Bounds, factor: int) -> Bounds:
    """Return ranges of elements for ranges of rows with ``factor`` elements each."""
    return tuple((low * factor, high * factor) for low, high in ranges)


def kernel_windows(outputs: Bounds, kernel: int, stride: int, padding: int, dilation: int) -> Bounds:
    """Return the rows that a kernel reads for ranges of output rows. Rows of the padding have numbers outside."""
    reach = dilation * (kernel - 1) + 1
    return tuple(
        (low * stride - padding, (high - 1) * stride - padding + reach) if low < high else (0, 0)
        for low, high in outputs
    )


def viewed(layout: RowLayout, shape: Sequence[int], new_shape: Sequence[int]) -> RowLayout | None:
    """Return the layout of a tensor after a `view`, or None if the rows are not whole in one dimension.

    Args:
        layout: Layout before the view.
        shape: Shape of the whole tensor before the view.
        new_shape: Shape of the whole tensor after the view.
    """
    before = prod(shape[: layout.axis]) * layout.outer
    after = prod(shape[layout.axis + 1 :]) * layout.inner
    passed, layouts = 1, []
    for axis, length in enumerate(new_shape):
        outer = before // passed if passed and before % passed == 0 else 0
        block = outer * layout.size
        if block and length % block == 0 and length // block * prod(new_shape[axis + 1 :]) == after:
            layouts.append(RowLayout(axis, layout.size, outer, length // block))
        passed *= length
    # A single row may be in several dimensions.
    return min(layouts, key=lambda layout: layout.outer, default=None)


def split_view(layout: RowLayout, shape: Sequence[int], new_shape: Sequence[int]) -> RowLayout | None:
    """Return a layout with coarser rows, of which a `view` keeps each whole, or None if there is not such a layout.

    Args:
        layout: Layout before the view.
        shape: Shape of the whole tensor before the view.
        new_shape: Shape of the whole tensor after the view.
    """
    if layout.outer > 1:
        return None
    total = layout.size * layout.inner
    for length in new_shape:
        if length and total % length == 0:
            coarse = RowLayout(layout.axis, length, 1, total // length)
            if viewed(coarse, shape, new_shape) is not None:
                return coarse
    return None
