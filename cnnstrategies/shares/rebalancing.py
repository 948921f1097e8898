"""Rebalance: ranks of different speeds measure their times during training, and change their shares."""

from collections.abc import Sequence
from math import inf
from statistics import mean
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from cnnstrategies.runtime.groups import GatherRows
from cnnstrategies.runtime.stopwatch import Measured, Stopwatch
from cnnstrategies.runtime.waiting import unwatch, watch
from cnnstrategies.shares.bets import PATIENCE, Bets, Block, ShareDecision
from cnnstrategies.shares.history import ShareHistory
from cnnstrategies.shares.proposals import Proposal, proposal
from cnnstrategies.shares.samplers import DealtBatches, dealt

EVERY = 4  # Smallest number of batches between two exchanges of measured times.
# Number of batches at the start of a run that are not timed, and number of batches with new shares that are not timed.
# These batches allocate memory for later batches.
FIRST, SETTLING = 3, 2
FILLED = 0.9  # Largest fraction of a GPU's memory that training with new shares may use.


def propose(
    counts: Sequence[int], history: ShareHistory, seconds: Sequence[float], step: float, fitting: Sequence[float]
) -> Proposal | None:
    """Propose shares with which a step takes less time. Return None if the gain is too small to change the shares.

    Args:
        counts: Each rank's number of samples in a batch, with the current shares.
        history: The current shares, and the smallest and the largest allowed number of samples of a rank.
        seconds: Each rank's measured time per sample, in seconds.
        step: Measured time of a step with the current shares, in seconds.
        fitting: Estimated number of samples that fit into each rank's memory; infinite if not known.
    """
    most = history.most if isinstance(history.most, tuple) else (history.most,) * len(counts)
    limits = [max(count, min(limits)) for count, *limits in zip(counts, fitting, most, strict=True)]
    return proposal(counts, seconds, step, history.least, limits)


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


