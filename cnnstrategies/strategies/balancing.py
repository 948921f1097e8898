"""When, and how, the work is dealt anew to ranks that are not equally fast."""

import time
from collections.abc import Callable, Sequence
from math import inf
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from cnnstrategies.data.sampling import DealtBatches, dealt
from cnnstrategies.shares import Deals, Proposal, proposal

EVERY = 5  # batches from one exchange of times to the next
FIRST = 3  # batches of a run that are not timed: they build what the others have
FILLED = 0.9  # of a device's memory at most, by what is measured


# Brings the numbers of all ranks together, one after the other: those of the ranks that are there.
Rows = Callable[[list[float]], list[list[float]]]


def propose(
    now: Sequence[int], deals: Deals, seconds: Sequence[float], step: float, fitting: Sequence[float]
) -> Proposal | None:
    """Other shares, where ranks have so many samples now; None where they would not gain enough.

    Args:
        fitting: Samples that fit into each rank's memory, as far as that is measured.
    """
    most = [max(own, min(fits, deals.most)) for own, fits in zip(now, fitting, strict=True)]
    return proposal(now, seconds, step, deals.least, most)


def fitting(held: int, device: torch.device) -> float:
    """How many samples, or microbatches, a rank's memory can hold at once, which has held so many since it trains.

    Between two steps: what torch has allocated then does not depend on them. Infinite on a CPU, where nothing is
    measured.
    """
    if device.type != "cuda":
        return inf
    rest, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    limit = FILLED * (torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))
    return max(0.0, limit - rest) * held // (peak - rest) if peak > rest else inf


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
        stopwatches: For each kind of work.
        gather: Brings the times of all ranks together.
    """

    unit = "samples"

    def __init__(self, deals: Deals, stopwatches: Sequence[Stopwatch], gather: Rows) -> None:
        self.deals = deals
        self.sampler: DealtBatches | None = None
        self._stopwatches = stopwatches
        self._gather = gather
        self._own: list[list[float]] = [[] for _ in stopwatches]
        self._steps: list[float] = []
        self._last: float | None = None
        self._held = 0  # units of work at once, the most so far
        self._left_out = FIRST
        self._next = (0, 0)  # the batch from which on the last deal holds
        self._before: float | None = None  # seconds of a step under the shares before, until it is told what came of it

    def can_deal(self) -> bool:
        """Whether the batches of this training are dealt by shares."""
        return self.sampler is not None

    def work(self, batch: int) -> int:
        """Units of this rank's work that are timed at once."""
        assert self.sampler is not None
        return self.sampler.counts(batch)[self.sampler.rank]

    def holds(self, batch: int) -> int:
        """Units that this rank's memory holds at once."""
        return self.work(batch)

    def propose(
        self, epoch: int, batch: int, seconds: Sequence[Sequence[float]], step: float, most: Sequence[float]
    ) -> Proposal | None:
        """Other shares.

        Args:
            seconds: For each kind of work those of each rank for a unit.
            step: Seconds of a step.
            most: Units that each rank's memory can hold at once.
        """
        assert self.sampler is not None
        now = self.deals.counts(epoch, batch, sum(self.sampler.counts(0)))  # the last one may be smaller
        return propose(now, self.deals, seconds[0], step, most)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.sampler = dealt(trainer)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last = None

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        times = [one.take() for one in self._stopwatches]
        if not self.can_deal():
            return
        now, last = time.perf_counter(), self._last
        self._last = now
        self._held = max(self._held, self.holds(batch_idx))
        if self._left_out or (trainer.current_epoch, batch_idx) < self._next:
            self._left_out = max(0, self._left_out - 1)
            return
        work = self.work(batch_idx)
        for own, seconds in zip(self._own, times, strict=True):
            own += [one / work for one in seconds if work]
        if last is not None:
            self._steps.append(now - last)
        if (batch_idx + 1) % min(EVERY, trainer.num_training_batches) == 0:
            self._exchange(trainer, batch_idx)

    def _exchange(self, trainer: Trainer, batch: int) -> None:
        medians = [median(found) if found else 0.0 for found in (*self._own, self._steps)]
        drawn = batch + 1 if self.sampler is None else self.sampler.drawn
        rows = self._gather([*medians, drawn, fitting(self._held, trainer.strategy.root_device)])
        self._own, self._steps = [[] for _ in self._stopwatches], []
        if len(rows) < len(self.deals.shares):
            return  # One has died.
        *seconds, steps, drawns, most = zip(*rows, strict=True)
        step, before, self._before = median(steps), self._before, None
        if before is not None and step:
            _tell(trainer, f"Since the last deal a step is {before / step - 1:.0%} quicker", gain=before / step - 1)
        epoch = trainer.current_epoch
        timed = all(any(of_rank) for of_rank in zip(*seconds, strict=True))
        found = self.propose(epoch, batch, seconds, step, most) if timed else None
        if found is None:
            return
        first = int(max(drawns)) + 1
        since = (epoch, first) if first < trainer.num_training_batches else (epoch + 1, 0)
        self.deals.change(*since, found.shares)
        self._next, self._before = since, step
        counts = [int(share) for share in found.shares]
        said = f"{', '.join(map(str, counts))} {self.unit} a batch; a step shall be {found.gain:.0%} quicker"
        ranks = {f"rank_{rank}": count for rank, count in enumerate(counts)}
        _tell(trainer, f"Dealt anew: {said}", predicted_gain=found.gain, **ranks)

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.deals.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.deals.load_state_dict(state_dict)
        self._next = self.deals.since  # It may be one that was to come.


def gather_rows(row: list[float], group: dist.ProcessGroup | None) -> list[list[float]]:
    """Every rank's numbers; a collective of a group over gloo."""
    own = torch.tensor(row, dtype=torch.float64)
    rows = own.new_empty(dist.get_world_size() * len(row))
    dist.all_gather_into_tensor(rows, own, group=group)
    found: list[list[float]] = rows.view(-1, len(row)).tolist()
    return found


def _tell(trainer: Trainer, said: str, **figures: float) -> None:
    rank_zero_info(said)
    for logger in trainer.loggers:
        logger.log_metrics({f"shares/{name}": value for name, value in figures.items()}, step=trainer.global_step)
