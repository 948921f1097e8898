"""Find out from measurements why more devices do not train faster, and suggest a remedy for each cause.

Each rule looks for one cause, and predicts from measured times how much faster training would be without that cause. If
a measurement is missing, the rule yields nothing, or a reason with the gain 1. The function :func:`reasons` leaves out
such reasons.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cnnstrategies.planning.candidates import Effect
from cnnstrategies.planning.costs import digits
from cnnstrategies.planning.scaling.figures import CALLBACK, LARGER, LOGGER, Measurements, ms

LEAST_GAIN = 1.05  # Reasons with a smaller predicted gain are not reported.
MOST_WORKERS = 8  # Largest number of data loader workers that is recommended.
USUAL_LOG_EVERY = 50  # Recommended number of steps from one logged step to the next; the default of Lightning.
# Every device is a little faster with larger batches. Batches are therefore only reported as small if the time per
# sample with the current batches is at least this multiple of the time per sample with larger batches.
SMALL_BATCH_GAIN = 1.5
UNEVEN = 1.1  # A rank is slow if its time per sample is at least this multiple of the median rank's time per sample.
VALIDATION_SHARE = 0.1  # Validation is reported if it takes more than this fraction of an epoch's training time.


@dataclass(frozen=True)
class Reason:
    """A reason why more devices do not train faster.

    Attributes:
        cause: The cause in a few words.
        evidence: Text with the measurements that show the cause.
        remedy: Advice to the user.
        gain: Predicted factor by which the remedy makes training faster.
        values: Values of the configuration that carry out the remedy. Keys are dotted keys of the configuration. Empty
            if no setting is a remedy.
        effect: Effect of the remedy on the training result.
    """

    cause: str
    evidence: str
    remedy: str
    gain: float
    values: Mapping[str, Any] = field(default_factory=dict)
    effect: Effect = Effect.NONE


def reasons(measurements: Measurements) -> list[Reason]:
    """Return the reasons why more devices do not train faster, the reason with the largest gain first.

    The rules use the measurements of the run with the most devices. Reasons with a small gain are left out.
    """
    all_ = [reason for rule in RULES for reason in rule(measurements) if reason.gain >= LEAST_GAIN]
    return sorted(all_, key=lambda reason: -reason.gain)


def loading(measurements: Measurements) -> Iterator[Reason]:
    """Yield slow data loading as a reason for slow training.

    The gain is computed from the time for which the slowest rank waits for its data loader in a step.
    """
    run, facts = measurements.largest, measurements.facts
    rank = run.slowest
    waited, step = rank.parts.get("data", 0.0), run.step
    evidence = f"a step waits {ms(waited)} of {ms(step)} ms for data"
    if facts.loader is not None:
        taken = digits(measurements.limits()["compute"])
        evidence += f"; the loaders alone reach {digits(facts.loader)} samples/s, the network alone {taken} samples/s"
    cause, cheaper = "the loader is slower than the network", "pack images into shards (`cnnstrategies pack --size`)"
    load, key = facts.load, "data.init_args.num_workers"
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
        seconds = load.seconds if facts.workers else max(load.seconds, waited / rank.samples)
        need = math.ceil(rank.samples * seconds / max(step - waited, 1e-6))
        workers = min(free, MOST_WORKERS, need)
        if workers > facts.workers:
            busy = sum(other.step - other.waits - other.parts.get("data", 0.0) for other in run.ranks)
            busy += run.samples * load.processor * seconds / load.seconds
            then = max(step - waited, rank.samples * seconds / workers, busy / facts.cores)
            gain = measurements.gain(step - then)
            if gain >= LEAST_GAIN:
                values = {key: workers} if "num_workers" in facts.keys else {}
                yield Reason(cause, evidence, f"set `num_workers: {workers}`; or {cheaper}", gain, values)
                return
    yield Reason(cause, evidence, f"{cheaper}; or use more CPU cores", measurements.gain(waited))


def link(measurements: Measurements) -> Iterator[Reason]:
    """Yield a slow link as a reason for slow training.

    The gain is computed from the time for which even the slowest rank waits for the all-reduce of gradients in a step.
    Nothing is yielded if only one device trains, or if the all-reduce was not measured.
    """
    run, facts = measurements.largest, measurements.facts
    open_ = run.slowest.waits
    if run.devices == 1 or not facts.link:
        return
    saved = min(open_, facts.link / 2)
    speed = facts.gradient_bytes / facts.link / 1e6
    values = {"trainer.strategy": "ddp_bf16"} if facts.strategy == "ddp" else {}
    yield Reason(
        "the link is slow",
        f"the ranks wait {ms(open_)} ms of a step of {ms(run.step)} ms for the all-reduce; while nothing is computed, "
        f"the all-reduce takes {ms(facts.link)} ms for {digits(facts.gradient_bytes / 1e6)} MB ({digits(speed)} MB/s)",
        "use `ddp_bf16`, which sends half the bytes. Other ways to send less: `accumulate_grad_batches`; a parameter "
        "server, with compression or with `mode: local`; a pipeline",
        measurements.gain(saved),
        values,
        Effect.LEARNING,
    )


def slow_rank(measurements: Measurements) -> Iterator[Reason]:
    """Yield a slow rank as a reason for slow training.

    A rank is slow if it takes much longer to compute a sample than the median rank. Nothing is yielded if no rank is
    slow, or if the ranks train different stages of a pipeline.
    """
    run = measurements.largest
    each = [rank.compute / max(rank.samples, 1e-9) for rank in run.ranks]
    # Ranks of different stages compute different layers, so their times per sample cannot be compared.
    stages = "receive" in run.ranks[0].waiting
    if run.devices == 1 or stages or max(each) < UNEVEN * statistics.median_low(each):
        return
    best = run.samples / sum(1 / seconds for seconds in each)
    slowest = each.index(max(each))
    values = {"trainer.strategy": "ddp_balanced"} if measurements.facts.strategy in ("ddp", "auto") else {}
    yield Reason(
        f"rank {slowest} is slower than the other ranks",
        f"rank {slowest} takes {ms(max(each))} ms for a sample, and the fastest rank takes {ms(min(each))} ms; on "
        f"average, a rank waits {ms(run.waiting)} ms of a step for rank {slowest}",
        "stop other programs on the rank's device; or give slower ranks fewer samples: use `ddp_balanced`, "
        "`shares: auto`, or (with an asynchronous parameter server) `data_dispatch: dynamic`",
        measurements.gain(max(rank.compute for rank in run.ranks) - best),
        values,
        Effect.ROUNDING,
    )


def threads(measurements: Measurements) -> Iterator[Reason]:
    """Yield too many threads as a reason for slow training: the ranks have more threads than the machine has cores.

    Nothing is yielded if training with fewer threads was not measured.
    """
    run, facts = measurements.largest, measurements.facts
    if facts.with_fewer is None:
        return
    each = max(1, facts.cores // run.devices)
    yield Reason(
        "threads compete for the CPU's cores",
        f"{run.devices} ranks, each with {facts.threads} threads, share {facts.cores} cores; with only {each} "
        f"thread{'s' * (each > 1)} per rank, training reaches {digits(facts.with_fewer)} samples/s instead of "
        f"{digits(run.rate)} samples/s",
        f"set OMP_NUM_THREADS={each}, or `threads: {each}` of ComputeSettings",
        measurements.gain(run.step * (1 - min(1.0, run.rate / facts.with_fewer))),
        {"ComputeSettings.threads": each},
        Effect.ROUNDING,
    )


def small_batches(measurements: Measurements) -> Iterator[Reason]:
    """Yield small batches as a reason for slow training.

    Batches are small if a device needs much less time per sample with larger batches. Nothing is yielded if batches are
    not small, or if training with larger batches was not measured.
    """
    run, facts = measurements.largest, measurements.facts
    if facts.larger is None:
        return
    compute, then = run.slowest.compute, facts.larger / LARGER
    if compute < SMALL_BATCH_GAIN * then:
        return
    values = {f"data.init_args.{key}": LARGER * size for key, size in facts.keys.items() if "batch_size" in key}
    yield Reason(
        "batches are small for a device",
        f"a device takes {ms(compute)} ms for {digits(run.samples / run.devices)} samples, and {ms(facts.larger)} ms "
        f"for {LARGER} times as many samples",
        f"make the batch {LARGER} times as large, and adapt the learning rate; or use fewer devices",
        measurements.gain(compute - then),
        values,
        Effect.LEARNING,
    )


def host_reads(measurements: Measurements) -> Iterator[Reason]:
    """Yield reads of values from the device as a reason for slow training.

    The process waits for each value. While it waits, it starts no work on the device, so the device becomes idle.
    Nothing is yielded if training runs on the CPU, or if no step reads a value.
    """
    run, facts = measurements.largest, measurements.facts
    if not facts.accelerator or not facts.reads:
        return
    waited = min(facts.read_seconds, run.step)
    places = ", ".join(f"{place} ({digits(count)} times)" for place, count in facts.reads.items())
    yield Reason(
        "a step makes the process wait for the device",
        f"the process waits {ms(waited)} ms of a step of {ms(run.step)} ms, in {places}",
        "keep values on the device: do not use `.item()`, `float()`, `print` or `if` with tensors in a step; log only "
        "every 50 steps",
        measurements.gain(min(waited, run.step - waited)),
    )


def callbacks(measurements: Measurements) -> Iterator[Reason]:
    """Yield each callback as a reason for slow training, with the time that the callback's hooks take in a step."""
    run = measurements.largest
    longest: dict[str, float] = {}
    for rank in run.ranks:
        for name, seconds in rank.beside(CALLBACK).items():
            longest[name] = max(seconds, longest.get(name, 0.0))
    for name, seconds in longest.items():
        evidence = f"its hooks take {ms(seconds)} ms of a step of {ms(run.step)} ms"
        yield Reason(f"{name} takes long", evidence, "call it less often, or remove it", measurements.gain(seconds))


