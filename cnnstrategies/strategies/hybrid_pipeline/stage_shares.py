"""The shares of a pipeline's replicas: given, or measured by the time that each replica takes for a microbatch."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from cnnstrategies.pipeline.stage_runner import StageRunner
from cnnstrategies.pipeline.timetable import KINDS, Placement
from cnnstrategies.pipeline.transport import Transport
from cnnstrategies.planning.stage_shares import in_flight, propose_stage_shares
from cnnstrategies.runtime.groups import GatherRows
from cnnstrategies.runtime.stopwatch import Measured, Stopwatch
from cnnstrategies.shares.history import ShareHistory
from cnnstrategies.shares.proposals import Proposal
from cnnstrategies.shares.rebalancing import Balance, rebalance

if TYPE_CHECKING:
    from cnnstrategies.strategies.hybrid_pipeline.base import PipelineStrategy


class StageBalance(Balance):
    """Callback that rebalances the microbatches of each stage among its replicas, if a step of all stages is faster."""

    unit = "microbatches"

    def __init__(self, history: ShareHistory, placement: Placement, device: Any, gather: GatherRows) -> None:
        super().__init__(history, device, gather)
        self._clocks = {kind: Stopwatch(device) for kind in KINDS}
        self._placement = placement
        self._pipeline: StageRunner | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        strategy: Any = trainer.strategy
        self._pipeline = stages = strategy.timed_stages
        for kind, clock in self._clocks.items():
            stages.times.clocks.setdefault(kind, []).append(clock)

    @override
    def can_deal(self) -> bool:
        return self.sampler is not None or self._placement.replicas[0] == 1

    @override
    def work(self, batch: int) -> int:
        return 1

    @override
    def holds(self, batch: int) -> int:
        assert self._pipeline is not None
        return in_flight(self._pipeline.tasks)

    @override
    def counts(self, epoch: int, batch: int) -> tuple[int, ...]:
        assert self._pipeline is not None
        placement = self._pipeline.placement
        return tuple(len(placement.microbatches_of(rank)) for rank in range(placement.world_size))

    @override
    def watchers(self) -> list[Stopwatch]:
        return [self.clock, *self._clocks.values()]

    @override
    def unit_seconds(self, steps: Sequence[Measured]) -> list[float]:
        return [clock.take_mean() for clock in self._clocks.values()]

    @override
    def propose(
        self, epoch: int, batch: int, seconds: Sequence[Sequence[float]], step: float, most: Sequence[float]
    ) -> Proposal | None:
        pipeline = self._pipeline
        assert pipeline is not None
        placement, pairs = pipeline.placement, pipeline.connections
        return propose_stage_shares(placement, pipeline.schedule, pipeline.run_ahead, pairs, seconds, step, most)

    @override
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"ranks": self._ranks}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["ranks"] == self._ranks:  # Under another layout a share is another rank's.
            super().load_state_dict(state_dict)

    @property
    def _ranks(self) -> list[list[int]]:
        return [list(self._placement.ranks(stage)) for stage in range(self._placement.stages)]


def begin_shares(strategy: "PipelineStrategy", trainer: Trainer, gather: GatherRows) -> ShareHistory | None:
    """Return the shares of all ranks in each training batch; None if the shares are equal.

    If the shares are measured, a callback that measures them is added, before Lightning gives callbacks their states of
    a checkpoint.
    """
    shares, placement = strategy.request.shares, strategy.placement
    history = ShareHistory(placement.shares or [1] * placement.world_size, loads=strategy.loads)
    measured = shares == "auto" and trainer.state.fn == TrainerFn.FITTING and max(placement.replicas) > 1
    rebalance(trainer, StageBalance(history, placement, strategy.root_device, gather) if measured else None)
    return None if shares == "equal" else history


def use_shares(trainer: Any, transport: Transport, history: ShareHistory | None) -> None:
    """Let the replicas divide the microbatches of the next training batch by the shares of this batch.

    All ranks must call this before they transfer a batch to the device.

    Args:
        trainer: The trainer.
        transport: Connections of this rank, whose placement has the shares.
        history: The shares of all batches; None if shares are equal.
    """
    if history is None or not trainer.training:
        return
    shares = history.at(trainer.current_epoch, trainer.fit_loop.batch_idx + 1)
    if shares != transport.placement.shares:
        transport.placement = replace(transport.placement, shares=shares)
