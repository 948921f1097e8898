"""Collectives of the ranks as reasons for slow training."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cnnstrategies.planning.candidates import Effect
from cnnstrategies.planning.costs import digits
from cnnstrategies.planning.scaling.figures import LEAST_GAIN, Measurements, ms
from cnnstrategies.planning.scaling.reason import Reason
from cnnstrategies.planning.scaling.timeline import BARRIER, BUFFERS, EXCHANGE, GRADIENTS, LOG, Change

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