def logging(measurements: Measurements) -> Iterator[Reason]:
    """Yield logging as a reason for slow training, with the time that all loggers together take in a step.

    Nothing is yielded if the run has no logger.
    """
    run, facts = measurements.largest, measurements.facts
    spent = {name: seconds for rank in run.ranks for name, seconds in rank.beside(LOGGER).items()}
    if not spent:
        return
    seconds = sum(spent.values())
    kept = min(1.0, facts.log_every / USUAL_LOG_EVERY)
    yield Reason(
        "loggers take long",
        f"the trainer logs every {facts.log_every} steps; averaged over all steps, the loggers ({', '.join(spent)}) "
        f"take {ms(seconds)} ms of a step of {ms(run.step)} ms",
        f"set `log_every_n_steps: {USUAL_LOG_EVERY}`" if kept < 1 else "use a faster logger, or log less often",
        measurements.gain(seconds * (1 - kept if kept < 1 else 0.5)),
        {"trainer.log_every_n_steps": USUAL_LOG_EVERY} if kept < 1 else {},
    )


def validation(measurements: Measurements) -> Iterator[Reason]:
    """Yield validation as a reason for slow training, if validation takes long compared with an epoch's training time.

    Nothing is yielded if the length of an epoch is not known.
    """
    run, epoch = measurements.largest, measurements.facts.epoch
    if epoch.steps is None or epoch.validation <= VALIDATION_SHARE * epoch.steps * run.step:
        return
    trains = epoch.steps * run.step
    every = math.ceil(epoch.validation / (VALIDATION_SHARE * trains))
    yield Reason(
        "validation takes long",
        f"an epoch has {digits(trains)} s of training and {digits(epoch.validation)} s of validation",
        f"set `check_val_every_n_epoch: {every}`, or `limit_val_batches`",
        measurements.gain(0.0, epoch.validation * (1 - 1 / every)),
        {"trainer.check_val_every_n_epoch": every},
    )


