"""The hybrid pipeline: stages with replicas, and the microbatches to run them with."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cnnstrategies.pipeline.timetable import Layout
from cnnstrategies.planning.candidates import Bottleneck, Candidate, Effect, Job
from cnnstrategies.planning.predict import Predictor
from cnnstrategies.planning.stage_costs import sent_in_a_step

SEARCHES = 2  # after which the layouts that are known are only tried with other numbers of microbatches
SHOWN = 64  # devices up to which a pipeline is shown although data parallel is quicker than any
SMALLEST_SHARE = 8  # of the measured batch that a microbatch is at least, where only one batch size was measured


@dataclass(frozen=True)
class Hybrid(Candidate):
    """A pipeline, and what it was chosen by."""

    layout: Layout
    predictor: Predictor


def hybrids(job: Job) -> Iterator[Hybrid]:
    """The best layout for each number of microbatches; likelier numbers first, those that cannot win left out."""
    best = float("inf")
    known: list[Layout] = []
    for microbatches in _microbatches(job):
        costs = job.profile.at(job.samples / microbatches)
        # All devices computing all the time.
        least = microbatches * costs.time / sum(job.cluster.speeds)
        if least > 1.03 * best:
            continue
        predictor = Predictor(replace(job, microbatches=microbatches))
        layout = predictor.fixed_layout() or _best(predictor, known)
        if layout is not None and len(layout.replicas) == 1 and job.stages is None and job.cluster.devices <= SHOWN:
            # No stages are best. For comparison the best of two, if there is one.
            predictor = Predictor(replace(job, microbatches=microbatches, stages=2))
            layout = _best(predictor, known)
        if layout is None or len(layout.replicas) == 1:
            continue
        made = _candidate(predictor, layout, microbatches)
        best = min(best, made.step)
        yield made


def _microbatches(job: Job) -> list[int]:
    """The numbers of microbatches to try."""
    if job.microbatches is not None:
        return [job.microbatches]
    devices, most = job.cluster.devices, job.samples
    if not job.profile.fixed:
        # Nothing is known of how much slower small batches are for each sample.
        most = min(most, max(devices, round(SMALLEST_SHARE * most / job.profile.costs.microbatch_size)))
    # With one device behind the others' stage, what they divide.
    most_replicas = devices - 1
    wanted = [4 * devices, 2 * most_replicas, 4 * most_replicas, 2 * devices, devices, most_replicas]
    return [count for count in dict.fromkeys(wanted) if 2 <= count <= most] or [min(devices, job.samples)]


def _best(predictor: Predictor, known: list[Layout]) -> Layout | None:
    """By a search, or, once some have been made, the best of what they found; None where none fits."""
    fitting = [one for one in known if len(one.replicas) > 1 and max(one.replicas) <= predictor.problem.microbatches]
    if len(known) < SEARCHES or not fitting:
        layout = predictor.search()
        known += [layout] if layout is not None else []
    else:
        layout = min(fitting, key=predictor.time)
    return layout if layout is not None and predictor.time(layout) < float("inf") else None


def _candidate(predictor: Predictor, layout: Layout, microbatches: int) -> Hybrid:
    job, step, shares = predictor.job, predictor.time(layout), list(predictor.problem.shares(layout.replicas))
    given = {"shares": shares} if job.shares else {"shares": "auto", "initial_shares": shares}
    return Hybrid(
        family="hybrid",
        options={"replicas": list(layout.replicas), "microbatches": microbatches} | (given if shares else {}),
        effect=Effect.LEARNING if job.profile.batch_norm else Effect.ROUNDING,
        step=step,
        sent_bytes=sent_in_a_step(predictor.costs, layout, microbatches),
        memory=max(predictor.stage_memory(layout, predictor.runs_ahead(layout))),
        bottleneck=_bottleneck(predictor, layout, step),
        layout=layout,
        predictor=predictor,
    )


def _bottleneck(predictor: Predictor, layout: Layout, step: float) -> Bottleneck:
    """What the step mostly consists of: the slowest stage's work, what it waits for, or filling and draining."""
    problem = predictor.problem
    work, first = 0.0, 0
    for start, end, count in problem.stages(layout):
        rounds, speed = problem.work(first, count)
        work, first = max(work, rounds * problem.time(start, end) / speed), first + count
    if step < 1.5 * work:
        return "compute"
    fill = problem.time(0, len(problem.costs.nodes)) / max(problem.cluster.speeds)
    return "fill" if step - work < 1.5 * fill else predictor.job.network
