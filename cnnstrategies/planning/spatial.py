"""Predict a step and the memory of devices that each have a part of every image."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from cnnstrategies.planning.candidates import Candidate, DeviceLoad, Effect, Job
from cnnstrategies.planning.cluster import slower
from cnnstrategies.planning.costs import Link
from cnnstrategies.planning.image_parts import PartCosts
from cnnstrategies.planning.memory import PeakMemory
from cnnstrategies.planning.part_peaks import MESSAGE_BYTES, PartedStep, part_peaks
from cnnstrategies.planning.stage_costs import reduced_at, stage_costs
from cnnstrategies.shares.dealing import deal


def spatial(job: Job) -> Iterator[Candidate]:
    """Yield a candidate for each number of parts into which images can be divided.

    The devices of a group, which have consecutive numbers, have the parts of the same images. Several groups are
    replicas, as in data parallelism.
    """
    for costs in job.image_parts:
        if job.cluster.devices % costs.parts == 0 and job.cluster.devices // costs.parts <= job.samples:
            yield _candidate(job, costs)


def _candidate(job: Job, costs: PartCosts) -> Candidate:
    cluster, parts = job.cluster, costs.parts
    replicas = cluster.devices // parts
    counts = deal(job.samples, [1] * replicas)
    parameters = job.profile.costs.parameter_bytes
    computing = [
        job.profile.at(samples * share).time / cluster.speeds[group * parts + part]
        for group, samples in enumerate(counts)
        for part, share in enumerate(costs.shares)
    ]
    messages = 0.0
    for group, samples in enumerate(counts):
        link = cluster.ring(group * parts, parts)
        least = min(computing[group * parts : (group + 1) * parts])
        waiting = _exchanging(link, costs, samples, least) + _summing(link, costs)
        speed = min(cluster.speeds[group * parts : (group + 1) * parts])
        messages = max(messages, waiting + _left_of_gradients(job, costs, link, samples, speed))
    reduction = 0.0
    if replicas > 1:
        ranks = range(0, cluster.devices, parts)
        link = slower(*(cluster.link(rank, following) for rank, following in pairwise(ranks)))
        reduction = link.all_reduce_time(parameters, replicas)
    compute = max(computing) + costs.seconds
    step = compute + messages + reduction
    summed = costs.summed_bytes + costs.gradient_bytes
    sent = job.samples * sum(costs.sent_bytes) + 2 * replicas * (parts - 1) * summed
    return Candidate(
        family="spatial",
        options={"parts": parts},
        # A single group normalises the whole batch, as one device does.
        effect=Effect.LEARNING if job.profile.batch_norm and replicas > 1 else Effect.ROUNDING,
        step=step,
        sent_bytes=round(sent + 2 * (replicas - 1) * parts * parameters),
        loads=tuple(
            DeviceLoad(peak, next_peak.total - peak.total, samples, seconds)
            for (samples, peak, next_peak), seconds in zip(_loads(job, costs, counts), computing, strict=True)
        ),
        bottleneck="compute" if step < 1.5 * compute else job.network,
    )


def _exchanging(link: Link, costs: PartCosts, samples: int, computing: float) -> float:
    """Return the seconds for which the devices of a group wait for rows in a step.

    Args:
        link: The slowest connection of the group.
        costs: Costs of the parts.
        samples: Number of samples of the group.
        computing: Seconds for which each device of the group computes at least, while rows are on their way.
    """
    hidden = min(samples * costs.early_bytes / link.bandwidth, computing)
    return costs.exchanges * link.exchange_time() + samples * costs.busiest_bytes / link.bandwidth - hidden


def _left_of_gradients(job: Job, costs: PartCosts, link: Link, samples: int, speed: float) -> float:
    """Return the seconds after the backward in which a group still sums gradients.

    Args:
        job: Network, cluster and batch.
        costs: Costs of the parts.
        link: The slowest connection of the group.
        samples: Number of samples of the group.
        speed: Speed of the group's slowest device.
    """
    (stage,) = stage_costs(job.profile.at(samples * max(costs.shares)), ())
    backward = stage.backward / speed
    factor = costs.gradient_bytes / max(stage.parameter_bytes, 1)
    messages = stage.buckets(MESSAGE_BYTES, backward)
    return reduced_at(messages, backward, lambda size: link.all_reduce_time(size * factor, costs.parts)) - backward


def _summing(link: Link, costs: PartCosts) -> float:
    """Return the seconds in which a group waits for sums in a step, each sum by itself."""
    return costs.sums * link.all_reduce_time(costs.summed_bytes / costs.sums, costs.parts) if costs.sums else 0.0


def _loads(job: Job, costs: PartCosts, counts: Sequence[int]) -> Iterator[tuple[int, PeakMemory, PeakMemory]]:
    """Yield for each device the samples of its group, and its peak memory with them and with one sample more."""
    for samples in counts:
        peaks = [
            part_peaks(job.profile, costs, PartedStep(number, job.state, groups=len(counts)))
            for number in (samples, samples + 1)
        ]
        for peak, next_peak in zip(*peaks, strict=True):
            yield samples, peak, next_peak
