"""A simulated run of the control plane: the coordinator and its members."""

from typing import NamedTuple

from cnnstrategies.paramserver.coordinator.settings import CoordinatorSettings
from simulation.faults import Fault, Faults, Network, draw
from simulation.invariants import Invariants
from simulation.joiners import Joiners
from simulation.plane import Outcome, play
from simulation.toys import Toys
from simulation.world import World

TIMEOUT = 1.0
BUSY = 1.5  # seconds in which faults begin
JOINED = 823  # the draw of whether workers join a run: not those whose seeds have found faults before
SAID = 40  # the draw of whether the coordinator is killed between a record of its journal and what follows from it
EAGER = 3375  # the draw of whether workers load before they know where others are, and come midway: likewise


class Plan(NamedTuple):
    """What is simulated.

    Attributes:
        survivable: Servers that may be lost at once.
        restarts: How often a process that was killed is started again.
        max_joiners: Places for workers that join.
        eager: Whether workers load before they know where others are, and come midway: as Lightning does.
        meets: Whether they meet at the end of an epoch.
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
        """That of a seed."""
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
        """The processes that can be hit."""
        places = [("worker", one) for one in range(self.workers)] + [("server", one) for one in range(self.servers)]
        places += [("worker", self.workers + one) for one in range(self.max_joiners)]
        return [*places, ("coordinator", 0), *(("supervision", node) for node in range(self.nodes))]


def drawn(seed: int) -> tuple[Plan, Faults]:
    """What is simulated for a seed, and what goes wrong."""
    plan = Plan.of(seed)
    faults = Faults(seed, plan.places, TIMEOUT, BUSY)
    faults.timed += _kills(seed) + [_kill_of_worker(seed, plan.workers)] * plan.eager
    if plan.restarts and draw(seed, SAID) < 0.5:
        faults.dies_saying = {1 + int(400 * draw(seed, SAID, one)) for one in range(1 + int(2 * draw(seed, SAID, 2)))}
    return plan, faults


def run(plan: Plan, faults: Network, pace: int, traced: bool = False) -> Outcome:
    """Run a plan; `pace` is a number from which is drawn how long things take."""
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
    """More deaths of the coordinator than others have."""
    many = int(draw(seed, 47) < 0.5) * (1 + int(draw(seed, 48) < 0.3))
    return [Fault("kill", "coordinator", 0, BUSY * draw(seed, 49, one), 0.0) for one in range(many)]


def _kill_of_worker(seed: int, workers: int) -> Fault:
    """One that is started again, when most have begun."""
    return Fault("kill", "worker", int(workers * draw(seed, EAGER, 2)), BUSY * (0.4 + draw(seed, EAGER, 3)), 0.0)
