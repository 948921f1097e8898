"""Plans that need less memory than a run's own, for the message about a rank that has run out of memory."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from cnnstrategies.pipeline.timetable import Layout
from cnnstrategies.planning.costs import Profile
from cnnstrategies.planning.image_parts import PartCosts
from cnnstrategies.planning.memory import OptimizerMemory, PeakMemory, replica_peak
from cnnstrategies.planning.part_peaks import PartedStep, part_peaks
from cnnstrategies.planning.predict import Predictor
from cnnstrategies.planning.recompute import CALLBACK, recomputed_peak

RECOMPUTES = f"--trainer.callbacks+={CALLBACK.rpartition('.')[2]}"
OPTION = "--trainer.strategy.init_args."
FACTORS = (2, 4, 8, 16)  # Factors of the number of batches, or of microbatches, that are tried.
LESS = 0.75  # Other cuts are searched for that need at most this part of the memory.


class LighterPlan(NamedTuple):
    """Settings of a run, and the predicted peaks with them.

    Attributes:
        settings: Words for the command line.
        peaks: Peak memory of each rank.
    """

    settings: str
    peaks: Sequence[PeakMemory]


def lighter_replicas(
    profile: Profile, samples: int, state: OptimizerMemory, batches: int, buckets: float, recomputes: bool
) -> Iterator[LighterPlan]:
    """Yield plans for ranks that train the whole network, those that change the step least first.

    Args:
        profile: Costs of the network.
        samples: Number of samples in a rank's batch.
        state: See `replica_peak`.
        batches: Number of batches whose gradients are accumulated for a step.
        buckets: See `replica_peak`.
        recomputes: Whether the run computes activations again.
    """
    if not recomputes:
        yield LighterPlan(RECOMPUTES, [recomputed_peak(profile.at(samples), state, batches, buckets)])
    for factor in FACTORS:
        if samples < factor:
            return
        few, count = -(-samples // factor), factor * batches
        settings = (
            f"--trainer.accumulate_grad_batches={count} with a rank's batch of {few} samples instead of {samples}"
        )
        costs = profile.at(few)
        if not recomputes:
            yield LighterPlan(settings, [replica_peak(costs, state, count, buckets)])
        also = settings if recomputes else f"{RECOMPUTES} {settings}"
        yield LighterPlan(also, [recomputed_peak(costs, state, count, buckets)])


def lighter_parts(profile: Profile, parts: PartCosts, step: PartedStep) -> Iterator[LighterPlan]:
    """Yield plans for a group of devices that have parts of the same images, those that change the step least first.

    The peaks are those of one group. The plans of several groups have fewer groups with more devices, or smaller
    batches, and as many samples in a step.

    Args:
        profile: Costs of the network on one device.
        parts: Costs of the parts of the run.
        step: The run's own step.
    """
    if not step.recomputes:
        yield LighterPlan(RECOMPUTES, part_peaks(profile, parts, replace(step, recomputes=True)))
    for factor in FACTORS:
        changes: list[tuple[str, PartCosts, PartedStep]] = []
        count = factor * step.batches
        accumulates = f"--trainer.accumulate_grad_batches={count}"
        if step.groups % factor == 0:
            number = factor * parts.parts
            shares = tuple(share / factor for share in parts.shares for _ in range(factor))
            more = replace(parts, parts=number, shares=shares)
            changed = replace(step, groups=step.groups // factor, batches=count)
            changes.append((f"{OPTION}parts={number} {accumulates}", more, changed))
        if step.samples >= factor:
            few = -(-step.samples // factor)
            smaller = f"{accumulates} with a group's batch of {few} samples instead of {step.samples}"
            changes.append((smaller, parts, replace(step, samples=few, batches=count)))
        for settings, costs, changed in changes:
            yield LighterPlan(settings, part_peaks(profile, costs, changed))
            if not step.recomputes:
                again = replace(changed, recomputes=True)
                yield LighterPlan(f"{RECOMPUTES} {settings}", part_peaks(profile, costs, again))


def lighter_stages(predictor: Predictor, layout: Layout) -> Iterator[tuple[str, Predictor, Layout]]:
    """Yield plans for a pipeline, those that change the step least first: settings, and what predicts their peaks.

    Args:
        predictor: Predictor of the run's own plan.
        layout: Cuts and replicas.
    """
    job, count = predictor.job, predictor.problem.microbatches
    if not job.is_limited:
        worst = max(peak.total for peak in predictor.stage_peaks(layout, predictor.runs_ahead(layout)))
        limited = Predictor(replace(job, memory_limit=round(LESS * worst)))
        other = limited.search()
        if other is not None and limited.time(other) < float("inf"):
            names = ",".join(predictor.costs.nodes[cut - 1].name for cut in other.cuts)
            # Under configured cuts, stages run ahead unless the configuration says otherwise.
            ahead = replace(job, run_ahead=job.run_ahead is not False and job.schedule == "1f1b")
            yield f"{OPTION}cuts=[{names}]", Predictor(ahead), other
    for factor in (1, *FACTORS):
        if factor * count > job.samples:
            return
        more = f"{OPTION}microbatches={factor * count}"
        for checkpointing in dict.fromkeys((job.activation_checkpointing or "never", "always")):
            again = "" if checkpointing == job.activation_checkpointing else f"{OPTION}activation_checkpointing=always"
            settings = " ".join(filter(None, (more if factor > 1 else "", again)))
            if settings:
                changed = replace(job, microbatches=factor * count, activation_checkpointing=checkpointing)
                yield settings, Predictor(changed), layout
