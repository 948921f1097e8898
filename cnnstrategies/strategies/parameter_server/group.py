"""What the workers of a run tell each other: through the coordinator, not through a torch process group."""

from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torchmetrics import Metric

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.collectives import Collectives
from cnnstrategies.paramserver.membership import STOP, Membership
from cnnstrategies.paramserver.run_address import RunAddress
from cnnstrategies.paramserver.services import load_keys
from cnnstrategies.strategies.parameter_server.options import Options
from cnnstrategies.strategies.parameter_server.run import Place, worker_address

REDUCTIONS = {"sum": "sum", "mean": "mean", "avg": "mean", "max": "max", "min": "min", "product": "product"}


class WorkerGroup:
    """The collectives that Lightning asks for, among the workers that are there.

    Before :meth:`open`, after :meth:`close` and once this worker acts alone, they are of its own values only.

    Attributes:
        rank: This worker's.
        world_size: Workers of the run.
        insecure: No encryption although other machines are reached.
        run_address: Where the run can be watched; None before :meth:`open`.
    """

    def __init__(self) -> None:
        self.rank = 0
        self.world_size = 1
        self.insecure = False
        self.run_address: RunAddress | None = None
        self._membership: Membership | None = None
        self._collectives: Collectives | None = None
        self._alone = False
        self._metrics: list[tuple[Metric, Any, Any]] = []

    def __deepcopy__(self, memo: Any) -> Self:
        """This group itself: metrics are copied with their module, but the run stays one."""
        return self

    def open(self, options: Options, place: Place, rank: int, world_size: int) -> None:
        """Register with the coordinator of a session.

        Args:
            options: The strategy's.
            place: Where the processes meet.
            rank: This worker's.
            world_size: Workers of the run.
        """
        self.rank, self.world_size, self.insecure = rank, world_size, place.insecure
        self._alone = False
        self.run_address = RunAddress(place.coordinator, place.key_file and str(Path(place.key_file).resolve()))
        self._membership = Membership(worker_address(options, place, rank), keys=load_keys(place.key_file))
        self._collectives = Collectives(self._membership)

    @property
    def is_open(self) -> bool:
        """Whether this worker has registered."""
        return self._membership is not None

    @property
    def membership(self) -> Membership:
        """This worker's; only while it is open."""
        assert self._membership is not None, "the strategy has been set up"
        return self._membership

    @property
    def collectives(self) -> Collectives:
        """All that the coordinator offers; only while it is open."""
        assert self._collectives is not None, "the strategy has been set up"
        return self._collectives

    def absent(self) -> list[int]:
        """The ranks that took no part in the last collective."""
        present = None if self._collectives is None else self._collectives.present
        return [] if present is None else [rank for rank in range(self.world_size) if rank not in present]

    def close(self) -> None:
        """Leave the coordinator; a second time does nothing."""
        for metric, sync, available in self._metrics:
            metric.dist_sync_fn, metric.distributed_available_fn = sync, available
        self._metrics.clear()
        if self._membership is not None:
            self._membership.close()
        self._collectives = self._membership = None

    # Collectives

    def gather(self, value: Any, operation: str) -> dict[int, Any]:
        """The values of all workers, by rank."""
        if self._alone or self._collectives is None:
            return {self.rank: value}
        return self._collectives.gather(value, operation).values

    def broadcast(self, value: Any, source: int) -> Any:
        """The value of one rank, on all."""
        return value if self._alone or self._collectives is None else self._collectives.broadcast(value, source)

    def reduce(self, tensor: Any, how: ReduceOp | str | None) -> Any:
        """Combine a tensor; anything else is returned as it is.

        Raises:
            ConfigurationError: No such reduction.
        """
        if not isinstance(tensor, Tensor) or self._alone or self._collectives is None:
            return tensor
        name = str(how or "sum").lower().removeprefix("redoptype.")
        if name not in REDUCTIONS:
            raise ConfigurationError(f"reduce_op={how!r}: accepted are {', '.join(REDUCTIONS)}")
        return self._collectives.reduce(tensor, REDUCTIONS[name])

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all workers, stacked along a new first dimension."""
        values = self.gather(tensor, "all_gather")
        return torch.stack([values[rank] for rank in sorted(values)]).to(tensor.device)

    def decide(self, decision: bool, all: bool) -> bool:
        """Whether all workers, or any, have decided so."""
        decisions = self.gather(bool(decision), "decision").values()
        return bool(min(decisions) if all else max(decisions))

    # Metrics

    def share_metrics(self, module: nn.Module) -> None:
        """Have a module's metrics combine their states through this group, until it is closed."""
        for metric in module.modules():
            if isinstance(metric, Metric):
                self._metrics.append((metric, metric.dist_sync_fn, metric.distributed_available_fn))
                metric.dist_sync_fn = self._gather_metric
                metric.distributed_available_fn = self._is_shared

    def _gather_metric(self, state: Tensor, group: Any = None) -> list[Tensor]:
        values = self.gather(state, "metric")
        return [values[rank].to(state.device) for rank in sorted(values)]

    def _is_shared(self) -> bool:
        return self.world_size > 1

    # Stopping

    def agree_to_stop(self, received: int | None) -> int | None:
        """Agree on a stop without waiting for each other; from then on this worker acts alone.

        Args:
            received: The signal that this rank has received, if any.

        Returns:
            The signal that some rank has received.
        """
        if received is not None:
            self.membership.announce(STOP, received)
        signum = received if received is not None else self.membership.announced(STOP)
        self._alone = signum is not None
        return signum
