"""Find the best layouts of a hybrid pipeline, one for each of several numbers of microbatches."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

from cnnstrategies.pipeline.timetable import Layout
from cnnstrategies.planning.candidates import Bottleneck, Candidate, Checkpointing, DeviceLoad, Effect, Job
from cnnstrategies.planning.predict import Predictor

# A search for the best layout takes long, so layouts are searched for only `SEARCHES` different numbers of
# microbatches. For other numbers of microbatches, only the layouts that these searches found are compared.
SEARCHES = 2
MOST_MICROBATCHES = 1024  # Largest number of microbatches that is tried if nothing fits into memory.
SHOWN = 64  # Largest number of devices for which a plan shows a pipeline even if data parallelism is faster.
SMALLEST_SHARE = 8  # If only one batch size was measured, microbatches have at least 1/8 of this batch's samples.


@dataclass(frozen=True)
class Hybrid(Candidate):
    """A candidate that uses the hybrid pipeline.

    Attributes:
        layout: Cuts and replicas of the stages.
        predictor: Predictor that chose the layout.
    """

    layout: Layout
    predictor: Predictor


def hybrids(job: Job) -> Iterator[Hybrid]:
    """Yield a candidate with the best layout for each number of microbatches.

    The most promising numbers of microbatches come first. The ideal step time assumes that all devices are always busy.
    A number of microbatches is skipped if its ideal step time is more than 3 % longer than the step time of the best
    candidate so far.

    If no candidate fits into memory with these numbers, more microbatches are tried, because a device then holds fewer
    samples at once. If no candidate fits at all, the candidate that exceeds the memory least is yielded.
    """
    best, closest, least_excess = inf, None, inf
    known: dict[Checkpointing, list[Layout]] = {checkpointing: [] for checkpointing in job.checkpointings}
    usual = _microbatches(job)
    for microbatches in (*usual, *_more_microbatches(job, max(usual))):
        if best < inf and microbatches not in usual:
            return
        costs = job.profile.at(job.samples / microbatches)
        # The ideal step time: all devices compute all the time. No layout has a shorter step time.
        least = microbatches * costs.time / sum(job.cluster.speeds)
        if least > 1.03 * best:
            continue
        for checkpointing in job.checkpointings:
            fixed = replace(job, microbatches=microbatches, activation_checkpointing=checkpointing)
            predictor = Predictor(fixed)
            layout = predictor.fixed_layout() or _best(predictor, known[checkpointing])
            if layout is not None and not predictor.problem.excess(layout):
                break
        if layout is not None and len(layout.replicas) == 1 and job.stages is None and job.cluster.devices <= SHOWN:
            # A layout with one stage is data parallelism. The best layout with two stages replaces it, so that the plan
            # can compare a pipeline with DDP.
            predictor = Predictor(replace(fixed, stages=2))
            layout = _best(predictor, known[checkpointing])
        if layout is None or len(layout.replicas) == 1:
            continue
        candidate = _candidate(predictor, layout, microbatches)
        excess = job.excess(candidate.memories)
        if not excess:
            best = min(best, candidate.step)
            yield candidate
        elif excess < least_excess:
            closest, least_excess = candidate, excess
    if best == inf and closest is not None:
        yield closest


def _microbatches(job: Job) -> list[int]:
    """Return the numbers of microbatches for which layouts are searched, the most promising number first."""
    if job.microbatches is not None:
        return [job.microbatches]
    devices, most = job.cluster.devices, job.samples
    if not job.profile.fixed:
        # If only one batch size was measured, the time per sample of much smaller batches is unknown, so the number of
        # microbatches is limited.
        most = min(most, max(devices, round(SMALLEST_SHARE * most / job.profile.costs.microbatch_size)))
    # With two stages, the larger stage can have `most_replicas` replicas. Multiples of this number are tried, because
    # these replicas then have equal numbers of microbatches.
    most_replicas = devices - 1
    wanted = [4 * devices, 2 * most_replicas, 4 * most_replicas, 2 * devices, devices, most_replicas]
    return [count for count in dict.fromkeys(wanted) if 2 <= count <= most] or [min(devices, job.samples)]


def _more_microbatches(job: Job, most: int) -> Iterator[int]:
    """Yield larger numbers of microbatches than ``most``, up to one sample in a microbatch or `MOST_MICROBATCHES`.

    If the job sets the number, or if memory is not limited, yield nothing.
    """
    while job.microbatches is None and job.is_limited and 2 * most <= min(job.samples, MOST_MICROBATCHES):
        most *= 2
        yield most


def _best(predictor: Predictor, known: list[Layout]) -> Layout | None:
    """Return the best layout for the predictor's number of microbatches.

    If no layout fits into memory, return the layout that exceeds the memory least. Return None if no layout is
    possible.

    The first `SEARCHES` calls search among all layouts, and add their results to ``known``. Later calls choose among
    the layouts in ``known``, which is faster. They only search if none of these layouts is possible and fits.
    """
    fitting = [
        candidate
        for candidate in known
        if len(candidate.replicas) > 1
        and max(candidate.replicas) <= predictor.problem.microbatches
        and not predictor.problem.excess(candidate)
    ]
    if len(known) >= SEARCHES and fitting:
        return min(fitting, key=predictor.time)
    layout = predictor.search()
    known += [layout] if layout is not None else []
    return layout


def _candidate(predictor: Predictor, layout: Layout, microbatches: int) -> Hybrid:
    job, problem, step = predictor.job, predictor.problem, predictor.time(layout)
    loads = tuple(_loads(predictor, layout))
    shares = list(problem.shares(layout))
    # With `shares: auto`, a training may give a device more microbatches than fit into its memory.
    is_full = any(load.peak.total + load.unit_memory > limit for load, limit in zip(loads, job.limits, strict=False))
    share_options = {"shares": shares} if job.shares or is_full else {"shares": "auto", "initial_shares": shares}
    return Hybrid(
        family="hybrid",
        options={"replicas": list(layout.replicas), "microbatches": microbatches} | (share_options if shares else {}),
        effect=Effect.LEARNING if job.profile.batch_norm else Effect.ROUNDING,
        step=step,
        sent_bytes=predictor.sent_bytes(layout),
        loads=loads,
        bottleneck=_bottleneck(predictor, layout, step),
        layout=layout,
        predictor=predictor,
    )


def _loads(predictor: Predictor, layout: Layout) -> Iterator[DeviceLoad]:
    """Yield the work and memory of each device."""
    problem = predictor.problem
    run_ahead = not problem.excess(layout) and predictor.runs_ahead(layout)
    for section in problem.sections(layout):
        speeds = predictor.job.cluster.speeds[section.first :]
        time = problem.time(section.start, section.end)
        for count, held, speed in zip(
            problem.dealt(section), problem.flights(section, run_ahead), speeds, strict=False
        ):
            peak = problem.memory.peak(section, count, held)
            more = problem.memory.peak(section, count + 1, held + 1).total - peak.total
            yield DeviceLoad(peak, more, count, count * time / speed)


def _bottleneck(predictor: Predictor, layout: Layout, step: float) -> Bottleneck:
    """Return what limits a step most: ``compute``, ``fill`` (filling and draining the pipeline), or the network."""
    problem = predictor.problem
    work = 0.0
    for section in problem.sections(layout):
        rounds, speed = problem.work(section)
        work = max(work, rounds * problem.time(section.start, section.end) / speed)
    if step < 1.5 * work:
        return "compute"
    fill = problem.time(0, len(problem.costs.nodes)) / max(problem.cluster.speeds)
    return "fill" if step - work < 1.5 * fill else predictor.job.network
