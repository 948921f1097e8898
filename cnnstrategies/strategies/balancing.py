"""Measured shares: ranks of different speeds measure their times during training, and change their shares."""

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

EVERY = 5  # Number of batches between two exchanges of measured times.
FIRST = 3  # Number of batches at the start of a run that are not timed, because they allocate memory for later batches.
FILLED = 0.9  # Largest fraction of a GPU's memory that training with new shares may use.


# Type of a function that sends this rank's list of numbers to all ranks, and returns all ranks' lists in rank order.
GatherRows = Callable[[list[float]], list[list[float]]]


def propose(
    counts: Sequence[int], deals: Deals, seconds: Sequence[float], step: float, fitting: Sequence[float]
) -> Proposal | None:
    """Propose shares with which a step takes less time. Return None if the gain is too small to change the shares.

    Args:
        counts: Each rank's number of samples in a batch, with the current shares.
        deals: The current shares, and the smallest and the largest allowed number of samples of a rank.
        seconds: Each rank's measured time per sample, in seconds.
        step: Measured time of a step with the current shares, in seconds.
        fitting: Estimated number of samples that fit into each rank's memory; infinite if not known.
    """
    limits = [max(count, min(fits, deals.most)) for count, fits in zip(counts, fitting, strict=True)]
    return proposal(counts, seconds, step, deals.least, limits)


def fitting(held: int, device: torch.device) -> float:
    """Estimate how many samples or microbatches fit into the memory of a device at once.

    On a CPU the result is infinite.

    The estimate assumes that the memory in use grows in proportion to the number of samples. Call this between two
    steps, when no activations are allocated.

    Args:
        held: Largest number of samples or microbatches that were in memory at once since training began.
        device: This rank's device.
    """
    if device.type != "cuda":
        return inf
    rest, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    limit = FILLED * (torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))
    return max(0.0, limit - rest) * held // (peak - rest) if peak > rest else inf


