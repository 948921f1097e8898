"""Search for a learning rate that is not the one that its schedule has computed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ScheduledRate:
    """Learning rate of a parameter group at a check.

    Attributes:
        group: Name of the group.
        rate: Learning rate in the optimizer.
        scheduled: Learning rate of the schedule.
        steps: Number of steps of the schedule so far.
    """

    group: str
    rate: float
    scheduled: float
    steps: int


class RateHistory:
    """Learning rates at earlier checks.

    Code of the user may multiply the rate, as for a warm-up. So a rate counts as wrong only if it was right at a check
    before, and is wrong at two checks between which the schedule has made a step.
    """

    def __init__(self) -> None:
        self._right: set[str] = set()
        self._wrong_since: dict[str, int] = {}  # Number of the schedule's steps at the first check with a wrong rate.

    def wrong(self, rates: Sequence[ScheduledRate]) -> list[ScheduledRate]:
        """Return the wrong rates."""
        result = []
        for rate in rates:
            if math.isclose(rate.rate, rate.scheduled, rel_tol=1e-6, abs_tol=1e-30):
                self._right.add(rate.group)
                self._wrong_since.pop(rate.group, None)
            elif rate.group in self._right and rate.steps > self._wrong_since.setdefault(rate.group, rate.steps):
                result.append(rate)
        return result
