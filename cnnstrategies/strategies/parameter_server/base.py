"""A DDP strategy whose ranks meet at a coordinator instead of a torch process group."""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Self

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torchmetrics import Metric
from typing_extensions import override

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.collectives import Collectives
from cnnstrategies.paramserver.core.view import RunEnded
from cnnstrategies.paramserver.membership import STOP, Membership
from cnnstrategies.paramserver.places import RunAddress
from cnnstrategies.paramserver.services import load_keys
from cnnstrategies.paramserver.supervision import Supervision
from cnnstrategies.strategies.parameter_server.launcher import WatchingProcessLauncher, WatchingScriptLauncher
from cnnstrategies.strategies.parameter_server.options import Options
from cnnstrategies.strategies.parameter_server.run import (
    SESSIONS,
    WAIT,
    Layout,
    Place,
    open_supervision,
    worker_address,
)
from cnnstrategies.strategies.unwrapped import (
    check_keywords,
    check_optimizer_states,
    own_metric_states,
    warn_of_weights_alone,
)

REDUCTIONS = {"sum": "sum", "mean": "mean", "avg": "mean", "max": "max", "min": "min", "product": "product"}


class WorkerGroup:
    """The collectives that Lightning asks for, among the workers that are there.

    Before :meth:`open`, after :meth:`close` and once this worker acts alone, they are of its own values only.

    Attributes:
        rank: This worker's.
        world_size: Workers of the run.
        run_address: Where the run can be watched; None before :meth:`open`.
    """

    def __init__(self) -> None:
        self.rank = 0
        self.world_size = 1
        self.run_address: RunAddress | None = None
        self._membership: Membership | None = None
        self._collectives: Collectives | None = None
        self._alone = False
        self._metrics: list[tuple[Metric, Any, Any]] = []

    def __deepcopy__(self, memo: Any) -> Self:
        """This group itself: metrics are copied with their module, but the run stays one."""
        return self

    def open(self, options: Options, place: Place, rank: int, world_size: int) -> None:
        """Register with the coordinator of a session."""
        self.rank, self.world_size = rank, world_size
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
        """Agree on a stop without waiting for each other; from then on this worker acts alone."""
        if received is not None:
            self.membership.announce(STOP, received)
        signum = received if received is not None else self.membership.announced(STOP)
        self._alone = signum is not None
        return signum


class CoordinatedStrategy(DDPStrategy):
    """Starts and watches the processes of a run, and serves the collectives that Lightning asks for."""

    finds_hosts = True  # Its coordinator knows who is there.
    wait = WAIT

    def __init__(self, options: Options, start_method: Literal["popen", "spawn", "fork"], **kwargs: Any) -> None:
        check_keywords(type(self).__name__, kwargs)
        super().__init__(start_method=start_method, timeout=timedelta(seconds=options.timeout), **kwargs)
        self.options = options
        self.group = WorkerGroup()
        self._start = start_method
        self._services: Supervision | None = None
        self._interrupted = False

    def __deepcopy__(self, memo: Any) -> Self:
        """This strategy itself: weight averaging copies the module with its trainer, but the run stays one."""
        return self

    # Processes

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self._start == "popen":
            self._launcher = WatchingScriptLauncher(self)
        else:
            self._launcher = WatchingProcessLauncher(self, self._start)

    def layout(self) -> Layout:
        """The nodes."""
        environment = self.cluster_environment
        assert environment is not None
        address, port = environment.main_address, environment.main_port
        return Layout(self.num_nodes, self.node_rank, self.num_processes, address, port, self.wait)

    @override
    def setup_distributed(self) -> None:
        """Register with the coordinator; there is no torch process group."""
        assert self.lightning_module is not None
        reset_seed()
        self.set_world_ranks()
        own_metric_states(self.lightning_module)
        if not self.group.is_open:
            self.open_session()

    def open_session(self) -> None:
        """Register with the coordinator of the next session."""
        assert self.lightning_module is not None
        self._interrupted = False
        training = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        place = SESSIONS.open(self.options, self.layout, training)
        if not place.supervised and self.local_rank == 0:
            self._services = open_supervision(self.options, self.layout(), place, training, "program")
        self.group.open(self.options, place, self.global_rank, self.world_size)

    def stop_signal(self, received: int | None) -> int | None:
        """Agree on a stop without waiting for each other; from then on this worker acts alone."""
        return self.group.agree_to_stop(received)

    def stop_asked(self) -> int | None:
        """The signal that some other process of the run has received and told all, such as a server."""
        return self.group.membership.announced(STOP) if self.group.is_open else None

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self.group.is_open and isinstance(exception, Exception) and not isinstance(exception, RunEnded):
            reason = f"{type(exception).__name__}: {exception}"
            self.group.membership.end(f"worker {self.global_rank} failed: {reason}")
        self._interrupted = True
        super().on_exception(exception)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        warn_of_weights_alone(checkpoint, filepath, self._launcher, self._start)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        check_optimizer_states(len(checkpoint["optimizer_states"]), len(self.optimizers))
        super().load_optimizer_state_dict(checkpoint)

    @override
    def teardown(self) -> None:
        self.leave_session()
        super().teardown()

    def leave_session(self) -> None:
        """Leave the coordinator; a second time does nothing."""
        if self.group.is_open:
            SESSIONS.lost = self.group.absent()
        self.group.close()
        if self._services is not None:
            self._services.stop(at_once=self._interrupted)
        self._services = None

    # Collectives

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self.group.gather(None, str(args[0]) if args and args[0] else "barrier")

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of one rank, on all; nothing is pickled."""
        return self.group.broadcast(obj, src)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: ReduceOp | str | None = "mean") -> Any:
        """Combine a tensor over the workers that are there."""
        return self.group.reduce(tensor, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The tensors of all workers that are there, stacked along a new first dimension."""
        if sync_grads:
            raise ConfigurationError("all_gather(sync_grads=True): workers exchange no gradients of activations")
        values = self.group.gather(tensor, "all_gather")
        return torch.stack([values[rank] for rank in sorted(values)]).to(tensor.device)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all workers, or any, have decided so."""
        decisions = self.group.gather(bool(decision), "decision").values()
        return bool(min(decisions) if all else max(decisions))