class Stopwatch:
    """Stopwatch for this rank's own computation in each step, from the start of the forward to the last gradient.

    On a GPU the times come from CUDA events. An event is read only after the GPU has reached the event, so the CPU
    never waits for the GPU.

    Args:
        device: This rank's device.
        waited: Function that returns the total time in seconds that this rank has waited for other processes so far.
            Waiting between :meth:`begin` and :meth:`end` is subtracted from the measured time. By default no waiting is
            subtracted.
    """

    def __init__(self, device: torch.device, waited: Callable[[], float] = float) -> None:
        self._waited = waited
        self._waited_before = 0.0  # The value of `waited()` when the stopwatch was started.
        self._events: list[tuple[Any, Any, float]] = []  # For each step: start event, end event, seconds of waiting.
        self._on_device = device.type == "cuda"
        self._start: Any = None  # Event or time in seconds at which the stopwatch was started; None if it is stopped.
        self._seconds: list[float] = []

    def begin(self) -> None:
        """Start the stopwatch. Call this right before a forward."""
        self._waited_before = self._waited()
        self._start = self._now()

    def end(self) -> None:
        """Stop the stopwatch if it is running. Call this when the last gradient of a backward is computed."""
        if self._start is None:
            return
        start, self._start = self._start, None
        waited = self._waited() - self._waited_before
        if self._on_device:
            self._events.append((start, self._now(), waited))
        else:
            self._seconds.append(self._now() - start - waited)

    def take(self) -> list[float]:
        """Return the measured times of steps since the last call of this method, in seconds, one time for each step.

        On a GPU the times of the newest steps may be missing, because the GPU has not finished these steps. A later
        call returns them.
        """
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
    """Callback that exchanges measured times among the ranks, and changes the shares if this makes steps faster.

    The ranks exchange their times every few batches. All ranks receive the same times, so all ranks choose the same
    shares. New shares apply only to batches that no rank's data loader has drawn yet.

    The unit of work is a sample or, in a subclass, a microbatch. A rank may do several kinds of work, such as the
    forward and backward passes of a pipeline, and each kind has its own stopwatch.

    Attributes:
        unit: Plural name of a unit of work, for log lines.

    Args:
        deals: The ranks' shares. The callback changes them.
        stopwatches: The stopwatches of this rank, one for each kind of work.
        gather: Function that sends this rank's measured times to all ranks, and returns the times of all ranks.
    """

    unit = "samples"

    def __init__(self, deals: Deals, stopwatches: Sequence[Stopwatch], gather: GatherRows) -> None:
        self.deals = deals
        self.sampler: DealtBatches | None = None
        self._stopwatches = stopwatches
        self._gather = gather
        # For each kind of work: this rank's measured seconds per unit of work, since the last exchange.
        self._unit_seconds: list[list[float]] = [[] for _ in stopwatches]
        # Seconds between the ends of two consecutive batches, since the last exchange.
        self._step_seconds: list[float] = []
        self._last_end: float | None = None  # Time at which the previous batch ended; None at the start of an epoch.
        self._held = 0  # Largest number of units of work that were in this rank's memory at once so far.
        self._untimed = FIRST  # Number of coming batches that are not timed.
        self._next = (0, 0)  # Epoch and batch from which the current shares are used.
        # Time of a step with the previous shares, in seconds; None once the measured gain has been logged.
        self._step_before: float | None = None
        self._stays = False  # Whether the shares no longer change.

    def stay(self) -> None:
        """Keep the current shares for the rest of this run."""
        self._stays = True

    def can_deal(self) -> bool:
        """Return whether the training batches are divided by shares that may change."""
        return self.sampler is not None and not self._stays

    def work(self, batch: int) -> int:
        """Return the number of units of work of this rank in a batch.

        The callback divides a stopwatch's time by this number to get the time per unit.
        """
        assert self.sampler is not None
        return self.sampler.counts(batch)[self.sampler.rank]

    def holds(self, batch: int) -> int:
        """Return the largest number of units of work that this rank holds in memory at once in a batch."""
        return self.work(batch)

    def propose(
        self, epoch: int, batch: int, seconds: Sequence[Sequence[float]], step: float, most: Sequence[float]
    ) -> Proposal | None:
        """Propose shares with which a step takes less time. Return None if the gain is too small to change the shares.

        Args:
            epoch: Number of the current epoch.
            batch: Number of the current batch in the epoch.
            seconds: For each kind of work, a list with each rank's measured time per unit, in seconds.
            step: Measured time of a step with the current shares, in seconds.
            most: Estimated number of units that fit into each rank's memory; infinite if not known.
        """
        assert self.sampler is not None
        # The proposal is for the size of the epoch's first global batch, because the last global batch may be smaller.
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
            return  # A rank has died, so its time is missing and the shares stay as they are.
        *seconds, steps, drawns, most = zip(*rows, strict=True)
        step, step_before, self._step_before = median(steps), self._step_before, None
        if step_before is not None and step:
            gain = step_before / step - 1
            _log(trainer, f"Since the last change of shares, a step is {gain:.0%} faster", gain=gain)
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
        text = f"{', '.join(map(str, counts))} {self.unit} in a batch; a step should become {proposed.gain:.0%} faster"
        ranks = {f"rank_{rank}": count for rank, count in enumerate(counts)}
        _log(trainer, f"Rebalanced: ranks now get {text}", predicted_gain=proposed.gain, **ranks)

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.deals.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.deals.load_state_dict(state_dict)
        # The newest shares in the checkpoint may apply only from a later batch on. The batches before it still use the
        # old shares, so they must not be timed.
        self._next = self.deals.since


def gather_rows(row: list[float], group: dist.ProcessGroup | None) -> list[list[float]]:
    """Send this rank's row of numbers to all ranks, and return the rows of all ranks in rank order.

    All ranks must call this, with rows of equal length.

    Args:
        row: The row of this rank.
        group: A process group of all ranks with the backend gloo.
    """
    tensor = torch.tensor(row, dtype=torch.float64)
    rows = tensor.new_empty(dist.get_world_size() * len(row))
    dist.all_gather_into_tensor(rows, tensor, group=group)
    listed: list[list[float]] = rows.view(-1, len(row)).tolist()
    return listed


def _log(trainer: Trainer, text: str, **figures: float) -> None:
    rank_zero_info(text)
    for logger in trainer.loggers:
        logger.log_metrics({f"shares/{name}": value for name, value in figures.items()}, step=trainer.global_step)
