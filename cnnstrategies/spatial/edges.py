"""Convolutions without a copy of the images: first all rows from this rank's rows alone, then the edges again.

While the rows of other ranks are on their way, each rank convolves its own rows, with zeros in place of those of other
ranks. Then it computes the few output rows that need other ranks' rows. The gradients are sums over output rows, so the
edges only contribute what the rows of other ranks contribute.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from cnnstrategies.spatial.layout import Bounds
from cnnstrategies.spatial.requested_rows import overlap

if TYPE_CHECKING:
    from cnnstrategies.spatial.parts import SpatialParts


@dataclass(frozen=True)
class Edges:
    """The edges of one rank's rows of a convolution.

    Attributes:
        axis: The dimension that is divided.
        held: Rows of the input that each rank has.
        windows: Rows of the input that each rank needs.
        padding: Rows of zeros on both sides of this rank's rows.
        strips: For each edge, its first output row and the row after the last one, as numbers in this rank's output,
            and the rows of the input that it needs.
    """

    axis: int
    held: Bounds
    windows: Bounds
    padding: int
    strips: tuple[tuple[int, int, int, int], ...]

    @classmethod
    def of(
        cls, axis: int, held: Bounds, outputs: Bounds, windows: Bounds, rank: int, kernel: tuple[int, int, int]
    ) -> "Edges | None":
        """Return the edges, or None if the convolution of this rank's own rows does not have its output rows.

        Args:
            axis: The dimension that is divided.
            held: Rows of the input that each rank has.
            outputs: Rows of the output that each rank has.
            windows: Rows of the input that each rank needs.
            rank: This rank.
            kernel: Rows that the kernel reaches over, stride, and padding.
        """
        reach, stride, padding = kernel
        (start, end), (first, last), size = held[rank], outputs[rank], held[-1][1]
        added = start - first * stride + padding
        reachable = end - start + 2 * added - reach
        if added < 0 or reachable < 0 or reachable // stride + 1 != last - first:
            return None
        above = [row for row in range(first, last) if start > 0 and row * stride - padding < start]
        below = [row for row in range(first, last) if end < size and row * stride - padding + reach > end]
        if 2 * (len(above) + len(below)) > last - first or (reach < stride and (above or below)):
            return None
        strips = [
            (rows[0] - first, rows[-1] + 1 - first, rows[0] * stride - padding, rows[-1] * stride - padding + reach)
            for rows in (above, below)
            if rows
        ]
        return cls(axis, held, windows, added, tuple(strips))

    def run(self, parts: "SpatialParts", func: Any, arguments: dict[str, Any], rows: Tensor, padding: Any) -> Tensor:
        """Return this rank's rows of the output.

        Args:
            parts: The rules of this rank.
            func: The convolution.
            arguments: Its arguments.
            rows: This rank's rows of the input.
            padding: Padding of a window, which contains the padding of the divided dimension.
        """
        requested = parts.request(rows, self.axis, self.held, self.windows)
        result: Tensor = func(**(arguments | {"input": rows, "padding": self._padding(padding)}))
        for first, last, low, high in self.strips:
            strip = func(**(arguments | {"input": requested.rows(low, high), "padding": padding}))
            result.narrow(self.axis, first, last - first).copy_(strip)
        requested.wait()
        return result

    def run_backward(
        self,
        parts: "SpatialParts",
        func: Any,
        arguments: dict[str, Any],
        rows: Tensor,
        grad: Tensor,
        padding: Any,
        output_padding: Any,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of this rank's rows, of the weight and of the bias, the latter two of this rank alone.

        Args:
            parts: The rules of this rank.
            func: The gradients of the convolution.
            arguments: Its arguments.
            rows: This rank's rows of the input.
            grad: This rank's rows of the output's gradient.
            padding: Padding of a window, which contains the padding of the divided dimension.
            output_padding: The same for the padding of the output.
        """
        wants_input, wants_weight, _ = arguments["output_mask"]
        # Only the gradient of the weight depends on the values.
        requested = parts.request(rows, self.axis, self.held, self.windows if wants_weight else self.held)
        local = {"input": rows, "grad_output": grad, "padding": self._padding(padding)}
        input_grad, weight_grad, bias_grad = func(**(arguments | local | {"output_padding": output_padding}))
        gradients = []
        for first, last, low, high in self.strips:
            strip = {
                "input": requested.rows(low, high, has_own=False), "padding": padding, "output_padding": output_padding,
                "grad_output": grad.narrow(self.axis, first, last - first),
                "output_mask": [wants_input, wants_weight, False],
            }  # fmt: skip
            strip_grad, own_weight_grad, _ = func(**(arguments | strip))
            gradients.append((low, high, strip_grad))
            if wants_weight:
                weight_grad += own_weight_grad
        requested.wait()

        def piece(first: int, last: int) -> Tensor:
            # All rows of a neighbour are in one strip: above or below this rank's rows.
            low, strip_grad = next(
                (low, strip_grad)
                for low, high, strip_grad in gradients
                if overlap((low, high), (first, last)) == (first, last)
            )
            rows: Tensor = strip_grad.narrow(self.axis, first - low, last - first)
            return rows

        if wants_input:
            input_grad = parts.add_returned(input_grad, piece, self.axis, self.held, self.windows)
        return input_grad, weight_grad, bias_grad

    def _padding(self, padding: Any) -> list[int]:
        values = list(padding)
        values[self.axis - 2] = self.padding
        return values
