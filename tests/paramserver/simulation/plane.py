"""A simulated run, from its start to what came of it."""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, Protocol

from simulation.traces import Cue
from simulation.world import World

HORIZON = 300.0  # no run takes longer, in seconds of virtual time
EVENTS = 100_000  # nor has one as many: a tenth is rare


class ViolationError(Exception):
    """An invariant does not hold."""


class Checks(Protocol):
    """What watches a run, and raises :class:`ViolationError`."""

    @property
    def over(self) -> bool:
        """Whether the run has come to its end."""

    def look(self) -> None:
        """See now and then whether something goes on."""

    def check(self) -> None:
        """See at the end whether all is as it should be."""


class Outcome(NamedTuple):
    """What came of a simulated run: the invariant that did not hold, or None, and how it has ended for each worker.

    Attributes:
        events: How many there were.
        seconds: Of virtual time.
        counts: Injected faults, by kind.
        trace: A line for each event, if it was asked for.
        cues: The moments at which messages were hit, if the trace was asked for.
    """

    violation: str | None
    events: int
    seconds: float
    counts: Counter[str]
    trace: list[str]
    cues: list[Cue]
    end: str


def play(world: World, start: Callable[[], None], checks: Checks, often: float) -> Outcome:
    """Start a run, go on to its end, and look at it every so many seconds."""
    violation, looked = None, 0.0
    try:
        start()
        while not checks.over and world.now < HORIZON and world.step():
            if world.events > EVENTS:
                raise ViolationError(f"17: {world.events:,} events, and no end")
            if world.now - looked > often:
                looked = world.now
                checks.look()
        if not checks.over:
            raise ViolationError(f"17: the run is not over after {world.now:.1f} s")
        checks.look()
        checks.check()
    except ViolationError as error:
        violation = str(error)
    return Outcome(violation, world.events, world.now, world.faults.counts, world.trace or [], world.cues, world.end)
