"""Find out from measurements why more devices do not train faster, and suggest a remedy for each cause.

Each rule looks for one cause, and predicts from measured times how much faster training would be without that cause. If
a measurement is missing, the rule yields nothing, or a reason with the gain 1. The function :func:`reasons` leaves out
such reasons.
"""

import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cnnstrategies.planning.candidates import Effect
from cnnstrategies.planning.costs import digits
from cnnstrategies.planning.scaling.figures import LARGER, LEAST_GAIN, Measurements, ms
from cnnstrategies.planning.scaling.reason import Reason
from cnnstrategies.planning.scaling.timeline import (
    BARRIER,
    BUFFERS,
    EXCHANGE,
    GRADIENTS,
    LOG,
    ROWS,
    SUMS,
    WAITING,
    Change,
)
from cnnstrategies.planning.scaling.work import PER_SAMPLE, UNEVEN, callbacks, loading, logging, slow_rank, transfer

PLACES = 3  # Largest number of places in a user's code that are listed for a collective.


@dataclass(frozen=True)
class Avoidable:
    """Collectives that training does not need, with the remedy.

    Attributes:
        cause: The cause in a few words.
        remedy: Advice to the user.
        values: Values of the configuration that carry out the remedy under the strategy ``ddp``.
    """

    cause: str
    remedy: str
    values: Mapping[str, Any] = field(default_factory=dict)


WITHOUT_BUFFERS = {
    "trainer.strategy": {
        "class_path": "lightning.pytorch.strategies.DDPStrategy",
        "init_args": {"broadcast_buffers": False},
    }
}
# Keys are kinds of collectives.
AVOIDABLE: Mapping[str, Avoidable] = {
    BUFFERS: Avoidable(
        "DDP broadcasts the buffers in each step",
        "set `broadcast_buffers: false` of DDPStrategy if each rank may have its own buffers, as for batch "
        "normalisation: a checkpoint contains those of rank 0",
        WITHOUT_BUFFERS,
    ),
    LOG: Avoidable(
        "logging with `sync_dist=True` makes the ranks wait for each other",
        "log without `sync_dist`, or with `on_step=False, on_epoch=True`: the ranks then exchange the value only at "
        "the end of an epoch",
    ),
    BARRIER: Avoidable("a barrier makes the ranks wait for each other", "remove the barrier"),
    EXCHANGE: Avoidable(
        "the code exchanges values between the ranks, and the ranks wait for each other",
        "exchange the values less often, or use `async_op=True` and wait as late as possible",
    ),
}
TOGETHER = Avoidable(
    "several collectives make the ranks wait for each other",
    "do without them: each of them alone has little effect, because the ranks also wait in the others",
)


def link(measurements: Measurements) -> Iterator[Reason]:
    """Yield a slow link as a reason for slow training.

    The gain is computed from the time that the all-reduce of gradients takes after the last rank has arrived. Nothing
    is yielded if only one device trains, or if the all-reduce was not measured.
    """
    run, facts = measurements.largest, measurements.facts
    if run.devices == 1 or not facts.link:
        return
    open_ = run.cost((GRADIENTS,))
    saved = min(open_, facts.link / 2)
    speed = facts.gradient_bytes / facts.link / 1e6
    values = {"trainer.strategy": "ddp_bf16"} if facts.strategy == "ddp" else {}
    yield Reason(
        "the link is slow",
        f"the ranks wait {ms(open_)} ms of a step of {ms(run.step)} ms for the all-reduce; while nothing is computed, "
        f"the all-reduce takes {ms(facts.link)} ms for {digits(facts.gradient_bytes / 1e6)} MB ({digits(speed)} MB/s)",
        "use `ddp_bf16`, which sends half the bytes. Other ways to send less: `accumulate_grad_batches`; a parameter "
        "server, with compression or with `mode: local`; a pipeline",
        measurements.gain_of(Change(costs={GRADIENTS: 1 - saved / open_})) if open_ else 1.0,
        values,
        Effect.LEARNING,
    )