class Balance(Callback):
    """Callback that exchanges measured times among the ranks, and changes the shares if this makes steps faster.

    The ranks exchange their times every few batches. All ranks receive the same times, so all ranks choose the same
    shares. New shares apply only to batches that no rank's data loader has drawn yet. Each change is a bet, as
    :class:`~cnnstrategies.shares.bets.Bets` describes.

    The unit of work is a sample or, in a subclass, a microbatch. A rank's time is the time of its whole steps, without
    the time that it waits for other ranks. A subclass may measure several kinds of work instead, such as the forward
    and backward passes of a pipeline.

    Attributes:
        unit: Plural name of a unit of work, for log lines.
        clock: Stopwatch for this rank's steps. It runs from the end of a batch to the end of the next batch.

    Args:
        history: The ranks' shares. The callback changes them.
        device: This rank's device.
        gather: Function that sends this rank's measured times to all ranks, and returns the times of all ranks.
    """

    unit = "samples"

    def __init__(self, history: ShareHistory, device: torch.device, gather: GatherRows) -> None:
        self.history = history
        self.clock = Stopwatch(device)
        self.sampler: DealtBatches | None = None
        self._gather = gather
        self._bets = Bets()
        self._steps: list[Measured] = []  # Measured steps since the last exchange.
        self._held = 0  # Largest number of units of work that were in this rank's memory at once so far.
        self._untimed = FIRST  # Number of coming batches that are not timed.
        self._next = (0, 0)  # Epoch and batch from which the current shares are used.
        self._stays = False  # Whether the shares no longer change.

    def stay(self) -> None:
        """Keep the current shares for the rest of this run. All ranks must call this in the same batch."""
        self._stays = True
        self._end()

    def can_deal(self) -> bool:
        """Return whether the training batches are divided by shares that may change."""
        return self.sampler is not None and not self._stays

    def work(self, batch: int) -> int:
        """Return the number of units of work of this rank in a batch."""
        assert self.sampler is not None
        return self.sampler.counts(batch)[self.sampler.rank]

    def holds(self, batch: int) -> int:
        """Return the largest number of units of work that this rank holds in memory at once in a batch."""
        return self.work(batch)

    def unit_seconds(self, steps: Sequence[Measured]) -> list[float]:
        """Return this rank's seconds per unit of work since the last call, for each kind of work.

        A time is 0 if it is not known.

        Args:
            steps: The measured steps since the last call.
        """
        work = sum(step.work for step in steps)
        return [sum(step.own for step in steps) / work if work else 0.0]

    def counts(self, epoch: int, batch: int) -> tuple[int, ...]:
        """Return the number of units of work of each rank in a batch of full size."""
        assert self.sampler is not None
        # The last global batch may be smaller than the first.
        return self.history.counts(epoch, batch, sum(self.sampler.counts(0)))

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
        return propose(self.counts(epoch, batch), self.history, seconds[0], step, most)

    def watchers(self) -> list[Stopwatch]:
        """Return the stopwatches that measure waits for other ranks."""
        return [self.clock]

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        sampler = dealt(trainer)
        self.sampler = sampler if sampler is not None and sampler.follows_shares else None
        if self.can_deal() and not self._bets.is_over:
            for stopwatch in self.watchers():
                watch(stopwatch)

    def _end(self) -> None:
        for stopwatch in self.watchers():
            stopwatch.discard()
            unwatch(stopwatch)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end()

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.clock.discard()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.clock.discard()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self.can_deal() or self._bets.is_over:
            return
        self._held = max(self._held, self.holds(batch_idx))
        # A smaller batch at the end of an epoch is not timed, because a part of a step's time depends on no sample.
        is_whole = self.sampler is None or sum(self.sampler.counts(batch_idx)) == sum(self.sampler.counts(0))
        if (trainer.current_epoch, batch_idx) < self._next or not is_whole:
            self.clock.discard()
        elif self._untimed:
            self._untimed -= 1
            self.clock.discard()
        self.clock.end(self.work(batch_idx))
        self.clock.begin()
        self._steps += self.clock.take()
        # A worker of a parameter server that was restarted has the same batch number as the other workers, but not the
        # same number of timed steps. So the batch number alone decides when the ranks exchange their times.
        accumulated = trainer.accumulate_grad_batches
        every = min(-(-EVERY // accumulated) * accumulated, trainer.num_training_batches)
        if (batch_idx + 1) % every == 0:
            self._exchange(trainer, batch_idx, timed=2 * len(self._steps) >= every)

    def _exchange(self, trainer: Trainer, batch: int, timed: bool) -> None:
        steps, self._steps = self._steps, []
        drawn = batch + 1 if self.sampler is None else self.sampler.drawn
        duration = mean(step.seconds for step in steps) if timed else 0.0
        fits = fitting(self._held, trainer.strategy.root_device)
        rows = self._gather([*self.unit_seconds(steps), duration, drawn, fits])
        *units, durations, drawns, most = zip(*rows, strict=True)
        if len(rows) < len(self.history.shares):
            self._bets.forget()  # A rank has died.
            return
        if not all(durations) or not all(map(any, zip(*units, strict=True))):
            return  # A rank has not timed enough steps, because it has just begun, for example.
        epoch = trainer.current_epoch
        decision = self._bets.decide(
            Block(max(durations), tuple(units)),
            self.counts(epoch, batch),
            lambda seconds, step: self.propose(epoch, batch, seconds, step, most),
        )
        if decision.shares is not None:
            first = int(max(drawns)) + 1
            since = (epoch, first) if first < trainer.num_training_batches else (epoch + 1, 0)
            self.history.change(*since, decision.shares)
            self._next, self._untimed = since, SETTLING
            self.clock.clear()
        self._log(trainer, decision)
        if self._bets.is_over:
            self._end()

    def _log(self, trainer: Trainer, decision: ShareDecision) -> None:
        if (gain := decision.gain) is not None:
            text = f"Since the last change of shares, a step is {abs(gain):.0%} {'faster' if gain >= 0 else 'slower'}"
            if not decision.won:
                text += ", which is not a measurable gain: the ranks get their earlier shares again"
            _log(trainer, text, gain=gain)
        if decision.shares is not None:
            counts = [int(share) for share in decision.shares]
            figures = {f"rank_{rank}": float(count) for rank, count in enumerate(counts)}
            text = f"Rebalanced: ranks now get {', '.join(map(str, counts))} {self.unit} in a batch"
            if (predicted := decision.predicted) is not None:
                text += f"; a step should become {predicted:.0%} faster"
                figures["predicted_gain"] = predicted
            _log(trainer, text, **figures)
        if self._bets.is_over:
            rank_zero_info(f"Shares do not change any more, because {PATIENCE} changes have not made steps faster")

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.history.state_dict() | {"bets": self._bets.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history.load_state_dict(state_dict)
        # Checkpoints of earlier versions have no bets. With a different number of ranks, the times are of other ranks.
        if "bets" in state_dict and len(state_dict["since"][-1]) == 2 + len(self.history.shares):
            self._bets.load_state_dict(state_dict["bets"])
        # The newest shares in the checkpoint may apply only from a later batch on. The batches before it still use the
        # old shares, so they must not be timed.
        self._next = self.history.since


def rebalance(trainer: Trainer, balance: Balance | None) -> None:
    """Let a callback rebalance the ranks in the next run of a trainer, in place of an earlier run's callback.

    Call this before Lightning restores the states of callbacks from a checkpoint.

    Args:
        trainer: The trainer.
        balance: The callback; None if the shares do not change.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set outside the class
    callbacks[:] = [callback for callback in callbacks if not isinstance(callback, Balance)]
    callbacks += [] if balance is None else [balance]


def _log(trainer: Trainer, text: str, **figures: float) -> None:
    rank_zero_info(text)
    for logger in trainer.loggers:
        logger.log_metrics({f"shares/{name}": value for name, value in figures.items()}, step=trainer.global_step)
