"""Change-point detector for a series of durations: it finds a lasting rise and its end, and ignores noise."""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

NORMAL = 1.4826  # Standard deviation of a normal distribution whose median absolute deviation is 1.


class LevelEvent(Enum):
    """Result of a new value: the level has risen, or has returned from its last rise."""

    RISE = 1
    RETURN = 2


@dataclass(frozen=True)
class Evidence:
    """Evidence that a detector needs.

    Attributes:
        recent: Number of the newest values that must all have risen.
        returned: Number of the newest values that must all have returned.
        reference: Smallest and largest number of earlier values with which the newest values are compared.
        spreads: Smallest rise, in standard deviations of the reference.
        outliers: Number of the largest earlier values that do not count.
    """

    recent: int = 5
    returned: int = 5
    reference: tuple[int, int] = (12, 26)
    spreads: float = 5.0
    outliers: int = 1


class Level:
    """Detector of lasting rises of a series of values.

    A rise is reported if the newest values are all above the values before them, and above their median by a smallest
    amount and by a number of standard deviations. The standard deviation is estimated from the median absolute
    deviation, so that outliers count little. A rise ends when the newest values are nearer to the level before the
    rise. A second rise may follow a first; the rises end in the reverse order.

    Attributes:
        values: The newest values since the last event.
        rises: Pairs of the median before and the median after each rise that has not ended, in order.

    Args:
        evidence: Evidence that the detector needs.
    """

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self.values: deque[float] = deque(maxlen=evidence.reference[1] + evidence.recent)
        self.rises: list[tuple[float, float]] = []

    @property
    def usual(self) -> float:
        """Median of the values before the newest values; 0 while there are too few."""
        earlier = [*self.values][: -self._evidence.recent]
        return statistics.median(earlier) if earlier else 0.0

    def add(self, value: float, least: float) -> LevelEvent | None:
        """Add a value to the series.

        Args:
            value: The value.
            least: Smallest rise to report, in the values' unit.

        Returns:
            The event; None if nothing has changed. The comparison begins again with the newest values after an event.
        """
        needs = self._evidence
        self.values.append(value)
        series = [*self.values]
        newest = series[-needs.returned :]
        if self.rises and len(newest) == needs.returned and max(newest) < sum(self.rises[-1]) / 2:
            self.rises.pop()
            return self._restart(LevelEvent.RETURN)
        reference, recent = series[: -needs.recent], series[-needs.recent :]
        if len(reference) >= needs.reference[0] and has_risen(reference, recent, least, needs):
            self.rises.append((statistics.median(reference), statistics.median(recent)))
            return self._restart(LevelEvent.RISE)
        return None

    def _restart(self, event: LevelEvent) -> LevelEvent:
        recent = [*self.values][-self._evidence.recent :]
        self.values.clear()
        self.values.extend(recent)
        return event


def has_risen(reference: Sequence[float], recent: Sequence[float], least: float, needs: Evidence) -> bool:
    """Return whether all recent values are above the reference by more than noise explains.

    Args:
        reference: Earlier values.
        recent: The newest values.
        least: Smallest difference between a recent value and the median of the reference.
        needs: Evidence that the detector needs.
    """
    usual, lowest = statistics.median(reference), min(recent)
    if lowest <= usual + least:
        return False
    deviation = NORMAL * statistics.median(abs(value - usual) for value in reference)
    highest = sorted(reference)[-1 - needs.outliers]
    return lowest > max(highest, usual + needs.spreads * deviation)
