"""Layouts of a network on ranks: stages, replicas, the numbering of the ranks, and the order of each rank's tasks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.shares.dealing import deal, rotation
from cnnstrategies.shares.options import check_count

Kind = Literal["forward", "backward"]
KINDS: tuple[Kind, ...] = ("forward", "backward")
Schedule = Literal["gpipe", "1f1b"]
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b")
Order = Literal["stages", "replicas"]
ORDERS = ("stages", "replicas")
# Whether activations are recomputed: for no microbatch, for all except the rank's last microbatch, or for all.
Checkpointing = Literal["never", "except_last", "always"]
CHECKPOINTING = ("never", "except_last", "always")


@dataclass(frozen=True)
class Layout:
    """Cuts of the network, and the number of replicas of each stage.

    Attributes:
        cuts: For each cut, the index of the first node after the cut, ascending.
        replicas: Number of replicas of each stage.
    """

    cuts: tuple[int, ...]
    replicas: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.replicas) == len(self.cuts) + 1
        assert all(left < right for left, right in zip(self.cuts, self.cuts[1:], strict=False))

    @property
    def devices(self) -> int:
        """Number of devices that the layout needs."""
        return sum(self.replicas)


def even_replicas(devices: int, stages: int) -> tuple[int, ...]:
    """Return the number of replicas of each stage if the devices are divided evenly among the stages.

    Raises:
        ConfigurationError: The number of devices is not a multiple of the number of stages.
    """
    if devices % stages:
        raise ConfigurationError(
            f"{devices} devices do not divide evenly into {stages} stages: give replicas (trainer.strategy.replicas), "
            f"one number per stage with the sum {devices}; or use a number of devices (trainer.devices x "
            f"trainer.num_nodes) that is a multiple of {stages}"
        )
    return (devices // stages,) * stages


def check_layout(cuts: int, placement: "Placement", ranks: int) -> None:
    """Refuse a layout that cannot run.

    Raises:
        ConfigurationError: Cuts, replicas, microbatches, shares and ranks do not fit together.
    """
    replicas, microbatches = placement.replicas, placement.microbatches
    if not replicas or min(replicas) < 1:
        raise ConfigurationError(f"replicas={list(replicas)}: every stage needs at least 1 replica")
    if len(replicas) != cuts + 1:
        raise ConfigurationError(
            f"replicas={list(replicas)} are for {len(replicas)} stages, but {cuts} cuts make {cuts + 1} stages: give "
            "one number per stage in trainer.strategy.replicas, or change trainer.strategy.cuts"
        )
    if sum(replicas) != ranks:
        raise ConfigurationError(
            f"replicas={list(replicas)} need {sum(replicas)} devices, but there are {ranks} devices (trainer.devices x "
            "trainer.num_nodes): change trainer.strategy.replicas or the number of devices"
        )
    if microbatches < max(replicas):
        raise ConfigurationError(
            f"microbatches={microbatches} are fewer than the {max(replicas)} replicas of a stage, so some replicas "
            f"would have nothing to do: set trainer.strategy.microbatches to at least {max(replicas)}, better "
            f"{4 * max(replicas)}"
        )
    if not placement.shares:
        return
    check_count(placement.shares, ranks)
    for stage in range(len(replicas)):
        shares = placement.shares_of(stage)
        if not min(deal(microbatches, shares)):
            raise ConfigurationError(
                f"microbatches={microbatches}: with the shares {list(shares)} a replica of stage {stage} would get no "
                f"microbatch; use at least {math.ceil(sum(shares) / min(shares))} microbatches "
                "(trainer.strategy.microbatches)"
            )


@dataclass(frozen=True)
class Task:
    """The forward or the backward of a microbatch in a stage.

    A forward needs the outputs that the stages before it have computed for the same microbatch. A backward needs the
    gradients that the stages after it have computed for the same microbatch.
    """

    kind: Kind
    stage: int
    microbatch: int


@dataclass(frozen=True)
class RankPlace:
    """The stage of a rank, and the rank's index among the replicas of the stage."""

    stage: int
    replica: int


