"""Rebalancing: how the shares of ranks that are not equally fast change while they train."""

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

EVERY = 5  # Batches between two exchanges of times.
FIRST = 3  # The first batches of a run are not timed: they create what later batches reuse.
FILLED = 0.9  # Largest part of a device's memory that new shares may fill, as far as measured.


# Collects a row of numbers from each rank that takes part, and returns these rows in rank order.
GatherRows = Callable[[list[float]], list[list[float]]]


def propose(
    counts: Sequence[int], deals: Deals, seconds: Sequence[float], step: float, fitting: Sequence[float]
) -> Proposal | None:
    """Return new shares for the ranks; None if they would not gain enough.

    Args:
        counts: Samples that each rank has now.
        deals: The limits of a rank's samples.
        seconds: Each rank's seconds for a sample.
        step: Seconds of a step.
        fitting: Samples that fit into each rank's memory, as far as measured.
    """
    limits = [max(count, min(fits, deals.most)) for count, fits in zip(counts, fitting, strict=True)]
    return proposal(counts, seconds, step, deals.least, limits)


def fitting(held: int, device: torch.device) -> float:
    """Return how many samples, or microbatches, the memory of a rank can hold at once; infinite on a CPU.

    Must be called between two steps, when the memory that torch has allocated does not depend on samples.

    Args:
        held: The largest number that the memory has held at once since training began.
        device: The rank's device.
    """
    if device.type != "cuda":
        return inf
    rest, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    limit = FILLED * (torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))
    return max(0.0, limit - rest) * held // (peak - rest) if peak > rest else inf


