"""Predict the costs of all strategies, and rank the strategies.

This module also computes the costs of DDP, to which all other strategies are compared.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.compression import COMPRESSIONS, ddp_names
from cnnstrategies.planning.candidates import Candidate, Effect, Job
from cnnstrategies.planning.costs import digits, format_bytes
from cnnstrategies.planning.hybrid import Hybrid, hybrids
from cnnstrategies.planning.memory import PeakMemory, replica_peak
from cnnstrategies.planning.parameter_server import ParameterServer
from cnnstrategies.planning.recompute import RECOMPUTED, choose_segments, recomputed_peak
from cnnstrategies.planning.spatial import spatial
from cnnstrategies.planning.stage_costs import BUCKET_BYTES, FIRST_BUCKET_BYTES, all_reduce, reduced_at, stage_costs

ACCUMULATED = (
    2,
    4,
    8,
    16,
    32,
    64,
)  # Values of accumulate_grad_batches that are tried if a whole batch does not fit into memory.
TIE = 0.03  # DDP is ranked first if the fastest strategy saves at most this fraction of DDP's step time.


@dataclass(frozen=True)
class Ranking:
    """The best candidate of each strategy, in two groups. Within a group, the best candidate is first.

    Attributes:
        job: The job for which the strategies are ranked.
        same: Candidates with the same training result as DDP, except for rounding.
        changing: Candidates with a different training result from DDP. Their step times alone do not show whether they
            are better.
        notes: Remarks for the user.
        order: For each rank, the number of the device that it uses; empty if each rank uses the device with its number.
    """

    job: Job
    same: tuple[Candidate, ...]
    changing: tuple[Candidate, ...]
    notes: tuple[str, ...]
    order: tuple[int, ...] = ()

    def device_of(self, rank: int) -> int:
        """Return the number of the device that a rank uses."""
        return self.order[rank] if self.order else rank

    @property
    def best(self) -> Candidate:
        """The first candidate with the same training result as DDP.

        If no candidate with this result fits into memory, this is the first candidate with a different training result.
        """
        return (self.same or self.changing)[0]

    @property
    def hybrid(self) -> Hybrid | None:
        """The best candidate that uses the hybrid pipeline. None if the ranking contains no such candidate."""
        return next((row for row in (*self.same, *self.changing) if isinstance(row, Hybrid)), None)

    def rate(self, row: Candidate) -> float:
        """Return the number of samples that training with a candidate processes per second."""
        return self.job.samples / row.step

    def price(self, row: Candidate) -> float:
        """Return the price of training a million samples with a candidate, in the currency of the machines' prices."""
        return sum(host.price for host in self.job.cluster.hosts) / 3600 * 1e6 / self.rate(row)


class NothingFitsError(ConfigurationError):
    """No strategy fits into the memory of the devices."""


def candidates(job: Job) -> Iterator[Candidate]:
    """Yield the candidates of all strategies, also those that do not fit into memory."""
    return itertools.chain(data_parallel(job), hybrids(job), ParameterServer(job).candidates(), spatial(job))


def rank(job: Job) -> Ranking:
    """Predict the costs of all candidates, and rank the best candidates of each family.

    A family contains the candidates with the same strategy. Up to two candidates of a family are ranked: the best
    candidate that changes the training result, and the best candidate that does not change it.

    Raises:
        NothingFitsError: No candidate fits into the memory of the devices.
    """
    best: dict[tuple[str, bool], Candidate] = {}
    too_large = []
    for candidate in candidates(job):
        # Another precision than the user's changes the training result.
        row = candidate if job.precision is None else replace(candidate, effect=Effect.LEARNING)
        if job.excess(row.memories):
            too_large.append(row)
        elif (key := (row.family, row.effect == Effect.LEARNING)) not in best or row.step < best[key].step:
            best[key] = row
    if not best:
        raise NothingFitsError(_nothing_fits(job, too_large))
    # For each strategy, the candidate that exceeds the memory least is named.
    too_large.sort(key=lambda row: job.excess(row.memories))
    closest = {row.family: row for row in reversed(too_large)}
    notes = [f"{row}: {_too_large(job, row)}" for row in closest.values()]
    if job.precision is not None:
        notes.append(f"nothing fits with the configured precision, so all plans have trainer.precision {job.precision}")
    same = _in_order([row for row in best.values() if row.effect < Effect.LEARNING])
    changing = _in_order([row for row in best.values() if row.effect == Effect.LEARNING])
    notes += _reasons(same)
    notes += _recomputation_note(job, (*same, *changing))
    for row in (*same, *changing):
        if shares := row.options.get("initial_shares") or row.options.get("shares"):
            unit = "microbatches" if isinstance(row, Hybrid) else "samples"
            notes.append(f"{row}: the devices get {', '.join(map(str, shares))} {unit} of a step")
    if job.values.unknown and any(isinstance(row, Hybrid) for row in (*same, *changing)):
        notes.append(f"hybrid: masks and other values that the step sends are not counted: {job.values.unknown}")
    if job.whole_images:
        notes.append(f"spatial: not predicted, because divided images cannot be tried: {job.whole_images}")
    notes += [
        f"{row}: {len(costs.gathers)} operations need all rows on all devices: {', '.join(costs.gathers[:3])}"
        for row in (*same, *changing)
        for costs in job.image_parts
        if row.family == "spatial" and row.options["parts"] == costs.parts and costs.gathers
    ]
    if not job.profile.fixed:
        notes.append(
            "the profile was measured with one batch size, so times are assumed to be proportional to the number of "
            "samples"
        )
    return Ranking(job, tuple(same), tuple(changing), tuple(notes))


