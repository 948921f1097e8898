"""DDP and its variants with less to send."""

from collections.abc import Iterator

from cnnstrategies.planning.candidates import Bottleneck, Candidate, Effect, Job, Prediction
from cnnstrategies.planning.costs import GraphCosts
from cnnstrategies.planning.stage_costs import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    StageCost,
    Time,
    all_reduce,
    reduced_at,
    stage_costs,
)

ACCUMULATED = (2, 4, 8)  # batches, where a whole one does not fit into memory


class DataParallel:
    """The whole network on every device, and a share of the batch.

    Casts and the algebra of PowerSGD are not in the profile and count as free.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.devices = job.cluster.devices
        # Bytes sent for each byte of gradients.
        self.factors = {
            "ddp": 1.0,
            "ddp_fp16": 0.5,
            "ddp_bf16": 0.5,
            "ddp_powersgd": low_rank_share(job.profile.costs),
        }

    def candidates(self) -> Iterator[Candidate]:
        """Each variant; batches are accumulated where a whole one does not fit."""
        samples = self.job.share(self.devices)
        if not samples:
            return
        for family in self.factors:
            effect = Effect.NONE if family == "ddp" else Effect.LEARNING
            plain = Candidate(family, {}, effect, self.devices, samples)
            yield plain
            limit = self.job.memory
            if family == "ddp" and limit is not None and self._memory(plain) > limit:
                for count in ACCUMULATED:
                    if samples % (count * self.devices) == 0:
                        # BatchNorm sees smaller batches.
                        changed = Effect.LEARNING if self.job.profile.batch_norm else Effect.ROUNDING
                        yield Candidate(family, {"accumulate_grad_batches": count}, changed, self.devices, samples)

    def predict(self, candidate: Candidate) -> Prediction:
        """Step time by the recurrence of the buckets."""
        factor = self.factors[candidate.family]
        compute, stage, speed = self._times(candidate)
        reduction = all_reduce(self.job.cluster, 0, self.devices)
        backward = stage.backward / speed
        parts = stage.buckets(BUCKET_BYTES, backward, FIRST_BUCKET_BYTES)
        step = compute - backward + reduced_at(parts, backward, _times_factor(reduction, factor))
        sent = 2 * (self.devices - 1) * stage.parameter_bytes * factor
        waits: Bottleneck = "nic" if len(self.job.cluster.hosts) > 1 else "link"
        return Prediction(
            step=step,
            samples=candidate.samples,
            sent_bytes=round(sent),
            memory=self._memory(candidate),
            bottleneck="compute" if step < 1.5 * compute else waits,
        )

    def _times(self, candidate: Candidate) -> tuple[float, StageCost, float]:
        """Forward and backward of all accumulated batches, the costs of one, and the slowest speed."""
        batches = candidate.options.get("accumulate_grad_batches", 1)
        stage = self._stage(candidate)
        speed = min(self.job.cluster.speeds)
        return batches * stage.time / speed, stage, speed

    def _stage(self, candidate: Candidate) -> StageCost:
        batches = candidate.options.get("accumulate_grad_batches", 1)
        return stage_costs(self.job.profile.at(candidate.samples / self.devices / batches), ())[0]

    def _memory(self, candidate: Candidate) -> int:
        stage = self._stage(candidate)
        return self.job.state_copies * stage.parameter_bytes + stage.received_bytes + stage.saved_bytes


def low_rank_share(costs: GraphCosts, rank: int = 1) -> float:
    """Elements that PowerSGD sends for each element of the gradients: r (m + n) for a matrix of m n.

    The shapes are not in the profile: each node's parameters count as a square matrix, for which that is most.
    """
    total = sum(node.parameter_bytes for node in costs.nodes)
    sent = sum(min(node.parameter_bytes, 2 * rank * 4 * (node.parameter_bytes / 4) ** 0.5) for node in costs.nodes)
    return sent / total if total else 1.0


def _times_factor(time: Time, factor: float) -> Time:
    return lambda size: time(size * factor)