class Stopwatch:
    """Clock of a rank's own work in a step, from the begin of the forward to the last gradient.

    The time until the last gradient contains no waiting for other ranks. On a GPU the times come from events, which
    are read only after they have happened, so that the host never waits for the device.

    Args:
        device: The rank's device.
        waited: Returns the seconds that this rank has waited for other ranks so far. They are subtracted.
    """

    def __init__(self, device: torch.device, waited: Callable[[], float] = float) -> None:
        self._waited = waited
        self._waited_before = 0.0  # Seconds of waiting before the forward began.
        self._events: list[tuple[Any, Any, float]] = []
        self._on_device = device.type == "cuda"
        self._start: Any = None
        self._seconds: list[float] = []

    def begin(self) -> None:
        """Start the clock at the begin of a forward."""
        self._waited_before = self._waited()
        self._start = self._now()

    def end(self) -> None:
        """Stop the clock at the last gradient; do nothing if the clock is not running."""
        if self._start is None:
            return
        start, self._start = self._start, None
        waited = self._waited() - self._waited_before
        if self._on_device:
            self._events.append((start, self._now(), waited))
        else:
            self._seconds.append(self._now() - start - waited)

    def take(self) -> list[float]:
        """Return the seconds of the steps that were timed since the last call."""
        while self._events and self._events[0][1].query():
            start, end, waited = self._events.pop(0)
            self._seconds.append(start.elapsed_time(end) / 1000 - waited)
        seconds, self._seconds = self._seconds, []
        return seconds

    def _now(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


class Balance(Callback):
    """Exchanges the ranks' times every few batches, and rebalances the shares if that makes steps quicker.

    All ranks see the same times, so they reach the same decision. New shares hold from a batch on that no loader has
    drawn yet.

    Attributes:
        unit: Name of the units of work, for log lines.

    Args:
        deals: The ranks' shares.
        stopwatches: One for each kind of work.
        gather: Collects the times of all ranks.
    """

    unit = "samples"

    def __init__(self, deals: Deals, stopwatches: Sequence[Stopwatch], gather: GatherRows) -> None:
        self.deals = deals
        self.sampler: DealtBatches | None = None
        self._stopwatches = stopwatches
        self._gather = gather
        self._unit_seconds: list[list[float]] = [[] for _ in stopwatches]  # Of this rank, for each kind of work.
        self._step_seconds: list[float] = []
        self._last_end: float | None = None
        self._held = 0  # The most units of work at once so far.
        self._untimed = FIRST  # Batches that are still not timed.
        self._next = (0, 0)  # Epoch and batch from which the present shares hold.
        self._step_before: float | None = None  # Seconds of a step under the previous shares, until the gain is logged.

    def can_deal(self) -> bool:
        """Return whether the batches of this training are divided by shares."""
        return self.sampler is not None

    def work(self, batch: int) -> int:
        """Return the units of this rank's work that one measured time covers."""
        assert self.sampler is not None
        return self.sampler.counts(batch)[self.sampler.rank]

    def holds(self, batch: int) -> int:
        """Return the units of work that this rank's memory holds at once."""
        return self.work(batch)

    def propose(
        self, epoch: int, batch: int, seconds: Sequence[Sequence[float]], step: float, most: Sequence[float]
    ) -> Proposal | None:
        """Return new shares; None if they would not gain enough.

        Args:
            epoch: The present epoch.
            batch: The present batch.
            seconds: For each kind of work, each rank's seconds for one unit.
            step: Seconds of a step.
            most: Units that each rank's memory can hold at once.
        """
        assert self.sampler is not None
        # The global batch of the epoch's first batch, because the last batch may be smaller.
        counts = self.deals.counts(epoch, batch, sum(self.sampler.counts(0)))
        return propose(counts, self.deals, seconds[0], step, most)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.sampler = dealt(trainer)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_end = None

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        times = [stopwatch.take() for stopwatch in self._stopwatches]
        if not self.can_deal():
            return
        now, last_end = time.perf_counter(), self._last_end
        self._last_end = now
        self._held = max(self._held, self.holds(batch_idx))
        if self._untimed or (trainer.current_epoch, batch_idx) < self._next:
            self._untimed = max(0, self._untimed - 1)
            return
        work = self.work(batch_idx)
        for unit_seconds, seconds in zip(self._unit_seconds, times, strict=True):
            unit_seconds += [measured / work for measured in seconds if work]
        if last_end is not None:
            self._step_seconds.append(now - last_end)
        if (batch_idx + 1) % min(EVERY, trainer.num_training_batches) == 0:
            self._exchange(trainer, batch_idx)

    def _exchange(self, trainer: Trainer, batch: int) -> None:
        medians = [median(values) if values else 0.0 for values in (*self._unit_seconds, self._step_seconds)]
        drawn = batch + 1 if self.sampler is None else self.sampler.drawn
        rows = self._gather([*medians, drawn, fitting(self._held, trainer.strategy.root_device)])
        self._unit_seconds, self._step_seconds = [[] for _ in self._stopwatches], []
        if len(rows) < len(self.deals.shares):
            return  # A rank has died.
        *seconds, steps, drawns, most = zip(*rows, strict=True)
        step, step_before, self._step_before = median(steps), self._step_before, None
        if step_before is not None and step:
            gain = step_before / step - 1
            _log(trainer, f"Since the last rebalancing a step is {gain:.0%} quicker", gain=gain)
        epoch = trainer.current_epoch
        timed = all(any(of_rank) for of_rank in zip(*seconds, strict=True))
        proposed = self.propose(epoch, batch, seconds, step, most) if timed else None
        if proposed is None:
            return
        first = int(max(drawns)) + 1
        since = (epoch, first) if first < trainer.num_training_batches else (epoch + 1, 0)
        self.deals.change(*since, proposed.shares)
        self._next, self._step_before = since, step
        counts = [int(share) for share in proposed.shares]
        text = f"{', '.join(map(str, counts))} {self.unit} a batch; a step should become {proposed.gain:.0%} quicker"
        ranks = {f"rank_{rank}": count for rank, count in enumerate(counts)}
        _log(trainer, f"Rebalanced: {text}", predicted_gain=proposed.gain, **ranks)

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.deals.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.deals.load_state_dict(state_dict)
        self._next = self.deals.since  # The last shares may hold from a batch that is still to come.


def gather_rows(row: list[float], group: dist.ProcessGroup | None) -> list[list[float]]:
    """Return the rows of all ranks, in rank order; a collective of a gloo group."""
    tensor = torch.tensor(row, dtype=torch.float64)
    rows = tensor.new_empty(dist.get_world_size() * len(row))
    dist.all_gather_into_tensor(rows, tensor, group=group)
    listed: list[list[float]] = rows.view(-1, len(row)).tolist()
    return listed


def _log(trainer: Trainer, text: str, **figures: float) -> None:
    rank_zero_info(text)
    for logger in trainer.loggers:
        logger.log_metrics({f"shares/{name}": value for name, value in figures.items()}, step=trainer.global_step)
