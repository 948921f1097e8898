"""Other shares for the replicas of a pipeline's stages, by what each takes for a microbatch."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf
from statistics import mean

from cnnstrategies.pipeline.timetable import Placement, Schedule, tasks_of
from cnnstrategies.planning.cluster import Cluster, Host
from cnnstrategies.planning.costs import Link
from cnnstrategies.planning.simulate import simulate
from cnnstrategies.planning.stage_costs import Message, StageCost
from cnnstrategies.shares import GAIN, Proposal, soonest, worth

FREE = Link(inf, 0.0)


def redeal(
    placement: Placement,
    schedule: Schedule,
    run_ahead: bool,
    pairs: Iterable[tuple[int, int]],
    seconds: Sequence[Sequence[float]],
    step: float,
) -> Proposal | None:
    """Microbatches of each rank by which the replicas of a stage are done soonest; None where a step gains too little.

    What it gains is seen in the timetable, run on paper. What a step takes beyond that, as for messages, it takes
    whatever the shares.

    Args:
        placement: What runs where now.
        pairs: Of stages, of which the first sends to the second.
        seconds: Of each rank for the forward of a microbatch, and for the backward.
        step: Seconds of a step now.
    """
    times = [sum(of_rank) for of_rank in zip(*seconds, strict=True)]
    shares = [0] * placement.world_size
    for stage in range(placement.stages):
        ranks = placement.ranks(stage)
        counts = soonest(placement.microbatches, tuple(1 / times[rank] for rank in ranks))
        for rank, count in zip(ranks, counts, strict=True):
            shares[rank] = count
    now = [len(placement.own(rank)) for rank in range(placement.world_size)]
    slowest, then = (max(n * time for n, time in zip(counts, times, strict=True)) for counts in (now, shares))
    if slowest <= (1 + GAIN) * then:
        return None  # The timetable is not run in vain: a long one takes a while.
    dealt = replace(placement, shares=tuple(shares))
    messages = dict.fromkeys(pairs, Message(1, 1))
    stages, cluster = _costs(placement, seconds)
    before, after = (
        simulate(
            [tasks_of(one, rank, schedule, run_ahead) for rank in range(one.world_size)], stages, messages, cluster
        ).step_time
        for one in (placement, dealt)
    )
    return worth(dealt.shares, before, after, step)


def _costs(placement: Placement, seconds: Sequence[Sequence[float]]) -> tuple[list[StageCost], Cluster]:
    """Of each stage what a rank takes on an average, and the ranks' speeds by that."""
    stages, speeds = [], [1.0] * placement.world_size
    for stage in range(placement.stages):
        ranks = placement.ranks(stage)
        forward, backward = (mean(of_ranks[rank] for rank in ranks) for of_ranks in seconds)
        stages.append(StageCost(1, forward, backward, 0, 0, 0))
        for rank in ranks:
            speeds[rank] = (forward + backward) / sum(of_ranks[rank] for of_ranks in seconds)
    return stages, Cluster(tuple(Host(1, FREE, FREE, speed) for speed in speeds))