def _nothing_fits(job: Job, rows: Sequence[Candidate]) -> str:
    """Return an error message for candidates that all need too much memory."""
    if not rows:
        return (
            f"no strategy can divide {job.samples} samples among {job.cluster.devices} devices: use a larger batch or "
            "fewer devices"
        )
    closest = min(rows, key=lambda row: job.excess(row.memories))
    device = job.tightest(closest.memories)
    excess = format_bytes(job.excess(closest.memories))
    return (
        f"no strategy fits into the devices' memory: {closest} comes closest, and {_too_large(job, closest)}: {excess} "
        f"too much on rank {device}; use a smaller batch, a device with more memory there, or more devices"
    )


def _too_large(job: Job, row: Candidate) -> str:
    """Return how much memory a candidate needs on the device that exceeds its memory most."""
    device = job.tightest(row.memories)
    needed, limit = format_bytes(row.memories[device]), format_bytes(job.limits[device])
    place = f"rank {device}, whose device" if len(set(job.limits)) > 1 else "a device that"
    return f"needs {needed} on {place} has {limit}"


def _in_order(rows: Sequence[Candidate]) -> list[Candidate]:
    """Return candidates in order of step time, the fastest first.

    If the fastest candidate saves at most the fraction `TIE` of DDP's step time, DDP comes first instead.
    """
    ordered = sorted(rows, key=lambda row: row.step)
    ties = [row for row in ordered if (1 - TIE) * row.step <= ordered[0].step]
    ties.sort(key=lambda row: (row.family != "ddp", row.step))
    return ties + ordered[len(ties) :]


def _reasons(same: Sequence[Candidate]) -> list[str]:
    """Explain why the first candidate is not the fastest candidate.

    Returns:
        A list with one note for the user. The list is empty if the first candidate is the fastest.
    """
    quickest = min(same, key=lambda row: row.step, default=None)
    if quickest is None or quickest is same[0]:
        return []
    gain = same[0].step / quickest.step - 1
    return [
        f"{same[0]} is first although {quickest} gains {gain:.1%}: for gains below {TIE:.0%} the simpler strategy is "
        "preferred"
    ]


def data_parallel(job: Job) -> Iterator[Candidate]:
    """Yield the candidates of DDP: DDP without options, with compressed gradients, and with balanced shares.

    If a batch does not fit into memory, also yield candidates that accumulate the gradients of smaller batches. The
    profile does not contain the computing time of the compression, so this time counts as 0.
    """
    layers = [node.parameter_bytes for node in job.profile.costs.nodes]
    sent_for_each_byte = {"ddp": 1.0} | {f"ddp_{name}": COMPRESSIONS[name].sent_share(layers) for name in ddp_names()}
    devices, effect = job.cluster.devices, Effect.LEARNING if job.profile.batch_norm else Effect.ROUNDING
    if job.samples < devices:
        return
    equal = job.equal()
    for family, factor in sent_for_each_byte.items():
        plain = _priced(job, family, Effect.NONE if family == "ddp" else Effect.LEARNING, equal, factor)
        yield plain
        if family == "ddp" and job.excess(plain.memories):
            # With gradient accumulation, BatchNorm normalises smaller batches, which changes the training result. So if
            # the network has BatchNorm, `effect` is LEARNING.
            for count in ACCUMULATED:
                if job.samples < count * devices:
                    break
                options = {"accumulate_grad_batches": count}
                row = _priced(job, family, effect, job.equal(count), options=options, batches=count)
                yield row
                if not job.excess(row.memories):
                    break
            yield _recomputed(job)
    yield from _balanced(job, effect)


