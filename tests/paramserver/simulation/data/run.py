"""A simulated run of the data plane: servers, workers that train with known gradients, and their membership."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from cnnstrategies.paramserver.specification import Group, ParameterInfo, Specification
from tests.paramserver.simulation.data.checks import Checks
from tests.paramserver.simulation.data.members import Members
from tests.paramserver.simulation.data.watch import MOST_WORKERS
from tests.paramserver.simulation.faults import Faults, Network, draw
from tests.paramserver.simulation.plane import Outcome, play
from tests.paramserver.simulation.world import World

TIMEOUT = 1.0
BUSY = 1.5  # Seconds within which faults begin.
# Numbers of draws. They are chosen so that the seeds that have found faults before keep their runs.
PIPELINED = 216862  # Draw of whether steps are pipelined: each slice of a step is updated separately.
CHANGES = 126  # Draw of whether workers pull compressed changes.
KILLED = 40  # Draw of whether the coordinator is killed.
CHOSEN = 7307  # Draw of whether workers choose encodings while they train.
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
    """The settings of a simulated run.

    Attributes:
        pipelined: Whether each slice of a step is updated separately.
        pulls: Compression of the values that workers pull.
        restarts: Number of times that a lost process is started again.
        away: Whether the coordinator is killed, so that the view does not change for a while.
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
        """Return the plan of a seed."""
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
        """Role and id of each process that faults can hit; servers are hit twice as often as workers."""
        places = [("worker", number) for number in range(self.workers)]
        return places + 2 * [("server", number) for number in range(self.servers)]

    @property
    def specification(self) -> Specification:
        """Specification of the parameters and the training."""
        return Specification(
            tuple(ParameterInfo(str(number), (MOST_WORKERS,), "float64") for number in range(self.parameters)),
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
    """Return the plan and the faults of a seed."""
    plan = Plan.of(seed)
    return plan, Faults(seed, plan.places, TIMEOUT, BUSY, tcp=True)


def run(plan: Plan, faults: Network, pace: int, traced: bool = False) -> Outcome:
    """Simulate a plan; `pace` is the seed of all durations and of the faults that `faults` does not hold."""
    specification = plan.specification
    world = World(pace, faults)
    world.tcp = True
    world.trace = [] if traced else None
    members = Members(pace, world, specification, plan.restarts, BUSY, plan.away)
    checks = Checks(world, members, specification)
    return play(world, members.start, checks, TIMEOUT / 10)
