"""A simulated run of the data plane: workers that train known gradients, servers, and who says who is a member."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from cnnstrategies.paramserver.specification import Group, ParameterInfo, Specification
from simulation.data.checks import Checks
from simulation.data.members import Members
from simulation.data.watch import MOST_WORKERS
from simulation.faults import Faults, Network, draw
from simulation.plane import Outcome, play
from simulation.world import World

TIMEOUT = 1.0
BUSY = 1.5  # seconds in which faults begin
PIPELINED = 216862  # the draw of whether each slice of a step is made for itself: none whose seeds have found faults
CHANGES = 126  # the draw of whether workers pull compressed changes
KILLED = 40  # the draw of whether the coordinator is killed: likewise
CHOSEN = 7307  # the draw of whether they choose while they train: none whose seeds have found faults before
MODES: Mapping[str, Mapping[str, Any]] = {
    "sync": {"mode": "sync"},
    "sync with clipping": {"mode": "sync", "clip_norm": 0.5},
    "async": {"mode": "async"},
    "ssp": {"mode": "ssp", "staleness": 1},
    "local": {"mode": "local"},
}


_OPTIONS: dict[str, Any] = {
    "lr": 1.0, "momentum": 0.5, "dampening": 0, "weight_decay": 0, "nesterov": False, "maximize": False,
    "foreach": False, "differentiable": False, "fused": None,
}  # fmt: skip


class Plan(NamedTuple):
    """What is simulated.

    Attributes:
        pipelined: Whether each slice of a step is made for itself.
        pulls: How values are encoded that workers pull.
        restarts: How often a process that is lost is started again.
        away: Whether the coordinator is killed, and for a moment nobody says who is a member.
    """

    workers: int = 2
    servers: int = 1
    mode: str = "sync"
    parameters: int = 2
    replication: int = 1
    pipelined: bool = False
    pulls: Literal["none", "topk", "auto"] = "none"
    restarts: int = 0
    away: bool = False

    @classmethod
    def of(cls, seed: int) -> "Plan":
        """That of a seed."""
        workers, servers = 1 + int(3 * draw(seed, 61)), 1 + int(3 * draw(seed, 62))
        mode = list(MODES)[int(len(MODES) * draw(seed, 63))]
        common = mode in ("sync", "sync with clipping")
        changes = (common or mode == "local") and draw(seed, CHANGES) < 0.24
        chosen = changes and draw(seed, CHOSEN) < 0.5
        return cls(
            workers,
            servers,
            mode,
            parameters=2 + int(3 * draw(seed, 67)),
            replication=2 if servers > 1 and draw(seed, 64) < 0.75 else 1,
            pipelined=mode == "sync" and not changes and draw(seed, PIPELINED) < 0.6,
            pulls="auto" if chosen else "topk" if changes else "none",
            restarts=int(3 * draw(seed, 66)),
            away=draw(seed, KILLED) < 0.3,
        )

    @property
    def places(self) -> list[tuple[str, int]]:
        """The processes that can be hit."""
        places = [("worker", one) for one in range(self.workers)]
        return places + 2 * [("server", one) for one in range(self.servers)]

    @property
    def specification(self) -> Specification:
        """What is trained, and how."""
        return Specification(
            tuple(ParameterInfo(str(one), (MOST_WORKERS,), "float64") for one in range(self.parameters)),
            "torch.optim.sgd.SGD",
            (Group(tuple(range(self.parameters)), dict(_OPTIONS)),),
            self.workers,
            self.servers,
            pipelined=self.pipelined,
            replication=self.replication,
            slice_bytes=64,
            timeout=TIMEOUT,
            session=1,
            pull_compression=self.pulls,
            topk_density=0.5,
            **MODES[self.mode],
        )


def drawn(seed: int) -> tuple[Plan, Faults]:
    """What is simulated for a seed, and what goes wrong."""
    plan = Plan.of(seed)
    return plan, Faults(seed, plan.places, TIMEOUT, BUSY, tcp=True)


def run(plan: Plan, faults: Network, pace: int, traced: bool = False) -> Outcome:
    """Run a plan; from `pace` is drawn how long things take, and what goes wrong that is no fault of a link."""
    specification = plan.specification
    world = World(pace, faults)
    world.tcp = True
    world.trace = [] if traced else None
    members = Members(pace, world, specification, plan.restarts, BUSY, plan.away)
    checks = Checks(world, members, specification)
    return play(world, members.start, checks, TIMEOUT / 10)
