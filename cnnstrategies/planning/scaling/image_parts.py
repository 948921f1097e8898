"""Messages and unequal parts of divided images as reasons for slow training."""

import statistics
from collections.abc import Iterator

from cnnstrategies.planning.scaling.figures import Measurements, ms
from cnnstrategies.planning.scaling.reason import Reason
from cnnstrategies.planning.scaling.timeline import ROWS, SUMS, WAITING
from cnnstrategies.planning.scaling.work import PER_SAMPLE, UNEVEN

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
