"""What came of a simulated run."""

from collections import Counter
from typing import NamedTuple


class ViolationError(Exception):
    """An invariant does not hold."""


class Outcome(NamedTuple):
    """What came of a seed.

    Attributes:
        violation: The invariant that did not hold; None if all did.
        events: How many there were.
        seconds: Of virtual time.
        counts: Injected faults, by kind.
        trace: A line for each event, if it was asked for.
        end: How it has ended for each worker.
    """

    violation: str | None
    events: int
    seconds: float
    counts: Counter[str]
    trace: list[str]
    end: str