def _balanced(job: Job, effect: Effect) -> Iterator[Candidate]:
    """Yield candidates with shares that fit the devices' speeds and memories.

    If no shares of a whole batch fit into memory, also yield a candidate that accumulates the gradients of smaller
    batches.
    """
    for batches in (1, *ACCUMULATED):
        if job.samples < batches * job.cluster.devices:
            return

        def step(counts: Sequence[int], batches: int = batches) -> float:
            return _priced(job, "ddp", effect, counts, batches=batches).step

        peak = partial(_peak, job, batches=batches)
        dealt = job.dealt(step, peak, batches)
        options: dict[str, Any] = {"accumulate_grad_batches": batches} if batches > 1 else {}
        options["initial_shares"] = list(dealt)
        most = [int(min(fitting, sum(dealt))) for fitting in job.most_samples(peak)]
        if min(most) < sum(dealt):
            # Training measures the shares, and must not give a device more samples than fit into its memory.
            options["max_samples"] = most
        row = _priced(job, "ddp_balanced", effect, dealt, options=options, batches=batches)
        if dealt != job.equal(batches):
            yield row
        if not job.excess(row.memories):
            return


def _recomputed(job: Job) -> Candidate:
    """Return DDP with activations that are computed again in the backward, by the callback ActivationCheckpointing."""
    return _priced(job, "ddp", Effect.NONE, job.equal(), options={RECOMPUTED: "except_last"}, recomputes=True)


def _recomputation_note(job: Job, ranked: Sequence[Candidate]) -> list[str]:
    """Return a note with the price of recomputation, unless the ranking has a row for it."""
    if job.samples < job.cluster.devices or any(RECOMPUTED in row.options for row in ranked):
        return []
    plain, light = _priced(job, "ddp", Effect.NONE, job.equal()), _recomputed(job)
    return [
        f"with activations that are computed again (callback ActivationCheckpointing), ddp needs "
        f"{format_bytes(light.memory)} instead of {format_bytes(plain.memory)} on a device, and "
        f"{digits(light.step * 1e3, 4)} ms instead of {digits(plain.step * 1e3, 4)} ms"
    ]


def _priced(
    job: Job,
    family: str,
    effect: Effect,
    counts: Sequence[int],
    factor: float = 1.0,
    options: Mapping[str, Any] = MappingProxyType({}),
    batches: int = 1,
    recomputes: bool = False,
) -> Candidate:
    """Return a candidate that is a variant of DDP.

    The step time is computed from the times at which the gradient buckets are ready and reduced.

    Args:
        job: Network, cluster and batch.
        family: Registered name of the strategy.
        effect: Effect on the training result.
        counts: Number of samples of each device in a batch.
        factor: Bytes of the compressed gradients divided by the bytes of the gradients; 1 without compression.
        options: Options of the candidate.
        batches: Number of batches whose gradients are accumulated for a step.
        recomputes: Whether activations are computed again in the backward.
    """
    devices = job.cluster.devices
    costs, speed = job.slowest(counts)
    (stage,) = stage_costs(costs, ())
    peak = partial(_peak, job, batches=batches, factor=factor)
    if recomputes:
        stage = replace(stage, backward=stage.backward + choose_segments(costs).again)
        peak = partial(_recomputed_peak, job)
    compute, backward = batches * stage.time / speed, stage.backward / speed
    reduction = all_reduce(job.cluster, 0, devices)
    parts = stage.buckets(BUCKET_BYTES, backward, FIRST_BUCKET_BYTES)
    step = compute - backward + reduced_at(parts, backward, lambda size: reduction(size * factor))
    return Candidate(
        family=family,
        options=options,
        effect=effect,
        step=step,
        sent_bytes=round(2 * (devices - 1) * stage.parameter_bytes * factor),
        loads=job.loads(counts, peak, batches),
        bottleneck="compute" if step < 1.5 * compute else job.network,
    )


def _peak(job: Job, count: int, batches: int = 1, factor: float = 1.0) -> PeakMemory:
    """Return the peak memory of a device that has ``count`` samples of each batch."""
    return replica_peak(job.profile.at(count), job.state, batches, _buckets(job, factor))


def _recomputed_peak(job: Job, count: int) -> PeakMemory:
    """Return the peak memory of a device that computes activations again."""
    return recomputed_peak(job.profile.at(count), job.state, buckets=_buckets(job))


def _buckets(job: Job, factor: float = 1.0) -> float:
    """Return the size of DDP's gradient buckets as a multiple of the gradients' size.

    DDP copies all gradients into buckets, which exist in all steps. With compression a copy of a bucket is sent.

    Args:
        job: Network, cluster and batch.
        factor: Bytes of the compressed gradients divided by the bytes of the gradients; 1 without compression.
    """
    if job.cluster.devices == 1:
        return 0.0
    return 1.0 if factor == 1 else 1.0 + factor
