"""Proposals: shares with which ranks of different speeds would end a step sooner, with the predicted gain."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from cnnstrategies.shares.dealing import deal

GAIN = 0.03  # Smallest relative gain in speed for which shares are changed.


@dataclass(frozen=True)
class Proposal:
    """Proposed new shares.

    Attributes:
        shares: Share of each rank.
        gain: Relative gain in speed: the step time with the old shares divided by the step time with the new shares,
            minus 1.
    """

    shares: tuple[float, ...]
    gain: float


def proposal(
    now: Sequence[int], seconds: Sequence[float], step: float, least: int = 0, most: float | Sequence[float] = inf
) -> Proposal | None:
    """Propose shares with which a step is faster. Return None if the gain would not be larger than `GAIN`.

    Both training and the planner use this function. With the best shares, all ranks finish their computation at the
    same time. Other work in a step, such as reducing gradients, does not depend on the shares (LB-BSP, Chen et al.,
    SoCC 2020). The prediction assumes that a rank's time is proportional to its number of samples. If this assumption
    is not exact, the next proposal corrects the error with new measurements.

    Args:
        now: Current number of samples of each rank.
        seconds: Time per sample of each rank, in seconds, measured with the current shares.
        step: Current time of a step, in seconds.
        least: Smallest number of samples of a rank; see :func:`deal`.
        most: Largest number of samples of a rank; see :func:`deal`.
    """
    speeds = tuple(1 / duration for duration in seconds)
    then = deal(sum(now), speeds, least, most)
    before, after = (
        max(count * duration for count, duration in zip(counts, seconds, strict=True)) for counts in (now, then)
    )
    return worth(then, before, after, step)


def worth(shares: Sequence[float], before: float, after: float, step: float) -> Proposal | None:
    """Return new shares with their gain. Return None if the gain is not larger than `GAIN`.

    Args:
        shares: The new shares.
        before: Predicted computation time of the slowest rank with the old shares, in seconds.
        after: Predicted computation time of the slowest rank with the new shares, in seconds.
        step: Measured time of a whole step with the old shares, in seconds.
    """
    rest = max(0.0, step - before)
    gain = (before + rest) / (after + rest) - 1
    return Proposal(tuple(shares), gain) if gain > GAIN else None
