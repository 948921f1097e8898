"""Why more devices do not bring more: the causes that what was measured shows, with what mends each of them.

Each rule looks for one cause and says by how much a step or an epoch would be shorter without it. What is said is
what the measured seconds allow: a rule guesses nothing where nothing was measured.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cnnstrategies.planning.candidates import Effect
from cnnstrategies.planning.costs import digits
from cnnstrategies.planning.scaling.figures import CALLBACK, LARGER, LOGGER, Found, ms

LEAST_GAIN = 1.05  # What brings less is nobody's concern.
MOST_WORKERS = 8
USUAL_LOG_EVERY = 50
SMALL_BATCH_GAIN = 1.5  # Larger batches are a little quicker everywhere.
UNEVEN = 1.1  # times the middle one's
VALIDATION_SHARE = 0.1  # of an epoch, at most, with what is proposed


@dataclass(frozen=True)
class Reason:
    """A cause.

    Attributes:
        evidence: What was measured that shows it.
        remedy: What to do.
        gain: How many times as fast training would be, as predicted.
        values: The remedy as keys of a configuration, with dots; none where it is not a setting.
        effect: What the remedy changes of what is learned.
    """

    cause: str
    evidence: str
    remedy: str
    gain: float
    values: Mapping[str, Any] = field(default_factory=dict)
    effect: Effect = Effect.NONE


def reasons(found: Found) -> list[Reason]:
    """What holds the largest run up, by what it would gain without it."""
    all_ = [reason for rule in RULES for reason in rule(found) if reason.gain >= LEAST_GAIN]
    return sorted(all_, key=lambda reason: -reason.gain)


def loading(found: Found) -> Iterator[Reason]:
    """The slowest rank waits for its loader."""
    run, facts = found.largest, found.facts
    rank = run.slowest
    waited, step = rank.parts.get("data", 0.0), run.step
    said = f"a step waits {ms(waited)} of {ms(step)} ms for data"
    if facts.loader is not None:
        taken = digits(found.limits()["compute"])
        said += f"; loaders alone give {digits(facts.loader)} samples/s, the network takes {taken}"
    cause, cheaper = "the loader is slower than the network", "pack images into shards (`cnnstrategies pack --size`)"
    load, key = facts.load, "data.init_args.num_workers"
    if load is not None:
        said += f"; a sample takes {ms(load.seconds)} ms, of them {ms(load.processor)} of the processor"
        waits_for_storage = load.processor < load.seconds / 2
        if waits_for_storage:
            cause, cheaper = "the loader waits for storage", "pack images into shards, or copy them to a local disk"
        elif load.two > 1.5 * load.seconds and facts.cores > 1 and not facts.workers:
            cause = "the loader holds the interpreter's lock, and the training process loads"
            said += f"; two threads at once take {ms(load.two)} ms each"
        free = MOST_WORKERS if waits_for_storage else max(1, facts.cores // run.devices)
        # In a run, where all ranks load at once, a sample may take longer than it does alone.
        seconds = load.seconds if facts.workers else max(load.seconds, waited / rank.samples)
        need = math.ceil(rank.samples * seconds / max(step - waited, 1e-6))
        workers = min(free, MOST_WORKERS, need)
        if workers > facts.workers:
            busy = sum(one.step - one.waits - one.parts.get("data", 0.0) for one in run.ranks)
            busy += run.samples * load.processor * seconds / load.seconds
            then = max(step - waited, rank.samples * seconds / workers, busy / facts.cores)
            gain = found.gain(step - then)
            if gain >= LEAST_GAIN:
                values = {key: workers} if "num_workers" in facts.keys else {}
                yield Reason(cause, said, f"`num_workers: {workers}`, for each rank; or {cheaper}", gain, values)
                return
    yield Reason(cause, said, f"{cheaper}; or load on more cores", found.gain(waited))


def link(found: Found) -> Iterator[Reason]:
    """Even the slowest rank waits for the gradients' sum."""
    run, facts = found.largest, found.facts
    open_ = run.slowest.waits
    if run.devices == 1 or not facts.link:
        return
    saved = min(open_, facts.link / 2)
    speed = facts.gradient_bytes / facts.link / 1e6
    values = {"trainer.strategy": "ddp_bf16"} if facts.strategy == "ddp" else {}
    yield Reason(
        "the link is slow",
        f"{ms(open_)} of {ms(run.step)} ms are all-reduce that backward does not hide; alone it takes "
        f"{ms(facts.link)} ms for {digits(facts.gradient_bytes / 1e6)} MB ({digits(speed)} MB/s)",
        "half the bytes by `ddp_bf16`; still fewer by `accumulate_grad_batches`, a parameter server's compression or "
        "own steps, or a pipeline",
        found.gain(saved),
        values,
        Effect.LEARNING,
    )


def slow_rank(found: Found) -> Iterator[Reason]:
    """One computes longer than the others for as many samples."""
    run = found.largest
    each = [rank.compute / max(rank.samples, 1e-9) for rank in run.ranks]
    stages = "receive" in run.ranks[0].waiting  # Which differ in what they compute.
    if run.devices == 1 or stages or max(each) < UNEVEN * statistics.median_low(each):
        return
    best = run.samples / sum(1 / one for one in each)
    slowest = each.index(max(each))
    values = {"trainer.strategy": "ddp_balanced"} if found.facts.strategy in ("ddp", "auto") else {}
    yield Reason(
        f"rank {slowest} is slower than the others",
        f"a sample takes it {ms(max(each))} ms, the quickest {ms(min(each))}; the others wait "
        f"{ms(run.waiting)} ms of a step, on average",
        "free its device of other work; else shares of the batch by speed: `ddp_balanced`, or `shares: auto`; of "
        "asynchronous servers `data_dispatch: dynamic`",
        found.gain(max(rank.compute for rank in run.ranks) - best),
        values,
        Effect.ROUNDING,
    )


