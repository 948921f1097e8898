"""DDP and its variants with less to send: the whole network on every device, and a share of the batch."""

from collections.abc import Iterator

from cnnstrategies.planning.candidates import Candidate, Effect, Job
from cnnstrategies.planning.costs import GraphCosts
from cnnstrategies.planning.stage_costs import BUCKET_BYTES, FIRST_BUCKET_BYTES, all_reduce, reduced_at, stage_costs

ACCUMULATED = (2, 4, 8)  # batches, where a whole one does not fit into memory


def data_parallel(job: Job) -> Iterator[Candidate]:
    """Each variant; batches are accumulated where a whole one does not fit.

    Casts and the algebra of PowerSGD are not in the profile and count as free.
    """
    sent_for_each_byte = {
        "ddp": 1.0,
        "ddp_fp16": 0.5,
        "ddp_bf16": 0.5,
        "ddp_powersgd": low_rank_share(job.profile.costs),
    }
    samples = job.share(job.cluster.devices)
    if not samples:
        return
    for family, factor in sent_for_each_byte.items():
        plain = _priced(job, family, factor, 1, Effect.NONE if family == "ddp" else Effect.LEARNING)
        yield plain
        if family == "ddp" and job.memory is not None and plain.memory > job.memory:
            # BatchNorm sees smaller batches.
            changed = Effect.LEARNING if job.profile.batch_norm else Effect.ROUNDING
            for count in ACCUMULATED:
                if samples % (count * job.cluster.devices) == 0:
                    yield _priced(job, family, factor, count, changed)


def _priced(job: Job, family: str, factor: float, batches: int, effect: Effect) -> Candidate:
    """A variant that makes a step of so many batches; its time is by the recurrence of the buckets."""
    devices = job.cluster.devices
    samples = job.share(devices)
    (stage,) = stage_costs(job.profile.at(samples / devices / batches), ())
    speed = min(job.cluster.speeds)
    compute, backward = batches * stage.time / speed, stage.backward / speed
    reduction = all_reduce(job.cluster, 0, devices)
    parts = stage.buckets(BUCKET_BYTES, backward, FIRST_BUCKET_BYTES)
    step = compute - backward + reduced_at(parts, backward, lambda size: reduction(size * factor))
    return Candidate(
        family=family,
        options={"accumulate_grad_batches": batches} if batches > 1 else {},
        effect=effect,
        samples=samples,
        step=step,
        sent_bytes=round(2 * (devices - 1) * stage.parameter_bytes * factor),
        memory=job.state_copies * stage.parameter_bytes + stage.received_bytes + stage.saved_bytes,
        bottleneck="compute" if step < 1.5 * compute else job.network,
    )


def low_rank_share(costs: GraphCosts, rank: int = 1) -> float:
    """Elements that PowerSGD sends for each element of the gradients: r (m + n) for a matrix of m n.

    The shapes are not in the profile: each node's parameters count as a square matrix, for which that is most.
    """
    total = costs.parameter_bytes
    sent = sum(min(node.parameter_bytes, 2 * rank * 4 * (node.parameter_bytes / 4) ** 0.5) for node in costs.nodes)
    return sent / total if total else 1.0
