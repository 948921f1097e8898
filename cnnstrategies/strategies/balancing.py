"""When, and how, the work is dealt anew to ranks that are not equally fast."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from cnnstrategies.data.sampling import DealtBatches, dealt
from cnnstrategies.shares import Deals, Proposal, proposal

EVERY = 5  # batches from one exchange of times to the next
FIRST = 3  # batches of a run that are not timed: they build what the others have


# Brings the numbers of all ranks together, one after the other: those of the ranks that are there.
Rows = Callable[[list[float]], list[list[float]]]


@dataclass(frozen=True)
class Timed:
    """What a rank says of its last batches: medians, in seconds."""

    sample: float  # forward and backward, without waiting for others; 0 where nothing was timed
    step: float  # from one batch to the next
    drawn: int  # batches of the epoch that its loader has drawn

    def as_row(self) -> list[float]:
        """As numbers."""
        return [self.sample, self.step, float(self.drawn)]


def propose(samples: int, deals: Deals, epoch: int, batch: int, timed: Sequence[Timed]) -> Proposal | None:
    """Other shares for a global batch of so many samples; None where they would not gain enough."""
    if any(one.sample <= 0 for one in timed):
        return None
    now, seconds = deals.counts(epoch, batch, samples), [one.sample for one in timed]
    return proposal(now, seconds, median(one.step for one in timed), deals.least, deals.most)


class Stopwatch:
    """A rank's own time in a step: from the forward's begin to the last gradient, which waits for nobody.

    On a GPU by events, which are read when they have happened: nothing waits for them.

    Args:
        waited: Seconds that this rank has waited for others, which are left out.
    """

    def __init__(self, device: torch.device, waited: Callable[[], float] = float) -> None:
        self._waited = waited
        self._before = 0.0  # seconds that had been waited when the forward began
        self._events: list[tuple[Any, Any, float]] = []
        self._on_device = device.type == "cuda"
        self._begun: Any = None
        self._seconds: list[float] = []

    def begin(self) -> None:
        """The forward begins."""
        self._before = self._waited()
        self._begun = self._now()

    def end(self) -> None:
        """The last gradient is there; if nothing has begun, nothing is timed."""
        if self._begun is None:
            return
        begun, self._begun = self._begun, None
        waited = self._waited() - self._before
        if self._on_device:
            self._events.append((begun, self._now(), waited))
        else:
            self._seconds.append(self._now() - begun - waited)

    def take(self) -> list[float]:
        """Seconds of the steps that were timed since this was asked last."""
        while self._events and self._events[0][1].query():
            begun, ended, waited = self._events.pop(0)
            self._seconds.append(begun.elapsed_time(ended) / 1000 - waited)
        seconds, self._seconds = self._seconds, []
        return seconds

    def _now(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


class Balance(Callback):
    """Has the ranks exchange their times every few batches, and deals anew where that gains.

    All ranks see the same times, so they decide alike, and from the same batch on: one that no loader has drawn yet.

    Args:
        gather: Brings the times of all ranks together.
    """

    def __init__(self, deals: Deals, stopwatch: Stopwatch, gather: Rows) -> None:
        self._deals = deals
        self._stopwatch = stopwatch
        self._gather = gather
        self._sampler: DealtBatches | None = None
        self._own: list[float] = []
        self._steps: list[float] = []
        self._last: float | None = None
        self._left_out = FIRST
        self._next = (0, 0)  # the batch from which on the last deal holds
        self._before: float | None = None  # seconds of a step under the shares before, until it is told what came of it

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._sampler = dealt(trainer)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last = None

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        sampler = self._sampler
        if sampler is None:
            return
        now, last = time.perf_counter(), self._last
        self._last = now
        seconds = self._stopwatch.take()
        if self._left_out or (sampler.epoch, batch_idx) < self._next:
            self._left_out = max(0, self._left_out - 1)
            return
        count = sampler.counts(batch_idx)[sampler.rank]
        self._own += [one / count for one in seconds if count]
        if last is not None:
            self._steps.append(now - last)
        if (batch_idx + 1) % EVERY == 0:
            self._exchange(trainer, sampler, batch_idx)

    def _exchange(self, trainer: Trainer, sampler: DealtBatches, batch: int) -> None:
        own, steps = (median(found) if found else 0.0 for found in (self._own, self._steps))
        self._own, self._steps = [], []
        rows = self._gather(Timed(own, steps, sampler.drawn).as_row())
        if len(rows) < len(self._deals.shares):
            return  # One has died.
        timed = [Timed(sample, step, int(drawn)) for sample, step, drawn in rows]
        step, before, self._before = median(one.step for one in timed), self._before, None
        if before is not None:
            _tell(trainer, f"Since the last deal a step is {before / step - 1:.0%} quicker", gain=before / step - 1)
        found = propose(sum(sampler.counts(batch)), self._deals, sampler.epoch, batch, timed)
        if found is None:
            return
        first = max(one.drawn for one in timed) + 1
        since = (sampler.epoch, first) if first < len(sampler) else (sampler.epoch + 1, 0)
        self._deals.change(*since, found.shares)
        self._next, self._before = since, step
        counts = self._deals.counts(*since, sum(sampler.counts(batch)))
        said = f"Dealt anew: {', '.join(map(str, counts))} samples a batch; a step shall be {found.gain:.0%} quicker"
        _tell(trainer, said, predicted_gain=found.gain, **{f"rank_{rank}": count for rank, count in enumerate(counts)})

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._deals.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._deals.load_state_dict(state_dict)
        self._next = self._deals.since  # It may be one that was to come.


def _tell(trainer: Trainer, said: str, **figures: float) -> None:
    rank_zero_info(said)
    for logger in trainer.loggers:
        logger.log_metrics({f"shares/{name}": value for name, value in figures.items()}, step=trainer.global_step)
