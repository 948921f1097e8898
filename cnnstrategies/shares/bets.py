"""The decision when shares change: each change is a bet whose gain is measured.

Predicted gains may be wrong: times are noisy, and a part of a rank's time does not depend on its number of samples.
Therefore a change is kept only if steps become measurably faster. This module is a pure state machine: it receives
times and returns decisions. All ranks pass the same times, so all ranks make the same decisions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from statistics import fmean as mean
from statistics import pvariance
from typing import Any

from cnnstrategies.shares.proposals import GAIN, Proposal

PATIENCE = 2  # Number of lost bets after which the shares stay as they are.
FEWEST = 2  # Number of blocks that a proposal needs, and a bet to be won.
MOST = 8  # Largest number of blocks in which the gain of a bet is measured, and that a proposal uses.
KEPT = 0.75  # Fraction of the blocks that count. Blocks with other work, such as a checkpoint, are the slowest.
# Bounds of the two-sided 95 % confidence interval of a mean, in standard errors, by degrees of freedom (Student's t).
BOUNDS = (12.7, 4.3, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.2)


@dataclass(frozen=True)
class Block:
    """Mean times of a few consecutive steps with the same shares.

    Attributes:
        step: Seconds of a step.
        units: For each kind of work, each rank's seconds per unit of work.
    """

    step: float
    units: tuple[tuple[float, ...], ...]

    def relative(self) -> list[float]:
        """Return each rank's seconds per unit, divided by the mean over all ranks."""
        totals = [sum(kinds) for kinds in zip(*self.units, strict=True)]
        return [total / mean(totals) for total in totals]


@dataclass(frozen=True)
class ShareDecision:
    """New shares, and the reason why they are used.

    Attributes:
        shares: The new shares; None if the shares stay as they are.
        predicted: Predicted relative gain in speed of a new bet; None if no bet begins.
        gain: Measured relative gain in speed of the bet that ends; None if no bet ends.
        won: Whether the bet that ends has made steps faster.
    """

    shares: tuple[float, ...] | None = None
    predicted: float | None = None
    gain: float | None = None
    won: bool = False


def bound(degrees: int) -> float:
    """Return the bound of a 95 % confidence interval, in standard errors, for a number of degrees of freedom."""
    return BOUNDS[min(degrees, len(BOUNDS)) - 1]


class Bets:
    """Bets on shares, one after another.

    A bet begins only if its predicted gain is above :data:`~cnnstrategies.shares.GAIN` and above the noise of the
    measured times. It ends as soon as the measured gain is above or below 0 by more than the noise, or after
    :data:`MOST` blocks. A bet that has not made steps faster is lost, and the shares before it are used again. After
    :data:`PATIENCE` lost bets the shares do not change any more.

    Attributes:
        lost: Number of lost bets.
    """

    def __init__(self) -> None:
        self.lost = 0
        self._blocks: list[Block] = []  # Blocks with the current shares.
        # While a bet is open: the shares before it, and the seconds of a step in each block with these shares.
        self._before: tuple[tuple[float, ...], list[float]] | None = None

    @property
    def is_over(self) -> bool:
        """Whether the shares do not change any more."""
        return self.lost >= PATIENCE

    def forget(self) -> None:
        """Discard the times with the current shares, because the ranks have changed."""
        self._blocks.clear()

    def decide(
        self,
        block: Block,
        shares: Sequence[float],
        propose: Callable[[Sequence[Sequence[float]], float], Proposal | None],
    ) -> ShareDecision:
        """Take the times of the latest steps, and decide which shares to use.

        Args:
            block: Times of the latest steps, which all had the current shares.
            shares: The current shares.
            propose: Function that proposes shares. Its arguments are the seconds per unit of work as in
                :class:`Block`, and the seconds of a step.
        """
        if self.is_over:
            return ShareDecision()
        self._blocks = [*self._blocks, block][-MOST:]
        ended = self._judge() if self._before is not None else ShareDecision()
        if ended.shares is not None or self._before is not None:
            return ended
        proposed = self._proposal(propose)
        if proposed is None:
            return ended
        self._before = tuple(shares), [block.step for block in _kept(self._blocks)]
        self._blocks = []
        return ShareDecision(proposed.shares, proposed.gain, ended.gain, ended.won)

    def _judge(self) -> ShareDecision:
        """Return the end of the open bet, or an empty decision if more steps must be measured."""
        assert self._before is not None
        shares, before = self._before
        now = [block.step for block in _kept(self._blocks)]
        gain, noise = mean(before) / mean(now) - 1, _noise(before, now)
        may_be_won = gain > -noise if len(self._blocks) < FEWEST else abs(gain) <= noise
        if len(self._blocks) < MOST and may_be_won:
            return ShareDecision()
        self._before = None
        if gain > noise:
            return ShareDecision(gain=gain, won=True)
        self.lost += 1
        self._blocks = []
        return ShareDecision(shares, gain=gain)

    def _proposal(self, propose: Callable[[Sequence[Sequence[float]], float], Proposal | None]) -> Proposal | None:
        """Return proposed shares whose predicted gain is above the noise."""
        if len(self._blocks) < FEWEST:
            return None
        blocks = _kept(self._blocks)
        units = [
            [mean(seconds) for seconds in zip(*kinds, strict=True)]
            for kinds in zip(*(b.units for b in blocks), strict=True)
        ]
        steps = [block.step for block in blocks]
        proposed = propose(units, mean(steps))
        if proposed is None:
            return None
        # Noise of the ranks' relative times, and noise with which the gain of the bet can be measured.
        ranks = zip(*(block.relative() for block in blocks), strict=True)
        error = max(sqrt(pvariance(rank) / (len(rank) - 1)) / mean(rank) for rank in ranks)
        of_times = sqrt(2) * bound(len(blocks) - 1) * error
        return proposed if proposed.gain > max(GAIN, of_times, _noise(steps, steps)) else None

    def state_dict(self) -> dict[str, Any]:
        """Return all that decides about the next bets, for a checkpoint or for a rank that joins."""
        shares, steps = self._before or ((), [])
        blocks = [[block.step, *map(list, block.units)] for block in self._blocks]
        return {"lost": self.lost, "blocks": blocks, "shares_before": list(shares), "steps_before": list(steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.lost = int(state["lost"])
        self._blocks = [Block(step, tuple(map(tuple, units))) for step, *units in state["blocks"]]
        shares, steps = tuple(state["shares_before"]), list(state["steps_before"])
        self._before = (shares, steps) if shares else None


def _kept(blocks: Sequence[Block]) -> list[Block]:
    """Return the fastest blocks."""
    return sorted(blocks, key=lambda block: block.step)[: max(FEWEST, ceil(KEPT * len(blocks)))]


def _noise(before: Sequence[float], now: Sequence[float]) -> float:
    """Return the noise of the gain: half the width of its confidence interval.

    Args:
        before: Seconds of a step in each block with the old shares.
        now: Seconds of a step in each block with the new shares.
    """
    degrees = len(before) + len(now) - 2
    squares = len(before) * pvariance(before) + len(now) * pvariance(now)
    error = sqrt(squares / degrees * (1 / len(before) + 1 / len(now)))
    return bound(degrees) * error / mean(now)
