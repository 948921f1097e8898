"""Find better shares for the replicas of each stage, from the time that each replica takes for a microbatch."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from math import inf
from statistics import mean

from cnnstrategies.pipeline.timetable import Placement, Schedule, Task, tasks_of
from cnnstrategies.planning.cluster import Cluster, Host
from cnnstrategies.planning.costs import Link
from cnnstrategies.planning.simulate import simulate
from cnnstrategies.planning.stage_costs import StageCost, StageMessage
from cnnstrategies.shares.dealing import soonest
from cnnstrategies.shares.proposals import GAIN, Proposal, worth

FREE = Link(inf, 0.0)  # A connection whose messages take no time.


def propose_stage_shares(
    placement: Placement,
    schedule: Schedule,
    run_ahead: bool,
    pairs: Iterable[tuple[int, int]],
    seconds: Sequence[Sequence[float]],
    step: float,
    most: Sequence[float],
) -> Proposal | None:
    """Propose numbers of microbatches with which the replicas of each stage finish as early as possible.

    To compute how much shorter a step becomes, a step with the current shares and a step with the proposed shares are
    simulated. In these simulations, messages take no time. The difference between the measured and the simulated step
    time is assumed to be equal for the current and the proposed shares.

    Args:
        placement: Current stages and shares of the ranks.
        schedule: Schedule of the pipeline.
        run_ahead: Whether stages hold one additional microbatch.
        pairs: Pairs of stages. The first stage of a pair sends its outputs to the second stage.
        seconds: Two sequences with an element for each rank: seconds of the forward of a microbatch, and seconds of the
            backward.
        step: Measured seconds of a step with the current shares.
        most: Largest number of microbatches that each rank can hold at once.

    Returns:
        The proposed shares; None if a step would become only slightly shorter.
    """
    times: list[float] = [sum(times_of_rank) for times_of_rank in zip(*seconds, strict=True)]
    everyone = range(placement.world_size)

    def timetable(placement_of: Placement) -> list[list[Task]]:
        return [tasks_of(placement_of, rank, schedule, run_ahead) for rank in everyone]

    def slowest(counts: Sequence[float]) -> float:
        return max(count * time for count, time in zip(counts, times, strict=True))

    now = timetable(placement)
    least_time = slowest([len(placement.microbatches_of(rank)) for rank in everyone]) / (1 + GAIN)
    bounds = [placement.microbatches] * placement.world_size
    while True:
        dealt = _soonest(placement, times, bounds)
        if dealt is None or slowest(dealt.shares) >= least_time:
            # The gain would be too small even if no rank ever waited. This is known without the simulation, which can
            # take long.
            return None
        then = timetable(dealt)
        full = [r for r in everyone if in_flight(then[r]) > max(most[r], in_flight(now[r]))]
        if not full:
            break
        for rank in full:
            bounds[rank] = int(dealt.shares[rank]) - 1
    messages = dict.fromkeys(pairs, StageMessage(1, 1))
    stages, cluster = _costs(placement, seconds)
    before, after = (simulate(tasks, stages, messages, cluster).step_time for tasks in (now, then))
    return worth(dealt.shares, before, after, step)


def in_flight(tasks: Sequence[Task]) -> int:
    """Return the largest number of microbatches that a rank holds at once.

    A rank holds a microbatch from the microbatch's forward until its backward.
    """
    return max(accumulate(1 if task.kind == "forward" else -1 for task in tasks), default=0)


def _soonest(placement: Placement, times: Sequence[float], bounds: Sequence[int]) -> Placement | None:
    """Return the placement with new shares, so that each stage finishes as early as possible.

    Return None if the bounds of a stage's ranks add up to less than the number of microbatches.

    Args:
        placement: Placement of the ranks with the current shares.
        times: Seconds that each rank takes for a microbatch.
        bounds: Largest number of microbatches that each rank may have in a step.
    """
    shares = [0.0] * placement.world_size
    for stage in range(placement.stages):
        ranks = placement.ranks(stage)
        most = tuple(bounds[rank] for rank in ranks)
        if sum(most) < placement.microbatches:
            return None
        counts = soonest(placement.microbatches, tuple(1 / times[rank] for rank in ranks), most)
        for rank, count in zip(ranks, counts, strict=True):
            shares[rank] = count
    return replace(placement, shares=tuple(shares))


def _costs(placement: Placement, seconds: Sequence[Sequence[float]]) -> tuple[list[StageCost], Cluster]:
    """Return the costs of the stages, and a cluster whose devices have the speeds of the ranks.

    The cost of a stage is the mean over its ranks. The speed of a rank is relative to that mean.
    """
    stages, speeds = [], [1.0] * placement.world_size
    for stage in range(placement.stages):
        ranks = placement.ranks(stage)
        forward, backward = (mean(of_ranks[rank] for rank in ranks) for of_ranks in seconds)
        stages.append(StageCost(1, forward, backward, 0, 0, 0))
        for rank in ranks:
            speeds[rank] = (forward + backward) / sum(of_ranks[rank] for of_ranks in seconds)
    return stages, Cluster(tuple(Host(1, FREE, FREE, speed) for speed in speeds))
