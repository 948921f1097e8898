"""How fast workers work, from what they say they have processed each time they ask for more."""

from dataclasses import dataclass

WEIGHT = 0.75  # of what was measured before, against one interval
LATE = 3.0  # times as long as usual


@dataclass
class _Measured:
    epoch: int
    processed: int
    since: float
    positions: float = 0.0
    seconds: float = 0.0


class Speeds:
    """Positions per second of each worker, as a moving average over its last few intervals.

    What lies between two epochs is not counted: validation, checkpoints, and waiting for others.
    """

    def __init__(self) -> None:
        self._measured: dict[int, _Measured] = {}

    def heard(self, worker: int, epoch: int, processed: int, now: float) -> None:
        """A worker says how many positions of an epoch it has processed."""
        one = self._measured.setdefault(worker, _Measured(epoch, processed, now))
        if one.epoch != epoch or processed < one.processed:
            one.epoch, one.processed, one.since = epoch, processed, now
        elif processed > one.processed and now > one.since:
            one.positions = WEIGHT * one.positions + processed - one.processed
            one.seconds = WEIGHT * one.seconds + now - one.since
            one.processed, one.since = processed, now

    def of(self, worker: int) -> float | None:
        """Positions per second; None of one that has processed nothing yet."""
        one = self._measured.get(worker)
        return one.positions / one.seconds if one is not None and one.seconds else None

    def is_late(self, worker: int, size: int, now: float) -> bool:
        """Whether a worker should long have said that it has processed so many more: it may be stopped, or dead."""
        one, speed = self._measured.get(worker), self.of(worker)
        return one is None or speed is None or now - one.since > LATE * size / speed

    def forget(self, worker: int) -> None:
        """A worker is gone; one that comes in its place is another."""
        self._measured.pop(worker, None)