@dataclass(frozen=True)
class Placement:
    """Numbering of the ranks, and the microbatches that each rank runs.

    Ranks with neighbouring numbers are likely to be on the same node.

    Attributes:
        replicas: Number of replicas of each stage.
        order: ``stages`` numbers all replicas of stage 0 first, then all replicas of stage 1, and so on, so that the
            replicas of a stage are neighbours. ``replicas`` numbers the ranks pipeline by pipeline, so that ranks that
            send each other activations are neighbours. If the numbers of replicas are not multiples of each other, some
            of these ranks are not neighbours.
        microbatches: Number of microbatches in a step.
        shares: Share of each rank. The replicas of a stage divide the microbatches in proportion to their shares.
            Without shares the replicas take turns.
    """

    replicas: tuple[int, ...]
    order: Order = "stages"
    microbatches: int = 0
    shares: tuple[float, ...] = ()

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.replicas)

    @property
    def world_size(self) -> int:
        """Number of ranks, over all stages."""
        return len(self._places)

    def ranks(self, stage: int) -> Sequence[int]:
        """Return the ranks of a stage, in the order of its replicas."""
        return self._ranks[stage]

    def place(self, rank: int) -> RankPlace:
        """Return the stage and the replica of a rank."""
        return self._places[rank]

    def rank_of(self, stage: int, microbatch: int) -> int:
        """Return the rank that runs a microbatch in a stage."""
        return self._ranks[stage][self.runs[stage][microbatch]]

    @cached_property
    def runs(self) -> list[tuple[int, ...]]:
        """For each stage, a tuple that has, for each microbatch, the index of the replica that runs the microbatch."""
        return [rotation(self.shares_of(stage), self.microbatches) for stage in range(self.stages)]

    def shares_of(self, stage: int) -> tuple[float, ...]:
        """Return the shares of a stage's replicas."""
        return tuple(self.shares[rank] if self.shares else 1 for rank in self._ranks[stage])

    @property
    def loads(self) -> tuple[float, ...]:
        """Relative number of samples for each replica of the first stage.

        If shares are configured, this is the replica's number of microbatches, so that the sizes of all microbatches
        differ by at most one sample. Otherwise it is 1.
        """
        return tuple(map(self.runs[0].count, range(self.replicas[0]))) if self.shares else self.shares_of(0)

    def microbatches_of(self, rank: int) -> list[int]:
        """Return the indices of the microbatches that a rank runs, in ascending order."""
        place = self.place(rank)
        return [microbatch for microbatch, replica in enumerate(self.runs[place.stage]) if replica == place.replica]

    def end_together(self, stage: int, sizes: Sequence[int], microbatch: int) -> bool:
        """Whether the replicas of a stage may begin collectives in their last backward passes.

        This is possible if all replicas run their last backward pass at about the same time. Otherwise an early replica
        could wait in its last backward for a late replica that has not begun its last backward. The late replica may in
        turn need a message that the early replica sends only after its last backward, and both would wait forever.

        Args:
            stage: The stage.
            sizes: Number of samples of each microbatch.
            microbatch: The microbatch of a replica's last backward.
        """
        runs = self.runs[stage][microbatch + 1 :]
        later = [replica for replica, size in zip(runs, sizes[microbatch + 1 :], strict=True) if size]
        # No other replica may have two backward passes left. Such a replica takes part in the sum only in its second
        # pass, so this rank would have to wait for it.
        return len(set(later)) == len(later) and not any(sizes[microbatch + self.replicas[stage] :])

    def describe(self, rank: int) -> str:
        """Return a text that names a rank with its stage and replica, for error messages."""
        return self._descriptions[rank]

    @cached_property
    def _places(self) -> list[RankPlace]:
        places = [RankPlace(stage, replica) for stage, count in enumerate(self.replicas) for replica in range(count)]
        if self.order == "replicas":
            # With equal shares, the replicas that run the same microbatch have equal indices modulo this divisor in all
            # stages. Sorting by the remainder therefore puts ranks that send each other activations next to each other.
            divisor = math.gcd(*self.replicas)
            places.sort(key=lambda place: (place.replica % divisor, place.replica // divisor, place.stage))
        return places

    @cached_property
    def _ranks(self) -> list[list[int]]:
        ranks: list[list[int]] = [[0] * count for count in self.replicas]
        for rank, place in enumerate(self._places):
            ranks[place.stage][place.replica] = rank
        return ranks

    @cached_property
    def _descriptions(self) -> list[str]:
        return [
            f"stage {place.stage}, replica {place.replica} (rank {rank})" for rank, place in enumerate(self._places)
        ]


def turns(replicas: Sequence[int], microbatches: int, schedule: str, run_ahead: bool = False) -> Callable[[Task], int]:
    """Return a function that maps each task to its turn, a whole number. A rank runs its tasks in order of their turns.

    The turn is the time at which the task would run if all tasks took equally long. All ranks use the same turns. A
    task has a later turn than the tasks whose messages it needs, and no two tasks of a rank have the same turn.

    Under 1f1b, these turns bound the number of microbatches whose activations a replica holds at once. The bound is the
    number of ranks from the replica's stage to the last stage, divided by the number of replicas of the replica's stage
    and rounded up. (This is PipeDream's NOAM, applied to each stage; Narayanan et al. 2019.) With a smaller bound,
    ranks of later stages would be idle. If a stage had more replicas than the stage before it, a smaller bound would
    even make ranks wait for each other forever.

    With ``run_ahead`` a replica holds one more microbatch, unless the rounding has already added one. The replica can
    then compute while it waits for a message. The last stage never runs ahead, because its backward does not wait for a
    message.

    The arguments have the same meaning as those of :func:`timetable`.

    Raises:
        ConfigurationError: The schedule is not known.
    """
    if schedule not in SCHEDULES:
        raise ConfigurationError(f"schedule={schedule!r} is not known; use {' or '.join(SCHEDULES)}")
    last = len(replicas) - 1
    first_turns = [stage + (run_ahead and stage == last) for stage in range(len(replicas))]
    # For each stage, the number of ranks in this stage and in all later stages.
    ranks = [*accumulate(reversed(replicas))][::-1]
    # For each stage, the turn of a microbatch's backward minus the turn of the microbatch's forward.
    delays = [2 * count - 1 + 2 * (run_ahead and stage < last) for stage, count in enumerate(ranks)]
    if schedule == "gpipe":
        delays = [delay + 2 * microbatches for delay in delays]

    def turn(task: Task) -> int:
        delay = delays[task.stage] if task.kind == "backward" else 0
        return 2 * task.microbatch + first_turns[task.stage] + delay

    return turn


def tasks_of(placement: Placement, rank: int, schedule: str = "1f1b", run_ahead: bool = False) -> list[Task]:
    """Return the tasks of one rank, in the order in which the rank runs them; see :func:`timetable`."""
    stage, microbatches = placement.place(rank).stage, placement.microbatches_of(rank)
    tasks = [Task(kind, stage, microbatch) for kind in KINDS for microbatch in microbatches]
    return sorted(tasks, key=turns(placement.replicas, placement.microbatches, schedule, run_ahead))


def timetable(
    replicas: Sequence[int],
    microbatches: int,
    schedule: str = "1f1b",
    run_ahead: bool = False,
    shares: Sequence[float] = (),
) -> list[list[Task]]:
    """Return the tasks of each rank, in the order in which the rank runs them. Ranks are numbered stage by stage.

    ``gpipe`` runs all forward passes, then all backward passes (Huang et al., "GPipe", 2019). ``1f1b`` runs the
    backward pass of a microbatch as soon as possible, so that a rank holds the activations of few microbatches
    (Narayanan et al., "PipeDream", 2019; Fan et al., "DAPPLE", 2021, for the synchronous form).

    Args:
        replicas: Number of replicas of each stage.
        microbatches: Number of microbatches in a step.
        schedule: ``1f1b`` or ``gpipe``.
        run_ahead: Whether replicas hold one more microbatch under 1f1b; see :func:`turns`.
        shares: Share of each rank, with ranks numbered stage by stage; without shares the replicas take turns.

    Raises:
        ConfigurationError: The schedule is not known.
    """
    placement = Placement(tuple(replicas), microbatches=microbatches, shares=tuple(shares))
    return [tasks_of(placement, rank, schedule, run_ahead) for rank in range(placement.world_size)]