def checkpoints(measurements: Measurements) -> Iterator[Reason]:
    """Yield the saving of checkpoints as a reason for slow training, with the time that it takes in an epoch."""
    epoch = measurements.facts.epoch
    evidence = f"saving checkpoints takes {digits(epoch.checkpoints)} s of an epoch"
    yield Reason(
        "checkpoints take long",
        evidence,
        "save less often with `every_n_epochs`",
        measurements.gain(0.0, 0.9 * epoch.checkpoints),
    )


def transfer(measurements: Measurements) -> Iterator[Reason]:
    """Yield the transfer of batches to the device as a reason for slow training.

    The gain is computed from the time that the slowest rank takes in a step to copy the batch and to run the batch
    hooks.
    """
    seconds = measurements.largest.slowest.parts.get("transfer", 0.0)
    evidence = (
        f"copying a batch and the batch hooks take {ms(seconds)} ms of a step of {ms(measurements.largest.step)} ms"
    )
    yield Reason(
        "the transfer of batches to the device is slow",
        evidence,
        "set `pin_memory: true`, use a smaller dtype such as uint8, or make the batch hooks faster",
        measurements.gain(seconds),
    )


RULES: tuple[Callable[[Measurements], Iterator[Reason]], ...] = (
    loading,
    link,
    slow_rank,
    threads,
    small_batches,
    host_reads,
    callbacks,
    logging,
    validation,
    checkpoints,
    transfer,
)
