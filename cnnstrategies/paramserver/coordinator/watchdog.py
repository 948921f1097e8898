"""Members that wait for each other in a circle, which must not last."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

MOST_NAMED = 4
UNEVEN = (
    "one has ended an epoch, or training, that another goes on with; give all workers the same number of batches, and "
    "stop all at the same step (trainer.should_stop)"
)


@dataclass(frozen=True)
class Wait:
    """What some members wait for, and for which others."""

    what: str
    who: tuple[str, ...]
    others: tuple[str, ...]
    everyone: bool = True  # for all of these, and not for any
    cause: str = ""  # how that may have come about, and what helps

    def __str__(self) -> str:
        return f"{named(self.who)} in `{self.what}` for {named(self.others)}"


def named(names: Sequence[str]) -> str:
    """Some names, and how many more there are."""
    rest = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def stuck(waits: Sequence[Wait]) -> list[Wait]:
    """Those of the waits that nobody who does not wait can end."""
    held = list(waits)
    while True:
        waiting = {name for wait in held for name in wait.who}
        free = [wait for wait in held if _can_end(wait, waiting)]
        if not free:
            return held
        held = [wait for wait in held if wait not in free]


def _can_end(wait: Wait, waiting: set[str]) -> bool:
    blocked = [other in waiting for other in wait.others]
    return not blocked or not (any(blocked) if wait.everyone else all(blocked))


def behind(waiting: Collection[int], others: Collection[int], figures: Mapping[int, Mapping[str, float]]) -> list[Wait]:
    """Workers that need a step of those who wait in a collective, in which they have not made it.

    `figures` are what workers have said of themselves, by number.
    """
    pushed = {one: figures[one]["pushed"] for one in waiting if "pushed" in figures.get(one, {})}
    least = min(pushed.values(), default=math.inf)
    ahead = tuple(f"worker {one}" for one in others if figures.get(one, {}).get("needs", 0) > least)
    last = tuple(f"worker {one}" for one, count in pushed.items() if count == least)
    return [Wait(f"step {least:.0f}", ahead, last, cause=UNEVEN)] if ahead else []


class Watchdog:
    """Says why a run cannot go on, if members have been stuck for some seconds."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._since = 0.0
        self._circle: list[Wait] = []

    def look(self, now: float, waits: Sequence[Wait]) -> str | None:
        """Look at who waits, several times a second; why the run cannot go on, or None."""
        circle = stuck(waits)
        if circle != self._circle:
            self._circle, self._since = circle, now
        if not circle or now - self._since <= self._timeout:
            return None
        causes = dict.fromkeys(wait.cause for wait in circle if wait.cause)
        return ": ".join(["nobody can go on", "; ".join(map(str, circle)), *causes])
