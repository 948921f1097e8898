"""Layouts of a network on ranks: their number and numbering, and which computes what in which order in a step."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.shares import check_count, deal, rotation

Kind = Literal["forward", "backward"]
KINDS: tuple[Kind, ...] = ("forward", "backward")
Schedule = Literal["gpipe", "1f1b"]
SCHEDULES = ("gpipe", "1f1b")
Order = Literal["stages", "replicas"]
ORDERS = ("stages", "replicas")
Checkpointing = Literal["never", "except_last", "always"]  # For which microbatches of a rank a forward runs twice.
CHECKPOINTING = ("never", "except_last", "always")


@dataclass(frozen=True)
class Layout:
    """Where the network is cut and how often each stage is replicated.

    Attributes:
        cuts: Index of the first node of each stage but the first, ascending.
        replicas: Replicas of each stage.
    """

    cuts: tuple[int, ...]
    replicas: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.replicas) == len(self.cuts) + 1
        assert all(left < right for left, right in zip(self.cuts, self.cuts[1:], strict=False))

    @property
    def devices(self) -> int:
        """Devices in use."""
        return sum(self.replicas)


def even_replicas(devices: int, stages: int) -> tuple[int, ...]:
    """The same number of replicas for every stage."""
    if devices % stages:
        raise ConfigurationError(
            f"{devices} devices do not divide evenly into {stages} stages: give replicas, one number per stage with "
            f"the sum {devices}, or use a multiple of {stages} devices"
        )
    return (devices // stages,) * stages


def check_layout(cuts: int, placement: "Placement", ranks: int) -> None:
    """Refuse a layout that cannot run."""
    replicas, microbatches = placement.replicas, placement.microbatches
    if not replicas or min(replicas) < 1:
        raise ConfigurationError(f"replicas={list(replicas)}: every stage needs at least 1 replica")
    if len(replicas) != cuts + 1:
        raise ConfigurationError(
            f"replicas={list(replicas)} are for {len(replicas)} stages, but {cuts} cuts make {cuts + 1}: give one "
            "number per stage"
        )
    if sum(replicas) != ranks:
        raise ConfigurationError(
            f"replicas={list(replicas)} need {sum(replicas)} devices, but there are {ranks}: change replicas or the "
            "number of devices"
        )
    if microbatches < max(replicas):
        raise ConfigurationError(
            f"microbatches={microbatches} are fewer than the {max(replicas)} replicas of a stage, some of which would "
            f"have nothing to do: use at least {max(replicas)}, better {4 * max(replicas)}"
        )
    if not placement.shares:
        return
    check_count(placement.shares, ranks)
    for stage in range(len(replicas)):
        shares = placement.shares_of(stage)
        if not min(deal(microbatches, shares)):
            raise ConfigurationError(
                f"microbatches={microbatches}: the replicas of stage {stage} have shares {list(shares)} of them, by "
                f"which one would have none; {math.ceil(sum(shares) / min(shares))} are enough"
            )


@dataclass(frozen=True)
class Task:
    """A computation of a rank, of a microbatch in a stage.

    What it receives and sends follows from it: a forward needs the same microbatch's forward of the stages that
    make its inputs, a backward the backward of those that use its outputs.
    """

    kind: Kind
    stage: int
    microbatch: int


@dataclass(frozen=True)
class RankPlace:
    """Where a rank stands: its stage, and which replica of that it is."""

    stage: int
    replica: int


@dataclass(frozen=True)
class Placement:
    """The numbering of the ranks, neighbours in which are likely to be on one node, and which runs what.

    Attributes:
        replicas: Replicas of each stage.
        order: ``stages``: those of stage 0 first, replica by replica, so that the replicas of a stage are together.
            ``replicas``: the first replica of each stage, then the second ones, so that those that send each other
            activations are together: all of them, where the replicas of each stage are a multiple of those of others.
        microbatches: Of a step.
        shares: For each rank what part of them it runs, in proportion to the other replicas of its stage; where there
            are none, the replicas take turns.
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
        """Number of ranks."""
        return len(self._places)

    def ranks(self, stage: int) -> Sequence[int]:
        """The ranks of a stage, replica by replica."""
        return self._ranks[stage]

    def place(self, rank: int) -> RankPlace:
        """Stage and replica of a rank."""
        return self._places[rank]

    def rank_of(self, stage: int, microbatch: int) -> int:
        """The rank that runs a microbatch in a stage."""
        return self._ranks[stage][self.runs[stage][microbatch]]

    @cached_property
    def runs(self) -> list[tuple[int, ...]]:
        """For each stage which of its replicas runs each microbatch."""
        return [rotation(self.shares_of(stage), self.microbatches) for stage in range(self.stages)]

    def shares_of(self, stage: int) -> tuple[float, ...]:
        """The shares of a stage's replicas."""
        return tuple(self.shares[rank] if self.shares else 1 for rank in self._ranks[stage])

    @property
    def loads(self) -> tuple[float, ...]:
        """By which shares the samples are dealt to the replicas of the first stage: by their microbatches, if unequal.

        So that all microbatches have as many, but for one.
        """
        return tuple(map(self.runs[0].count, range(self.replicas[0]))) if self.shares else self.shares_of(0)

    def own(self, rank: int) -> list[int]:
        """The microbatches that a rank runs."""
        place = self.place(rank)
        return [microbatch for microbatch, replica in enumerate(self.runs[place.stage]) if replica == place.replica]

    def describe(self, rank: int) -> str:
        """A rank in words, for messages."""
        return self._descriptions[rank]

    @cached_property
    def _places(self) -> list[RankPlace]:
        places = [RankPlace(stage, replica) for stage, count in enumerate(self.replicas) for replica in range(count)]
        if self.order == "replicas":
            # With equal shares a microbatch runs on replicas that are equal modulo this in all stages.
            apart = math.gcd(*self.replicas)
            places.sort(key=lambda place: (place.replica % apart, place.replica // apart, place.stage))
        return places

    @cached_property
    def _ranks(self) -> list[list[int]]:
        ranks: list[list[int]] = [[0] * count for count in self.replicas]
        for rank, place in enumerate(self._places):
            ranks[place.stage][place.replica] = rank
        return ranks

    @cached_property
    def _descriptions(self) -> list[str]:
        return [f"stage {one.stage}, replica {one.replica} (rank {rank})" for rank, one in enumerate(self._places)]


def turns(replicas: Sequence[int], microbatches: int, schedule: str, run_ahead: bool = False) -> Callable[[Task], int]:
    """A clock that all ranks share: when each task would run if all took the same time.

    A task comes after those whose messages it needs, and no two of a rank come at once. A rank runs its tasks in this
    order. Under 1f1b a replica then holds at once as many microbatches as there are ranks from its stage on over the
    stage's replicas, rounded up (PipeDream's NOAM, Narayanan et al. 2019, for each stage): fewer would leave ranks
    behind it idle or, where a stage is wider than the one before it, wait for each other for ever. To ``run_ahead`` is
    to hold one more where rounding up has added nothing, so that a message may take a while before a rank waits for
    it; not in the last stage, whose backward needs no other. Arguments are those of :func:`timetable`.
    """
    if schedule not in SCHEDULES:
        raise ConfigurationError(f"schedule={schedule!r}: accepted are {' and '.join(SCHEDULES)}")
    last = len(replicas) - 1
    first = [stage + (run_ahead and stage == last) for stage in range(len(replicas))]
    ranks = [*accumulate(reversed(replicas))][::-1]  # from a stage on
    between = [2 * count - 1 + 2 * (run_ahead and stage < last) for stage, count in enumerate(ranks)]
    if schedule == "gpipe":
        between = [one + 2 * microbatches for one in between]

    def turn(task: Task) -> int:
        later = between[task.stage] if task.kind == "backward" else 0
        return 2 * task.microbatch + first[task.stage] + later

    return turn


def tasks_of(placement: Placement, rank: int, schedule: str = "1f1b", run_ahead: bool = False) -> list[Task]:
    """One rank's computations in order; see :func:`timetable`."""
    stage, own = placement.place(rank).stage, placement.own(rank)
    tasks = [Task(kind, stage, microbatch) for kind in KINDS for microbatch in own]
    return sorted(tasks, key=turns(placement.replicas, placement.microbatches, schedule, run_ahead))


def timetable(
    replicas: Sequence[int],
    microbatches: int,
    schedule: str = "1f1b",
    run_ahead: bool = False,
    shares: Sequence[float] = (),
) -> list[list[Task]]:
    """Each rank's computations in order.

    ``gpipe`` runs all forwards, then all backwards (Huang et al., "GPipe", 2019). ``1f1b`` starts a microbatch's
    backward as soon as it can, which bounds the activations that are held (Narayanan et al., "PipeDream", 2019, and
    Fan et al., "DAPPLE", 2021, for the synchronous form).
    For each replica of each stage its tasks, stage by stage; one that gets no microbatch has none. In that order are
    the shares, if any.
    """
    placement = Placement(tuple(replicas), microbatches=microbatches, shares=tuple(shares))
    return [tasks_of(placement, rank, schedule, run_ahead) for rank in range(placement.world_size)]
