"""A simulated run, from its start to its outcome."""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, Protocol

from tests.paramserver.simulation.rules import RULES
from tests.paramserver.simulation.traces import Cue
from tests.paramserver.simulation.world import World

HORIZON = 300.0  # Longest duration of a run, in seconds of virtual time.
EVENTS = 100_000  # Largest number of events of a run. Few runs have a tenth of it.


class ViolationError(Exception):
    """An invariant that does not hold.

    Args:
        rule: Number of the invariant in :data:`~tests.paramserver.simulation.rules.RULES`.
        text: What has happened.
    """

    def __init__(self, rule: int, text: str) -> None:
        assert rule in RULES, f"{rule} is not the number of an invariant"
        super().__init__(f"{rule}: {text}")


class Checks(Protocol):
    """Checks that watch a run and raise :class:`ViolationError`."""

    @property
    def over(self) -> bool:
        """Whether the run is over."""

    def look(self) -> None:
        """Raise if the run makes no progress; called now and then."""

    def check(self) -> None:
        """Raise if an invariant does not hold at the end of the run."""


class Outcome(NamedTuple):
    """The outcome of a simulated run.

    Attributes:
        violation: The first invariant that did not hold; None if all held.
        events: Number of events.
        seconds: Duration in virtual time.
        counts: Number of injected faults, by kind.
        trace: One line for each event, if a trace was requested.
        cues: The moments at which messages were hit by faults, if a trace was requested.
        end: The end of each worker, as one line of text.
    """

    violation: str | None
    events: int
    seconds: float
    counts: Counter[str]
    trace: list[str]
    cues: list[Cue]
    end: str


def play(world: World, start: Callable[[], None], checks: Checks, often: float) -> Outcome:
    """Start a run and play it to its end; the checks look at it every `often` seconds of virtual time."""
    violation, looked = None, 0.0
    try:
        start()
        while not checks.over and world.now < HORIZON and world.step():
            if world.events > EVENTS:
                raise ViolationError(13, f"the run is not over after {world.events:,} events")
            if world.now - looked > often:
                looked = world.now
                checks.look()
        if not checks.over:
            raise ViolationError(13, f"the run is not over after {world.now:.1f} s")
        checks.look()
        checks.check()
    except ViolationError as error:
        violation = str(error)
    return Outcome(violation, world.events, world.now, world.faults.counts, world.trace or [], world.cues, world.end)