def collectives(measurements: Measurements) -> Iterator[Reason]:
    """Yield collectives that training does not need as reasons for slow training.

    The gain is that of steps without the collectives: the collectives themselves take time, and ranks that are slow in
    turns need not wait for each other after each part of a step.
    """
    kinds = [kind for kind in AVOIDABLE if measurements.largest.count((kind,))]
    each = [_reason(measurements, AVOIDABLE[kind], (kind,)) for kind in kinds]
    yield from each
    if len(each) > 1 and all(reason.gain < LEAST_GAIN for reason in each):
        yield _reason(measurements, TOGETHER, kinds)


def _reason(measurements: Measurements, avoidable: Avoidable, kinds: Collection[str]) -> Reason:
    run = measurements.largest
    places = run.places(kinds)
    shown = f" in {', '.join(places[:PLACES])}" if places else ""
    return Reason(
        avoidable.cause,
        f"{digits(run.count(kinds))} times in a step{shown}; a rank waits {ms(run.wait(kinds))} ms of a step of "
        f"{ms(run.step)} ms there, of which {ms(run.cost(kinds))} ms remain if all ranks arrive at the same time",
        avoidable.remedy,
        measurements.gain_of(Change(without=kinds)),
        avoidable.values if measurements.facts.strategy == "ddp" else {},
        Effect.LEARNING,
    )


FEWER = "use fewer `parts`; if several images fit on a device, use `ddp`"
# Keys are kinds of waits. Values are the cause and the remedy.
MESSAGES = {
    ROWS: (
        "devices wait for rows of other devices",
        f"{FEWER}; use devices with a faster connection, or `precision: bf16-mixed`, which sends half the bytes",
    ),
    SUMS: (
        "devices wait for sums over the parts, of gradients and of statistics",
        f"{FEWER}; use a larger batch, which needs the same number of sums, or devices with a faster connection",
    ),
}

# Every device is a little faster with larger batches. Batches are therefore only reported as small if the time per
# sample with the current batches is at least this multiple of the time per sample with larger batches.
SMALL_BATCH_GAIN = 1.5
VALIDATION_SHARE = 0.1  # Validation is reported if it takes more than this fraction of an epoch's training time.


def reasons(measurements: Measurements) -> list[Reason]:
    """Return the reasons why more devices do not train faster, the reason with the largest gain first.

    The rules use the measurements of the run with the most devices. Reasons with a small gain are left out.
    """
    all_ = [reason for rule in RULES for reason in rule(measurements) if reason.gain >= LEAST_GAIN]
    return sorted(all_, key=lambda reason: -reason.gain)


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


def image_parts(measurements: Measurements) -> Iterator[Reason]:
    """Yield messages between the parts of images, and unequal parts, as reasons for slow training.

    The gain is that of steps in which the slowest rank does not wait for these messages, or in which all ranks compute
    equally long. Nothing is yielded if ranks do not have parts of the same images.
    """
    run = measurements.largest
    if not run.divides_images:
        return
    for kind, (cause, remedy) in MESSAGES.items():
        waited = run.slowest.parts.get(WAITING + kind, 0.0)
        yield Reason(
            cause,
            f"the slowest rank waits {ms(waited)} ms of a step of {ms(run.step)} ms for them",
            remedy,
            measurements.gain(waited),
        )
    computes = [sum(rank.parts.get(name, 0.0) for name in PER_SAMPLE) for rank in run.ranks]
    slowest = computes.index(max(computes))
    if max(computes) >= UNEVEN * statistics.median_low(computes):
        yield Reason(
            f"rank {slowest} computes longer than the other ranks",
            f"rank {slowest} computes for {ms(max(computes))} ms, and the fastest rank for {ms(min(computes))} ms; on "
            f"average, a rank waits {ms(run.waiting)} ms of a step for the slowest rank",
            "use images whose divided dimension is a multiple of `parts` times the product of the network's strides: "
            "all ranks then have equally many rows in all layers; or stop other programs on the rank's device",
            measurements.gain(max(computes) - statistics.mean(computes)),
        )


RULES: tuple[Callable[[Measurements], Iterator[Reason]], ...] = (
    loading,
    link,
    collectives,
    image_parts,
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
