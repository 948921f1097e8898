"""A simulated run of the control plane: the coordinator and its members."""

from typing import NamedTuple

from cnnstrategies.paramserver.coordinator.settings import CoordinatorSettings
from tests.paramserver.simulation.faults import Fault, Faults, Network, draw
from tests.paramserver.simulation.invariants import Invariants
from tests.paramserver.simulation.joiners import Joiners
from tests.paramserver.simulation.plane import Outcome, play
from tests.paramserver.simulation.toys import Toys
from tests.paramserver.simulation.world import World

TIMEOUT = 1.0
BUSY = 1.5  # Seconds within which faults begin.
# Numbers of draws. They are chosen so that the seeds that have found faults before keep their runs.
JOINED = 823  # Draw of whether workers join a run.
KILLED = 40  # Draw of whether the coordinator is killed between a record of its journal and the record's messages.
EAGER = 3375  # Draw of whether workers load samples before they know the others' epoch, and come midway.


class Plan(NamedTuple):
    """The settings of a simulated run.

    Attributes:
        survivable: Number of servers that may be lost at once.
        restarts: Number of times that a killed process is started again.
        max_joiners: Number of places for joiners.
        eager: Whether workers load samples before they know the others' epoch, and come midway, as under Lightning.
        meets: Whether the workers take part in a collective at the end of each epoch.
    """

    workers: int = 2
    servers: int = 1
    survivable: int = 0
    restarts: int = 0
    epochs: int = 2
    nodes: int = 1
    max_joiners: int = 0
    eager: bool = False
    meets: bool = True

    @classmethod
    def of(cls, seed: int) -> "Plan":
        """Return the plan of a seed."""
        servers = int(4 * draw(seed, 42))
        survivable = int(draw(seed, 43) < 0.5 and servers > 1)
        eager = draw(seed, EAGER) < 0.25
        restarts = max(int(3 * draw(seed, 44)), int(eager))
        max_joiners = int(draw(seed, JOINED) < 0.25) * (1 + int(2 * draw(seed, 51)))
        return cls(
            workers=1 + int(4 * draw(seed, 41)),
            servers=servers,
            survivable=survivable,
            restarts=restarts,
            epochs=2 + int(2 * draw(seed, 45)),
            nodes=1 + int(3 * draw(seed, 46)),
            max_joiners=max_joiners,
            eager=eager,
            meets=not eager or draw(seed, EAGER, 1) < 0.5,
        )

    @property
    def places(self) -> list[tuple[str, int]]:
        """Role and id of each process that faults can hit."""
        places = [("worker", number) for number in range(self.workers)] + [
            ("server", number) for number in range(self.servers)
        ]
        places += [("worker", self.workers + number) for number in range(self.max_joiners)]
        return [*places, ("coordinator", 0), *(("supervision", node) for node in range(self.nodes))]


def drawn(seed: int) -> tuple[Plan, Faults]:
    """Return the plan and the faults of a seed."""
    plan = Plan.of(seed)
    faults = Faults(seed, plan.places, TIMEOUT, BUSY)
    faults.timed += _kills(seed) + [_kill_of_worker(seed, plan.workers)] * plan.eager
    if plan.restarts and draw(seed, KILLED) < 0.5:
        faults.fatal_messages = {
            1 + int(400 * draw(seed, KILLED, ordinal)) for ordinal in range(1 + int(2 * draw(seed, KILLED, 2)))
        }
    return plan, faults


def run(plan: Plan, faults: Network, pace: int, traced: bool = False) -> Outcome:
    """Simulate a plan; `pace` is the seed of all durations."""
    settings = CoordinatorSettings(
        "sim", plan.workers, plan.servers, TIMEOUT, 3 * TIMEOUT, plan.survivable, plan.restarts > 0,
        nodes=plan.nodes, max_joiners=plan.max_joiners,
    )  # fmt: skip
    world = World(pace, faults)
    if traced:
        world.trace = []
    toys = Toys(world, settings, plan, pace)
    invariants = Invariants(world, toys, settings)
    Joiners(pace, world, toys, plan.max_joiners)
    return play(world, toys.start, invariants, TIMEOUT / 4)


def _kills(seed: int) -> list[Fault]:
    """Draw additional deaths of the coordinator."""
    count = int(draw(seed, 47) < 0.5) * (1 + int(draw(seed, 48) < 0.3))
    return [Fault("kill", "coordinator", 0, BUSY * draw(seed, 49, ordinal), 0.0) for ordinal in range(count)]


def _kill_of_worker(seed: int, workers: int) -> Fault:
    """Draw the death of a worker that is started again, at a time at which most workers have begun to train."""
    return Fault("kill", "worker", int(workers * draw(seed, EAGER, 2)), BUSY * (0.4 + draw(seed, EAGER, 3)), 0.0)
