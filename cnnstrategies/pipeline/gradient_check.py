"""Compare the gradients that arrive at a network's results with those of the declared loss.

A call that has run in the order 1F1B has computed the gradients of its parameters from the declared loss. These
gradients are right if the step's own gradients of the results are those of the declared loss, times a factor. Two facts
show this:

- All of the gradient has come through the step's call of the loss. The gradient of each result must be equal, in every
  bit, to what has come through this call, so that no other term is overlooked, however small it is.
- The gradient that has come through this call is the sum of the microbatches' gradients. Both are computed by the
  module's own function, so they may differ by rounding alone, see :func:`allowed_difference`.
"""

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from cnnstrategies.placed import ForeignTensor

# Results of a comparison.
#   factor: the gradients are those of the declared loss, times a factor
#   infinite: an element is not finite, so the gradients cannot be compared
#   different: they are other gradients
#   assumed: they are taken for those of the declared loss, and the numbers that show it are read later
Kind = Literal["factor", "infinite", "different", "assumed"]
# A comparison that is read late ends the run if it fails, so it allows this many times the difference.
LATE_TOLERANCE = 16


class GradientVerdict(NamedTuple):
    """Verdict on a backward.

    Attributes:
        kind: The result of the comparison.
        factor: Factor by which the gradients of the declared loss must be multiplied. It is a tensor on the device if
            the verdict is assumed.
        reason: Why the gradients are different.
    """

    kind: Kind
    factor: float | Tensor = 1.0
    reason: str = ""


# For each result of the network: the rows of the gradient that has arrived, and the gradient of the declared loss for
# these rows. None if there is no gradient.
Pairs = Sequence[tuple[Tensor | None, Tensor | None]]


def different(reason: str) -> GradientVerdict:
    """Return the verdict for other gradients than those of the declared loss."""
    return GradientVerdict("different", 1.0, reason)


class GradientComparison(NamedTuple):
    """A comparison of gradients whose numbers have not been read from the device.

    Attributes:
        numbers: All numbers from which the verdict follows, on the device.
        factor: Factor by which the gradients of the declared loss must be multiplied, on the device. It is not a number
            if a gradient that has arrived is not finite, so that no gradient of a parameter is finite either.
        results: Number of results of the network that have a gradient.
        compared: For each compared gradient, a tensor of the same shape and dtype without values.
        has_scaler: Whether a gradient scaler skips steps whose gradients are not finite.
    """

    numbers: Tensor
    factor: Tensor
    results: int
    compared: Sequence[Tensor]
    has_scaler: bool

    def read(self) -> GradientVerdict:
        """Read the numbers, for which the host waits if they are on a GPU, and return the verdict."""
        return self.verdict(self.numbers.tolist())

    def verdict(self, numbers: Sequence[float], tolerance: float = 1.0) -> GradientVerdict:
        """Return the verdict.

        Args:
            numbers: The values of :attr:`numbers`.
            tolerance: Factor by which the allowed difference is multiplied.
        """
        factor, size_of_loss, *values = numbers
        facts, sizes = values[: 2 * self.results], values[2 * self.results :]
        if not all(facts[::2]) or not isfinite(factor):
            return GradientVerdict("infinite")
        if not all(facts[1::2]):
            return different(OTHER_TERM)
        for difference, size, whole in zip(sizes[::2], sizes[1::2], self.compared, strict=True):
            if self.has_scaler and not isfinite(difference):
                return GradientVerdict(
                    "infinite"
                )  # The microbatches' gradients contain a larger scale than the batch's.
            if not difference <= tolerance * allowed_difference(whole, size, abs(size_of_loss)):
                return different(
                    f"the gradients of loss() for a batch and for its microbatches differ by {difference:.1e}, where "
                    f"the largest is {size:.1e}, so loss() is not a mean over samples"
                )
        return GradientVerdict("factor", factor)


def begin_comparison(
    arrived: Sequence[Tensor | None],
    through: Sequence[Tensor | None],
    of_loss: Tensor,
    scale: Tensor | float,
    pairs: Callable[[], Pairs],
) -> GradientVerdict | GradientComparison:
    """Compare gradients on one replica of the last stage, without a read from the device.

    Args:
        arrived: For each result of the network, the gradient that has arrived.
        through: For each result, the gradient that has come through the step's call of the loss.
        of_loss: The gradient of the value that this call has returned.
        scale: Factor that the gradients of the declared loss contain.
        pairs: Function that returns the gradients to compare.
    """
    if any((total is None) != (part is None) for total, part in zip(arrived, through, strict=True)):
        return different(OTHER_TERM)
    pairs_of_results = zip(arrived, through, strict=True)
    present = [(total, part) for total, part in pairs_of_results if total is not None and part is not None]
    if any(isinstance(tensor, ForeignTensor) for pair in (*present, (of_loss,)) for tensor in pair):
        return different("the step computes with the loss on ranks of other stages")
    ratio = of_loss.double() / scale
    numbers = [ratio.reshape(()), of_loss.reshape(())]
    factor = ratio.reshape(())
    for total, part in present:
        is_finite = total.isfinite().all()
        numbers += [is_finite, total.eq(part).all()]
        factor = torch.where(is_finite, factor, torch.nan)
    compared = []
    for whole, (rows, sums) in zip(arrived, pairs(), strict=False):
        if (rows is None) != (sums is None):
            return different("loss() depends on other results for a microbatch than for the batch")
        if whole is None or rows is None or sums is None or not rows.numel():
            continue
        compared.append(torch.empty(whole.shape, dtype=whole.dtype, device="meta"))
        wide = torch.promote_types(rows.dtype, torch.float32)
        numbers += [(rows.to(wide) - ratio.to(wide) * sums.to(wide)).abs().amax(), rows.abs().amax()]
    stacked = torch.stack([number.double() for number in numbers])
    return GradientComparison(stacked, factor, len(present), compared, isinstance(scale, Tensor))


OTHER_TERM = "the step's loss depends on the network's result in other ways than by one call of loss()"


def allowed_difference(gradient: Tensor, largest: float, of_loss: float) -> float:
    """Return the largest difference between two gradients that rounding may cause.

    The gradients of a cross entropy are differences of numbers of the size ``1 / n``, where n is the number of samples,
    or of pixels. They are rounded relative to these numbers, even if all samples are classified well, so that the
    differences are small. In 16 bits, the final gradients are rounded as well, each by at most half a unit in the last
    place.

    Args:
        gradient: The gradient of a result for the whole batch (n, classes, ...).
        largest: Largest magnitude of an element.
        of_loss: Magnitude of the gradient of the loss.
    """
    last_place = torch.finfo(gradient.dtype)
    wide = torch.finfo(torch.promote_types(gradient.dtype, torch.float32))
    classes = gradient.shape[1] if gradient.dim() > 1 else 1
    of_terms = of_loss * classes / max(gradient.numel(), 1)
    unit = last_place.eps * (2 * largest + last_place.smallest_normal)
    rounded = unit if last_place.bits == 16 else 0.0
    return wide.eps * (64 * largest + 8 * of_terms) + rounded


_BY_WEIGHT: Sequence[Kind] = ("different", "infinite", "factor", "assumed")


def combine(verdicts: Sequence[GradientVerdict]) -> GradientVerdict:
    """Return the common verdict of all replicas of the last stage, from the verdicts of the replicas."""
    return min(verdicts, key=lambda verdict: _BY_WEIGHT.index(verdict.kind))