def threads(found: Found) -> Iterator[Reason]:
    """The ranks have more threads than there are cores."""
    run, facts = found.largest, found.facts
    if facts.with_fewer is None:
        return
    each = max(1, facts.cores // run.devices)
    yield Reason(
        "threads fight for the processor's cores",
        f"{run.devices} ranks of {facts.threads} threads on {facts.cores} cores; with {each} each, "
        f"{digits(facts.with_fewer)} samples/s in place of {digits(run.rate)}",
        f"OMP_NUM_THREADS={each}, or ComputeSettings' `threads: {each}`",
        found.gain(run.step * (1 - min(1.0, run.rate / facts.with_fewer))),
        {"ComputeSettings.threads": each},
        Effect.ROUNDING,
    )


def small_batches(found: Found) -> Iterator[Reason]:
    """A device has so few samples that what does not depend on their number is most of a step."""
    run, facts = found.largest, found.facts
    if facts.larger is None:
        return
    compute, then = run.slowest.compute, facts.larger / LARGER
    if compute < SMALL_BATCH_GAIN * then:
        return
    values = {f"data.init_args.{key}": LARGER * size for key, size in facts.keys.items() if "batch_size" in key}
    yield Reason(
        "batches are small for a device",
        f"{digits(run.samples / run.devices)} samples a device take it {ms(compute)} ms, {LARGER} times as many "
        f"{ms(facts.larger)}",
        f"a batch {LARGER} times as large, and the learning rate to it; or fewer devices",
        found.gain(compute - then),
        values,
        Effect.LEARNING,
    )


def host_reads(found: Found) -> Iterator[Reason]:
    """The host waits for the device's values in the middle of a step, and then the device waits for the host."""
    run, facts = found.largest, found.facts
    if not facts.accelerator or not facts.reads:
        return
    waited = min(facts.read_seconds, run.step)
    places = ", ".join(f"{place} ({digits(count)} times)" for place, count in facts.reads.items())
    yield Reason(
        "a step makes the host wait for the device",
        f"{ms(waited)} of {ms(run.step)} ms in {places}",
        "keep values on the device: no `.item()`, `float()`, `print` or `if` of a tensor in a step; log every 50 steps",
        found.gain(min(waited, run.step - waited)),
    )


def callbacks(found: Found) -> Iterator[Reason]:
    """A callback or a hook takes long."""
    run = found.largest
    longest: dict[str, float] = {}
    for rank in run.ranks:
        for name, seconds in rank.beside(CALLBACK).items():
            longest[name] = max(seconds, longest.get(name, 0.0))
    for name, seconds in longest.items():
        said = f"{ms(seconds)} of {ms(run.step)} ms of a step are spent in its hooks"
        yield Reason(f"{name} takes long", said, "call it less often, or leave it out", found.gain(seconds))


def logging(found: Found) -> Iterator[Reason]:
    """Loggers take long."""
    run, facts = found.largest, found.facts
    spent = {name: seconds for rank in run.ranks for name, seconds in rank.beside(LOGGER).items()}
    if not spent:
        return
    seconds = sum(spent.values())
    kept = min(1.0, facts.log_every / USUAL_LOG_EVERY)
    yield Reason(
        "loggers take long",
        f"{ms(seconds)} of {ms(run.step)} ms of a step, in {', '.join(spent)} each {facts.log_every} steps",
        f"`log_every_n_steps: {USUAL_LOG_EVERY}`" if kept < 1 else "a quicker logger, or more steps between",
        found.gain(seconds * (1 - kept if kept < 1 else 0.5)),
        {"trainer.log_every_n_steps": USUAL_LOG_EVERY} if kept < 1 else {},
    )


def validation(found: Found) -> Iterator[Reason]:
    """An epoch validates long for how long it trains."""
    run, epoch = found.largest, found.facts.epoch
    if epoch.steps is None or epoch.validation <= VALIDATION_SHARE * epoch.steps * run.step:
        return
    trains = epoch.steps * run.step
    every = math.ceil(epoch.validation / (VALIDATION_SHARE * trains))
    yield Reason(
        "validation takes long",
        f"{digits(epoch.validation)} s of validation for {digits(trains)} s of training, in each epoch",
        f"`check_val_every_n_epoch: {every}`, or `limit_val_batches`",
        found.gain(0.0, epoch.validation * (1 - 1 / every)),
        {"trainer.check_val_every_n_epoch": every},
    )


def checkpoints(found: Found) -> Iterator[Reason]:
    """An epoch saves long for how long it trains."""
    epoch = found.facts.epoch
    said = f"{digits(epoch.checkpoints)} s of an epoch are spent on saving"
    yield Reason(
        "checkpoints take long", said, "save less often: `every_n_epochs`", found.gain(0.0, 0.9 * epoch.checkpoints)
    )


def transfer(found: Found) -> Iterator[Reason]:
    """Copies to the device, and what is done to batches then, take long."""
    seconds = found.largest.slowest.parts.get("transfer", 0.0)
    said = f"{ms(seconds)} of {ms(found.largest.step)} ms of a step"
    yield Reason(
        "batches get to the device slowly",
        said,
        "`pin_memory: true`; smaller types (uint8); quicker batch hooks",
        found.gain(seconds),
    )


RULES: tuple[Callable[[Found], Iterator[Reason]], ...] = (
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
