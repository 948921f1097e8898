"""A simulated run of the control plane: the coordinator and its members."""

from cnnstrategies.paramserver.coordinator.settings import CoordinatorSettings
from cnnstrategies.paramserver.simulation.faults import Fault, Faults, MessageFault, draw
from cnnstrategies.paramserver.simulation.invariants import Invariants
from cnnstrategies.paramserver.simulation.joiners import Joiners
from cnnstrategies.paramserver.simulation.outcome import Outcome
from cnnstrategies.paramserver.simulation.toys import Toys
from cnnstrategies.paramserver.simulation.violation import ViolationError
from cnnstrategies.paramserver.simulation.world import World

TIMEOUT = 1.0
BUSY = 1.5  # seconds in which faults begin
HORIZON = 100.0  # no run takes longer
PATIENT = 824  # the draw of whether a member may be silent for longer, as behind a link that is cut
SILENCE = 5.0  # seconds for which one may be then: longer than any link is cut
JOINED = 823  # the draw of whether workers join a run: not those whose seeds have found faults before
TAKEOVER = 0.35  # seconds after which a server's copies may take over
COPIED = 327222  # the draw of whether they may: likewise
EAGER = 3375  # the draw of whether workers load before they know where others are, and come midway: likewise


def simulate(seed: int, removed: frozenset[Fault | MessageFault] = frozenset(), traced: bool = False) -> Outcome:
    """Run one seed.

    Args:
        seed: Decides everything.
        removed: Faults that do not happen.
        traced: Whether to write down what happens.
    """
    workers, servers = 1 + int(4 * draw(seed, 41)), int(4 * draw(seed, 42))
    survivable = int(draw(seed, 43) < 0.5 and servers > 1)
    eager = draw(seed, EAGER) < 0.25
    meets = not eager or draw(seed, EAGER, 1) < 0.5
    restarts = max(int(3 * draw(seed, 44)), eager)
    epochs, nodes = 2 + int(2 * draw(seed, 45)), 1 + int(3 * draw(seed, 46))
    elastic = int(draw(seed, JOINED) < 0.25) * (1 + int(2 * draw(seed, 51)))
    silence = SILENCE if not elastic and draw(seed, PATIENT) < 0.2 else 0.0
    takeover = TAKEOVER if survivable and restarts and draw(seed, COPIED) < 0.3 else 0.0
    settings = CoordinatorSettings(
        "sim", workers, servers, TIMEOUT, 3 * TIMEOUT, survivable, (0,), restarts > 0, nodes=nodes,
        restartable=restarts > 0, elastic=elastic, silence=silence, takeover=takeover,
    )  # fmt: skip
    places = [("worker", one) for one in range(workers)] + [("server", one) for one in range(servers)]
    places += [("worker", workers + one) for one in range(elastic)]
    places += [("coordinator", 0), *(("supervision", node) for node in range(nodes))]
    faults = Faults(seed, places, TIMEOUT, BUSY, removed)
    kills = _kills(seed) + [_kill_of_worker(seed, workers)] * eager
    faults.timed += [kill for kill in kills if kill not in removed]
    world = World(seed, faults)
    if traced:
        world.trace = []
    toys = Toys(world, settings, epochs, restarts, nodes, seed, eager, meets)
    invariants = Invariants(world, toys, settings, epochs)
    Joiners(seed, world, toys, elastic)
    violation = None
    looked = 0.0
    try:
        toys.start()
        while not invariants.over and world.now < HORIZON and world.step():
            if world.now - looked > TIMEOUT / 4:
                looked = world.now
                invariants.look()
        if not invariants.over:
            raise ViolationError(f"17: the run is not over after {world.now:.1f} s")
        invariants.check()
    except ViolationError as error:
        violation = str(error)
    met: list[Fault | MessageFault] = [*faults.timed, *faults.met]
    return Outcome(violation, world.events, world.now, faults.counts, met, world.trace or [])


def _kills(seed: int) -> list[Fault]:
    """More deaths of the coordinator than others have."""
    many = int(draw(seed, 47) < 0.5) * (1 + int(draw(seed, 48) < 0.3))
    return [Fault("kill", "coordinator", 0, BUSY * draw(seed, 49, one), 0.0) for one in range(many)]


def _kill_of_worker(seed: int, workers: int) -> Fault:
    """One that is started again, when most have begun."""
    return Fault("kill", "worker", int(workers * draw(seed, EAGER, 2)), BUSY * (0.4 + draw(seed, EAGER, 3)), 0.0)
