"""Compare the gradients that arrive at a network's results with those of the declared loss.

A call that has run in the order 1F1B has computed the gradients of its parameters from the declared loss. They are right
if the step's own gradients of the results are those of the declared loss, times a factor. Two facts show this:

- All of the gradient has come through the step's call of the loss. The gradient of each result must be equal, in every
  bit, to what has come through this call, so that no other term is overlooked, however small it is.
- The gradient that has come through this call is the sum of the microbatches' gradients. Both are computed by the
  module's own function, so they may differ by rounding alone. The limit is :func:`tolerance` times the largest element.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from cnnstrategies.placed import ForeignTensor

# Results of a comparison.
#   factor: the gradients are those of the declared loss, times a factor
#   infinite: an element is not finite, so the gradients cannot be compared
#   different: they are other gradients
Kind = Literal["factor", "infinite", "different"]


class Verdict(NamedTuple):
    """Verdict of all replicas of the last stage on a backward.

    Attributes:
        kind: The result of the comparison.
        factor: Factor by which the gradients of the declared loss must be multiplied.
        reason: Why the gradients are different.
    """

    kind: Kind
    factor: float = 1.0
    reason: str = ""


class Comparison(NamedTuple):
    """Result of the comparison on one replica of the last stage.

    Attributes:
        kind: See `Kind`.
        factor: See `Verdict`.
        reason: See `Verdict`.
    """

    kind: Kind
    factor: float = 1.0
    reason: str = ""

    @classmethod
    def different(cls, reason: str) -> Self:
        """Return the result for other gradients."""
        return cls("different", 1.0, reason)

    @classmethod
    def of(
        cls,
        arrived: Sequence[Tensor | None],
        through: Sequence[Tensor | None],
        of_loss: Tensor,
        scale: Tensor | float,
        expected: Callable[[], Sequence[tuple[Tensor | None, Tensor | None]]],
    ) -> Self:
        """Compare gradients. This reads from the device once.

        Args:
            arrived: For each result of the network, the gradient that has arrived.
            through: For each result, the gradient that has come through the step's call of the loss.
            of_loss: The gradient of the value that this call has returned.
            scale: Factor that the expected gradients contain.
            expected: Function that returns, for each result, the rows of ``arrived`` that this rank can compare, and
                the gradients of the declared loss for these rows.
        """
        for total, part in zip(arrived, through, strict=True):
            if (total is None) != (part is None):
                return cls.different(_OTHER_TERM)
        present = [(total, part) for total, part in zip(arrived, through, strict=True) if total is not None]
        if any(isinstance(tensor, ForeignTensor) for pair in present for tensor in (*pair, of_loss)):
            return cls.different("the step computes with the loss on ranks of other stages")
        ratio = of_loss.double() / scale
        numbers = [ratio.reshape(())]
        for total, part in present:
            numbers += [total.isfinite().all(), (total == part).all()]
        limits = []
        for rows, sums in expected():
            if (rows is None) != (sums is None):
                return cls.different("loss() does not depend on the same results for a microbatch as for the batch")
            if rows is None or sums is None or not rows.numel():
                continue
            limits.append(tolerance(rows.dtype))
            wide = torch.promote_types(rows.dtype, torch.float32)
            numbers += [(rows.to(wide) - ratio.to(wide) * sums.to(wide)).abs().amax(), rows.abs().amax()]
        factor, *values = torch.stack([number.double() for number in numbers]).tolist()
        facts, sizes = values[: 2 * len(present)], values[2 * len(present) :]
        if not all(facts[::2]) or not abs(factor) < float("inf"):
            return cls("infinite")
        if not all(facts[1::2]):
            return cls.different(_OTHER_TERM)
        for difference, size, limit in zip(sizes[::2], sizes[1::2], limits, strict=True):
            if not difference <= limit * size:
                return cls.different(
                    f"the gradients of loss() for the batch differ from those for its microbatches by {difference:.1e}, "
                    f"where the largest is {size:.1e}: loss() must be a mean over samples"
                )
        return cls("factor", factor)


_OTHER_TERM = "the step's loss depends on the network's result in other ways than by one call of loss()"


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest difference that rounding may cause, relative to the largest element.

    In 16 bits both gradients are rounded, and each by at most half a unit in the last place.
    """
    return (2 if torch.finfo(dtype).bits == 16 else 64) * torch.finfo(dtype).eps


def combine(comparisons: Sequence[Comparison]) -> Verdict:
    """Return the verdict of all replicas of the last stage.

    Args:
        comparisons: The results on all replicas.
    """
    for kind in ("different", "infinite", "factor"):
        for comparison in comparisons:
            if comparison.kind == kind:
                return Verdict(*comparison)
    raise AssertionError("the last stage has a replica")
