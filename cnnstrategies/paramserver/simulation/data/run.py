"""A simulated run of the data plane: workers that train known gradients, servers, and who says who is a member."""

from collections.abc import Mapping
from typing import Any

from cnnstrategies.paramserver.simulation.data.checks import Checks
from cnnstrategies.paramserver.simulation.data.members import Members
from cnnstrategies.paramserver.simulation.data.watch import MOST_WORKERS
from cnnstrategies.paramserver.simulation.faults import Fault, Faults, MessageFault, draw
from cnnstrategies.paramserver.simulation.outcome import Outcome
from cnnstrategies.paramserver.simulation.violation import ViolationError
from cnnstrategies.paramserver.simulation.world import World
from cnnstrategies.paramserver.specification import Group, ParameterInfo, Specification

TIMEOUT = 1.0
BUSY = 1.5  # seconds in which faults begin
BACKED_UP = 4498  # the draw of whether steps wait for all: none whose seeds have found faults before
HORIZON = 300.0  # no run takes longer
EVENTS = 100_000  # nor has one as many: a tenth is rare
PIPELINED = 216862  # the draw of whether each slice of a step is made for itself: none whose seeds have found faults
CHANGES = 126  # the draw of whether workers pull compressed changes
CHOSEN = 7307  # the draw of whether they choose while they train: none whose seeds have found faults before
MODES: tuple[Mapping[str, Any], ...] = (
    {"mode": "sync"},
    {"mode": "sync", "clip_norm": 0.5},
    {"mode": "async"},
    {"mode": "ssp", "staleness": 1},
    {"mode": "local"},
)


_OPTIONS: dict[str, Any] = {
    "lr": 1.0, "momentum": 0.5, "dampening": 0, "weight_decay": 0, "nesterov": False, "maximize": False,
    "foreach": False, "differentiable": False, "fused": None,
}  # fmt: skip


def specification_of(seed: int) -> Specification:
    """What is trained, and how."""
    servers = 1 + int(3 * draw(seed, 62))
    snapshots = 3 if draw(seed, 65) < 0.4 else 0
    parameters = 2 + int(3 * draw(seed, 67))
    workers = 1 + int(3 * draw(seed, 61))
    mode = MODES[int(len(MODES) * draw(seed, 63))]
    backed_up = workers > 1 and mode["mode"] == "sync" and draw(seed, BACKED_UP) < 0.2
    changes = mode["mode"] in ("sync", "local") and not backed_up and draw(seed, CHANGES) < 0.24
    chosen = changes and draw(seed, CHOSEN) < 0.5
    pipelined = mode == {"mode": "sync"} and not (backed_up or changes) and draw(seed, PIPELINED) < 0.6
    return Specification(
        tuple(ParameterInfo(str(one), (MOST_WORKERS,), "float64") for one in range(parameters)),
        "torch.optim.sgd.SGD",
        (Group(tuple(range(parameters)), dict(_OPTIONS)),),
        workers,
        servers,
        backup_workers=1 + int((workers - 1) * draw(seed, BACKED_UP, 1)) if backed_up else 0,
        pipelined=pipelined,
        replication=2 if servers > 1 and draw(seed, 64) < 0.5 else 1,
        snapshot_every=snapshots,
        snapshot_directory="simulated" if snapshots else None,
        slice_bytes=64,
        timeout=TIMEOUT,
        session=1,
        pull_compression="auto" if chosen else "topk" if changes else "none",
        compression_ratio=0.5,
        **mode,
    )


def simulate(
    seed: int, removed: frozenset[Fault | MessageFault] = frozenset(), traced: bool = False, successor: bool = False
) -> Outcome:
    """Run one seed.

    Args:
        seed: Decides everything.
        removed: Faults that do not happen.
        traced: Whether to write down what happens.
        successor: Whether the coordinator is killed, and another follows.
    """
    specification = specification_of(seed)
    places = [("worker", one) for one in range(specification.workers)]
    places += 2 * [("server", one) for one in range(specification.servers)]
    faults = Faults(seed, places, TIMEOUT, BUSY, removed, tcp=True)
    world = World(seed, faults)
    world.tcp = True
    world.trace = [] if traced else None
    members = Members(seed, world, specification, int(3 * draw(seed, 66)), BUSY, successor)
    checks = Checks(world, members, specification)
    violation, looked = None, 0.0
    try:
        members.start()
        while not checks.over and world.now < HORIZON and world.step():
            if world.events > EVENTS:
                raise ViolationError(f"17: {world.events:,} events, and no end")
            if world.now - looked > TIMEOUT / 10:
                looked = world.now
                checks.look()
        checks.look()
        checks.check()
    except ViolationError as error:
        violation = str(error)
    met: list[Fault | MessageFault] = [*faults.timed, *faults.met]
    return Outcome(violation, world.events, world.now, faults.counts, met, world.trace or [])
