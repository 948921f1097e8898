"""What must not be waited for without end: members that were promised, and members that wait for each other."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Wait:
    """What a member waits for.

    Attributes:
        what: A name for the user.
        others: For whom.
        everyone: Whether for all of these, and not for any.
    """

    what: str
    others: tuple[str, ...]
    everyone: bool = True


def stuck(waits: Mapping[str, Wait]) -> list[str]:
    """Those of the waiting that nobody who does not wait can set free, in order."""
    held = dict(waits)
    while True:
        free = [name for name, wait in held.items() if _is_free(wait, held)]
        if not free:
            return sorted(held)
        for name in free:
            del held[name]


def _is_free(wait: Wait, held: Mapping[str, Wait]) -> bool:
    waiting = [other in held for other in wait.others]
    return not waiting or not (any(waiting) if wait.everyone else all(waiting))


class Watchdog:
    """Promises that must be kept in time, and circles of waits that must not last.

    Args:
        timeout: Seconds that a circle may last.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._promises: dict[tuple[str, int], tuple[float, str]] = {}
        self._since = 0.0
        self._circle: dict[str, Wait] = {}

    def promise(self, role: str, identity: int, until: float, else_why: str) -> None:
        """Somebody will take a place.

        Args:
            role: Of which role.
            identity: Which place.
            until: Until when.
            else_why: Why the run cannot go on without.
        """
        self._promises[role, identity] = until, else_why

    def kept(self, role: str, identity: int) -> None:
        """Somebody has taken the place."""
        self._promises.pop((role, identity), None)

    def look(self, now: float, waits: Mapping[str, Wait]) -> str | None:
        """Why the run cannot go on, if a promise was not kept or a circle has lasted.

        Args:
            now: The time.
            waits: What each member waits for that waits for something here.
        """
        for until, why in self._promises.values():
            if now > until:
                return why
        circle = {name: waits[name] for name in stuck(waits)}
        if circle != self._circle:
            self._circle, self._since = circle, now
        if not circle or now - self._since <= self._timeout:
            return None
        chain = "; ".join(
            f"{name} waits in `{wait.what}` for {', '.join(wait.others)}" for name, wait in circle.items()
        )
        return f"nobody can go on: {chain}"
