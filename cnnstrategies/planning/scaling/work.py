"""The ranks' own work as a reason for slow training: loading, computing, callbacks and loggers."""

import math
import statistics
from collections.abc import Iterator

from cnnstrategies.planning.candidates import Effect
from cnnstrategies.planning.costs import digits
from cnnstrategies.planning.scaling.figures import LEAST_GAIN, Measurements, ms
from cnnstrategies.planning.scaling.reason import Reason
from cnnstrategies.planning.scaling.timeline import WAITING, Change
from cnnstrategies.recording.actions import CALLBACK, LOGGER

MOST_WORKERS = 8  # Largest number of data loader workers that is recommended.
USUAL_LOG_EVERY = 50  # Recommended number of steps from one logged step to the next; the default of Lightning.
PER_SAMPLE = ("forward", "backward")  # Parts of a step that take time for each sample.
UNEVEN = 1.1  # A rank is slow if its time per sample is at least this multiple of the median rank's time per sample.


def _factors(measurements: Measurements, part: str, factor: float = 0.0) -> Change:
    """Return the change that multiplies the time of a part by a factor on all ranks."""
    return Change({(rank, part): factor for rank in range(measurements.largest.devices)})


def loading(measurements: Measurements) -> Iterator[Reason]:
    """Yield slow data loading as a reason for slow training.

    The gain is computed from the time for which each rank waits for its data loader in a step. The evidence is that of
    the rank that waits longest.
    """
    run, facts = measurements.largest, measurements.facts
    waits = [rank.parts.get("data", 0.0) for rank in run.ranks]
    waited, step = max(waits), run.step
    slowest = waits.index(waited)
    only = f" on rank {slowest}" if waited > UNEVEN * statistics.median_low(waits) and run.devices > 1 else ""
    evidence = f"a step waits {ms(waited)} of {ms(step)} ms for data{only}"
    if facts.loader is not None:
        taken = digits(measurements.limits()["compute"])
        evidence += f"; the loaders alone reach {digits(facts.loader)} samples/s, the network alone {taken} samples/s"
    cause, cheaper = "the loader is slower than the network", "pack images into shards (`cnnstrategies pack --size`)"
    load, key = facts.load, "data.init_args.num_workers"
    without = _factors(measurements, "data")
    if load is not None:
        evidence += f"; loading a sample takes {ms(load.seconds)} ms, of which {ms(load.processor)} ms are CPU time"
        waits_for_storage = load.processor < load.seconds / 2
        if waits_for_storage:
            cause, cheaper = "the loader waits for storage", "pack images into shards, or copy them to a local disk"
        elif load.two > 1.5 * load.seconds and facts.cores > 1 and not facts.workers:
            cause = "samples are loaded in the training process, and loading holds the interpreter's lock"
            evidence += f"; two threads that load at the same time take {ms(load.two)} ms each"
        free = MOST_WORKERS if waits_for_storage else max(1, facts.cores // run.devices)
        # In training all ranks load at the same time, so loading a sample may take longer than in the measurement, in
        # which only one rank loads. If the loader has no workers, the time for which the rank waits in training shows
        # how long loading takes there, so the longer of the two times is used.
        loads = [
            load.seconds * rank.samples if facts.workers else wait for rank, wait in zip(run.ranks, waits, strict=True)
        ]
        loads[slowest] = max(loads[slowest], load.seconds * run.ranks[slowest].samples)
        workers = min(free, MOST_WORKERS, math.ceil(max(loads) / max(run.after(without), 1e-6)))
        if workers > facts.workers:
            busy = sum(rank.own for rank in run.ranks) - sum(waits) + sum(loads) * load.processor / load.seconds
            gain = measurements.gain_of(without, max(max(loads) / workers, busy / facts.cores))
            if gain >= LEAST_GAIN:
                values = {key: workers} if "num_workers" in facts.keys else {}
                yield Reason(cause + only, evidence, f"set `num_workers: {workers}`; or {cheaper}", gain, values)
                return
    yield Reason(cause + only, evidence, f"{cheaper}; or use more CPU cores", measurements.gain_of(without))


def slow_rank(measurements: Measurements) -> Iterator[Reason]:
    """Yield a slow rank as a reason for slow training.

    A rank is slow if it takes much longer to compute a sample than the median rank. Nothing is yielded if no rank is
    slow, or if the ranks train different stages of a pipeline, or parts of the same images.
    """
    run = measurements.largest
    # The optimizer's update takes the same time whatever a rank's number of samples.
    computes = [sum(rank.parts.get(name, 0.0) for name in PER_SAMPLE) for rank in run.ranks]
    each = [seconds / max(rank.samples, 1e-9) for seconds, rank in zip(computes, run.ranks, strict=True)]
    # Ranks of different stages compute different layers, so their times per sample cannot be compared.
    stages = f"{WAITING}receive" in run.ranks[0].parts
    if run.devices == 1 or stages or run.divides_images or max(each) < UNEVEN * statistics.median_low(each):
        return
    best = run.samples / sum(1 / seconds for seconds in each)
    slowest = each.index(max(each))
    balanced = {(rank, part): best / seconds for rank, seconds in enumerate(computes) for part in (*PER_SAMPLE, "data")}
    values = {"trainer.strategy": "ddp_balanced"} if measurements.facts.strategy in ("ddp", "auto") else {}
    yield Reason(
        f"rank {slowest} is slower than the other ranks",
        f"rank {slowest} takes {ms(max(each))} ms for a sample, and the fastest rank takes {ms(min(each))} ms; on "
        f"average, a rank waits {ms(run.waiting)} ms of a step for rank {slowest}",
        "stop other programs on the rank's device; or give slower ranks fewer samples: use `ddp_balanced`, "
        "`shares: auto`, or (with an asynchronous parameter server) `data_dispatch: dynamic`",
        measurements.gain_of(Change(balanced)),
        values,
        Effect.ROUNDING,
    )


def callbacks(measurements: Measurements) -> Iterator[Reason]:
    """Yield each callback as a reason for slow training, with the time that the callback's hooks take in a step."""
    run = measurements.largest
    longest: dict[str, float] = {}
    for rank in run.ranks:
        for name, seconds in rank.beside(CALLBACK).items():
            longest[name] = max(seconds, longest.get(name, 0.0))
    for name, seconds in longest.items():
        evidence = f"its hooks take {ms(seconds)} ms of a step of {ms(run.step)} ms on the rank where they take longest"
        gain = measurements.gain_of(_factors(measurements, CALLBACK + name))
        yield Reason(f"{name} takes long", evidence, "call it less often, or remove it", gain)


def logging(measurements: Measurements) -> Iterator[Reason]:
    """Yield logging as a reason for slow training, with the time that all loggers together take in a step.

    Nothing is yielded if the run has no logger.
    """
    run, facts = measurements.largest, measurements.facts
    spent = {name: seconds for rank in run.ranks for name, seconds in rank.beside(LOGGER).items()}
    if not spent:
        return
    kept = min(1.0, facts.log_every / USUAL_LOG_EVERY)
    factors = [_factors(measurements, LOGGER + name, kept if kept < 1 else 0.5).work for name in spent]
    yield Reason(
        "loggers take long",
        f"the trainer logs every {facts.log_every} steps; averaged over all steps, the loggers ({', '.join(spent)}) "
        f"take {ms(sum(spent.values()))} ms of a step of {ms(run.step)} ms",
        f"set `log_every_n_steps: {USUAL_LOG_EVERY}`" if kept < 1 else "use a faster logger, or log less often",
        measurements.gain_of(Change({key: factor for each in factors for key, factor in each.items()})),
        {"trainer.log_every_n_steps": USUAL_LOG_EVERY} if kept < 1 else {},
    )


def transfer(measurements: Measurements) -> Iterator[Reason]:
    """Yield the transfer of batches to the device as a reason for slow training.

    The gain is computed from the time that the ranks take in a step to copy the batch and to run the batch hooks.
    """
    run = measurements.largest
    seconds = max(rank.parts.get("transfer", 0.0) for rank in run.ranks)
    yield Reason(
        "the transfer of batches to the device is slow",
        f"copying a batch and the batch hooks take {ms(seconds)} ms of a step of {ms(run.step)} ms",
        "set `pin_memory: true`, use a smaller dtype such as uint8, or make the batch hooks faster",
        measurements.gain_of(_factors(measurements, "transfer")),
    )
