"""Predict the costs of all strategies, and rank the strategies.

This module also computes the costs of DDP, to which all other strategies are compared.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.compression import COMPRESSIONS, ddp_names
from cnnstrategies.planning.candidates import Candidate, Effect, Job
from cnnstrategies.planning.costs import digits, format_bytes
from cnnstrategies.planning.hybrid import Hybrid, hybrids
from cnnstrategies.planning.parameter_server import ParameterServer
from cnnstrategies.planning.recompute import RECOMPUTED, choose_segments
from cnnstrategies.planning.stage_costs import BUCKET_BYTES, FIRST_BUCKET_BYTES, all_reduce, reduced_at, stage_costs

ACCUMULATED = (2, 4, 8)  # Values of accumulate_grad_batches that are tried if a whole batch does not fit into memory.
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
    """

    job: Job
    same: tuple[Candidate, ...]
    changing: tuple[Candidate, ...]
    notes: tuple[str, ...]

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


def rank(job: Job) -> Ranking:
    """Predict the costs of all candidates, and rank the best candidates of each family.

    A family contains the candidates with the same strategy. Up to two candidates of a family are ranked: the best
    candidate that changes the training result, and the best candidate that does not change it.

    Raises:
        ConfigurationError: No candidate fits into the memory of the devices.
    """
    best: dict[tuple[str, bool], Candidate] = {}
    notes = []
    for row in itertools.chain(data_parallel(job), hybrids(job), ParameterServer(job).candidates()):
        if job.memory is not None and row.memory > job.memory:
            needed, limit = format_bytes(row.memory), format_bytes(job.memory)
            notes.append(f"{row}: needs {needed} on a device that has {limit}")
        elif (key := (row.family, row.effect == Effect.LEARNING)) not in best or row.step < best[key].step:
            best[key] = row
    if not best:
        raise ConfigurationError(
            f"no strategy fits into the devices' memory ({'; '.join(notes) or 'no pipeline fits either'}): "
            "use a smaller batch, more devices or activation_checkpointing"
        )
    same = _in_order([row for row in best.values() if row.effect < Effect.LEARNING])
    changing = _in_order([row for row in best.values() if row.effect == Effect.LEARNING])
    notes += _reasons(same)
    notes += _recomputation_note(job, (*same, *changing))
    for row in (*same, *changing):
        if shares := row.options.get("initial_shares") or row.options.get("shares"):
            unit = "microbatches" if isinstance(row, Hybrid) else "samples"
            notes.append(f"{row}: the devices get {', '.join(map(str, shares))} {unit} of a step")
    if not job.profile.fixed:
        notes.append(
            "the profile was measured with one batch size, so times are assumed to be proportional to the number of "
            "samples"
        )
    return Ranking(job, tuple(same), tuple(changing), tuple(notes))


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
        if family == "ddp" and job.memory is not None and plain.memory > job.memory:
            # With gradient accumulation, BatchNorm normalises smaller batches, which changes the training result. So if
            # the network has BatchNorm, `effect` is LEARNING.
            for count in ACCUMULATED:
                if job.samples >= count * devices:
                    options = {"accumulate_grad_batches": count}
                    yield _priced(job, family, effect, job.equal(count), options=options, batches=count)
            yield _recomputed(job)
    state = job.state_copies * job.profile.costs.parameter_bytes
    dealt = job.dealt(lambda counts: _priced(job, "ddp", effect, counts).step, state)
    if dealt != equal:
        yield _priced(job, "ddp_balanced", effect, dealt, options={"initial_shares": list(dealt)})


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
    held = job.profile.at(max(counts)).kept_bytes
    if recomputes:
        stage = replace(stage, backward=stage.backward + choose_segments(costs).again)
        held = choose_segments(job.profile.at(max(counts))).peak_bytes
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
        memory=job.state_copies * stage.parameter_bytes + held,
        bottleneck="compute" if step < 1.5 * compute else job.network,
    )
