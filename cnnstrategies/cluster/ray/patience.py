"""How long the programs of a run on Ray may go on when some of them have ended."""

from collections.abc import Collection
from typing import Protocol

from cnnstrategies.cluster.job import UNLIMITED, WAIT_SECONDS
from cnnstrategies.cluster.ray.lines import Lines
from cnnstrategies.cluster.ray.node import Place
from cnnstrategies.cluster.ray.order import Ends, Order

PATIENCE = 10.0  # Seconds in which the other nodes may say why they end too, after the first that failed.
# Seconds until Ray has said whether a node that does not answer is lost: its five checks may take 65 by default.
LOSS = 90.0


class Clock(Protocol):
    """As much of ``time`` as a driver uses."""

    def monotonic(self) -> float:
        """Seconds since some moment."""

    def sleep(self, seconds: float, /) -> None:
        """Wait."""


class Patience:
    """Says when the driver follows one start of a run no longer.

    A program may fail because a node with others is lost, before Ray knows of that. So after a failure each of the
    others is waited for until it has answered a question that was put since, or Ray has said that it is lost.

    Args:
        order: What runs.
        places: Its nodes.
        lines: Where it is said what is waited for.
        clock: That of the machine.
    """

    def __init__(self, order: Order, places: list[Place], lines: Lines, clock: Clock) -> None:
        self._order, self._places, self._lines, self._clock = order, places, lines, clock
        self._alive: set[int] = set()
        self._stopped: float | None = None
        self._ended: float | None = None
        self._failed: float | None = None
        self._told = False

    def answers(self, node: int) -> None:
        """A node has answered what it was asked after the first failure."""
        self._alive.add(node)

    def unheard(self, running: Collection[int]) -> list[int]:
        """Those of the nodes that are followed which may be lost."""
        return sorted(set(running) - self._alive)

    def over(self, ends: Ends, running: Collection[int], stopping: bool) -> bool:
        """Whether it has waited long enough.

        Args:
            ends: So far.
            running: Nodes that are followed.
            stopping: Whether the run was asked to stop.
        """
        now = self._clock.monotonic()
        if stopping:
            self._stopped = now if self._stopped is None else self._stopped
            return now >= self._stopped + self._order.grace + PATIENCE
        if ends.lost:
            return True
        if ends.failed:
            self._failed = now if self._failed is None else self._failed
            unheard = self.unheard(running) if now >= self._failed + PATIENCE else []
            if unheard and not self._told:
                self._told = True
                names = ", ".join(f"node {node} ({self._places[node].host})" for node in unheard)
                self._lines.say(f"Waiting up to {LOSS:g} s for Ray to say whether it has lost {names}: no answer")
            return now >= self._failed + (LOSS if unheard else PATIENCE)
        if ends.codes:
            self._ended = now if self._ended is None else self._ended
        seconds = UNLIMITED if self._order.goes_on else WAIT_SECONDS
        return bool(seconds) and self._ended is not None and now >= self._ended + seconds
