"""What must not be waited for without end: members that were promised, and members that wait for each other."""

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
    """What some members wait for.

    Attributes:
        what: A name for the user.
        who: Those that wait.
        others: For whom.
        everyone: Whether for all of these, and not for any.
        cause: How that may have come about, and what helps.
    """

    what: str
    who: tuple[str, ...]
    others: tuple[str, ...]
    everyone: bool = True
    cause: str = ""

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

    Args:
        waiting: Who has come to the collective.
        others: Who has not.
        figures: What workers have said of themselves, by number.
    """
    pushed = {one: figures[one]["pushed"] for one in waiting if "pushed" in figures.get(one, {})}
    least = min(pushed.values(), default=math.inf)
    ahead = tuple(f"worker {one}" for one in others if figures.get(one, {}).get("needs", 0) > least)
    last = tuple(f"worker {one}" for one, count in pushed.items() if count == least)
    return [Wait(f"step {least:.0f}", ahead, last, cause=UNEVEN)] if ahead else []


class Watchdog:
    """Promises that must be kept in time, and circles of waits that must not last.

    Args:
        timeout: Seconds that a circle may last.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._promises: dict[tuple[str, int], tuple[float, str]] = {}
        self._since = 0.0
        self._circle: list[Wait] = []

    def promise(self, role: str, identity: int, until: float, else_why: str) -> None:
        """Somebody will take a place."""
        self._promises[role, identity] = until, else_why

    def kept(self, role: str, identity: int) -> None:
        """Somebody has taken the place."""
        self._promises.pop((role, identity), None)

    def look(self, now: float, waits: Sequence[Wait]) -> str | None:
        """Why the run cannot go on, if a promise was not kept or a circle has lasted."""
        for until, why in self._promises.values():
            if now > until:
                return why
        circle = stuck(waits)
        if circle != self._circle:
            self._circle, self._since = circle, now
        if not circle or now - self._since <= self._timeout:
            return None
        causes = dict.fromkeys(wait.cause for wait in circle if wait.cause)
        return ": ".join(["nobody can go on", "; ".join(map(str, circle)), *causes])
