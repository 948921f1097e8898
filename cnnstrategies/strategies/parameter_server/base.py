"""The base class of ``parameter_server``: ranks register with a coordinator, which carries out their collectives."""

import os
import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Self

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torchmetrics import Metric
from typing_extensions import override

from cnnstrategies._lightning_private import note_sigterm_alone
from cnnstrategies.cluster.addresses import free_port, main_port_of
from cnnstrategies.cluster.claimed_processes import check_processes
from cnnstrategies.cluster.rendezvous import Party, is_under_torchrun, take_part
from cnnstrategies.cluster.run_identity import run_identity
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.identity import Identity
from cnnstrategies.paramserver.collectives import REDUCTIONS, Collectives
from cnnstrategies.paramserver.coordinator.settings import Address
from cnnstrategies.paramserver.core.view import RemovedError, RunEnded, ServersUnreachableError
from cnnstrategies.paramserver.membership import Membership
from cnnstrategies.paramserver.optimizer_check import ServedOptimizer
from cnnstrategies.paramserver.places import RunAddress
from cnnstrategies.paramserver.services import load_keys
from cnnstrategies.paramserver.supervision import Supervision
from cnnstrategies.runtime.compiling import renew_thread_pool
from cnnstrategies.strategies.exact_means import widened
from cnnstrategies.strategies.failing import last_line, watch_failures
from cnnstrategies.strategies.notebooks import check_interactive
from cnnstrategies.strategies.parameter_server.launcher import WatchingProcessLauncher, WatchingScriptLauncher
from cnnstrategies.strategies.parameter_server.options import ParameterServerOptions
from cnnstrategies.strategies.parameter_server.run import (
    SESSIONS,
    WAIT,
    NodeLayout,
    Rendezvous,
    open_supervision,
    worker_address,
)
from cnnstrategies.strategies.parameter_server.torch_group import close_worker_group, open_worker_group
from cnnstrategies.strategies.protocol import GradientWeighting, StrategyFacts
from cnnstrategies.strategies.without_ddp import (
    check_keywords,
    check_optimizer_states,
    own_metric_states,
)


class CoordinatedStrategy(StrategyFacts, DDPStrategy):
    """DDP strategy that starts and watches the run's processes, and whose collectives go through the coordinator.

    A session is one call of a trainer function, such as ``fit``. It begins when this process registers with the
    coordinator. If no session is open, or after a stop was requested, collectives do not wait for other workers: they
    return the result for this worker's own value.

    Attributes:
        membership: This worker's membership; None unless a session is open.
        options: The strategy's options.
        configuration: Digest of the run's configuration; empty before :meth:`register`, and in a script.
        served: How the servers run the module's optimizer.
    """

    # The hosts find each other through the coordinator, so the cluster code does not open a torch store.
    connects_hosts = True
    membership: Membership | None = None
    configuration = ""
    served = ServedOptimizer()

    def __init__(
        self, options: ParameterServerOptions, start_method: Literal["popen", "spawn", "fork"], **kwargs: Any
    ) -> None:
        check_keywords(type(self).__name__, kwargs)
        super().__init__(start_method=start_method, timeout=timedelta(seconds=options.timeout), **kwargs)
        self.options = options
        self._address: RunAddress | None = None  # The run's address, for the commands `watch` and `join`.
        # The log directory into which rank 0 has written the address; None if no address has been written.
        self._folder: Path | None = None
        self._start = start_method
        self._services: Supervision | None = None
        self._interrupted = False
        self._host_timeout = WAIT
        self._collectives: Collectives | None = None
        self._alone = False
        self._has_group = False  # Whether this strategy has opened the process group of torch.distributed.
        self._metrics: list[tuple[Metric, Any, Any]] = []

    @property
    @override
    def gradient_weighting(self) -> GradientWeighting:
        # The servers weight each worker's gradient by the worker's number of samples in the step. In manual
        # optimization a step may have any batches, so each batch's loss is weighted, and workers' gradients equally.
        module = self.lightning_module
        return "by_rank" if module is None or module.automatic_optimization else "equal"

    def __deepcopy__(self, memo: Any) -> Self:
        """Return this strategy itself.

        Lightning's callback WeightAveraging makes a deep copy of the module. The copy must use the same strategy and
        session as the module.
        """
        return self

    # Processes of the run

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        check_processes(self.cluster_environment, self.num_nodes, self.num_processes)
        if self._start == "popen":
            self._launcher = WatchingScriptLauncher(self)
        else:
            self._launcher = WatchingProcessLauncher(self, self._start)
        check_interactive(self, self._launcher)

    @property
    @override
    def only_starts_ranks(self) -> bool:
        environment = self.cluster_environment
        started = environment is not None and environment.creates_processes_externally
        return isinstance(self._launcher, WatchingScriptLauncher) and not started

    def layout(self) -> NodeLayout:
        """Return the run's nodes and processes, from Lightning's cluster environment."""
        environment = self.cluster_environment
        assert environment is not None
        main_port_of(os.environ)  # This call refuses a value that is not a port. Lightning would raise a ValueError.
        address, port, run = environment.main_address, environment.main_port, run_identity().text()
        return NodeLayout(self.num_nodes, self.node_rank, self.num_processes, address, port, self._host_timeout, run)

    def find_main_port(self, number: int, processes: int) -> None:
        """Find the port of the coordinator on rank 0's host, and make it the main port.

        Do nothing if the user has set the coordinator's address, or if the run needs no port.

        Args:
            number: Number of this process among the processes that call this method.
            processes: Number of these processes: the ranks, or one process on each host.
        """
        environment = self.cluster_environment
        assert environment is not None
        if self.options.coordinator is None and (self.num_nodes > 1 or is_under_torchrun()):
            kind, wait = type(self).__name__, self._host_timeout
            identity = run_identity()
            party = Party(environment, self.num_nodes, number, processes, identity, kind, wait, exclusive=False)
            take_part(party, lambda address, port: (port or free_port(), None))

    def _found_layout(self) -> NodeLayout:
        if Rendezvous.published() is None:
            self.find_main_port(self.global_rank, self.world_size)
        return self.layout()

    @override
    def set_host_timeout(self, seconds: float) -> None:
        self._host_timeout = seconds

    @property
    @override
    def server_options(self) -> ParameterServerOptions:
        return self.options

    @override
    def setup_distributed(self) -> None:
        """Register with the coordinator, and open a process group of torch whose collectives it carries out."""
        assert self.lightning_module is not None
        renew_thread_pool()  # A user's own module may be compiled.
        reset_seed()
        self.set_world_ranks()
        own_metric_states(self.lightning_module)
        if self.membership is None:
            self.open_session()
        self._has_group = self._has_group or open_worker_group(self)
        note_sigterm_alone(self.lightning_module.trainer)
        watch_failures(self.lightning_module.trainer)

    def open_session(self) -> None:
        """Begin the next session, and register this process with the session's coordinator.

        If no launcher of this package has started the coordinator and the servers of this node, local rank 0 starts
        them.
        """
        assert self.lightning_module is not None
        self._interrupted = self._alone = False
        training = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        place = SESSIONS.open(self.options, self._found_layout, training)
        if not place.supervised and self.local_rank == 0:
            self._services = open_supervision(self.options, self.layout(), place, training, "program")
        key_file = place.key_file and str(Path(place.key_file).resolve())
        self.register(worker_address(self.options, place, self.global_rank), key_file)

    def register(self, address: Address, key_file: str | None) -> None:
        """Register with a coordinator as a member of a run.

        Args:
            address: The coordinator's address, and the role, the id and the time-outs of this process.
            key_file: File with the run's keys; None without encryption.
        """
        self._address = RunAddress(address.coordinator, key_file)
        self.configuration = Identity.read(address.run).configuration if address.run else ""
        self.membership = Membership(address, keys=load_keys(key_file))
        self._collectives = Collectives(self.membership)

    def leave_address(self, trainer: Trainer) -> None:
        """Write the run's address into the log directory, for ``cnnstrategies watch`` and ``cnnstrategies join``.

        The file is removed when the session ends. All ranks must call this.
        """
        if trainer.fast_dev_run or not trainer.loggers:  # type: ignore[attr-defined]
            return
        folder = trainer.log_dir  # Lightning broadcasts this value, so every rank must read it.
        if self._address is not None and self.global_rank == 0 and folder is not None and "://" not in folder:
            self._folder = Path(folder)
            self._address.save(self._folder)

    @property
    def collectives(self) -> Collectives:
        """Collectives among the workers. The property is available only while a session is open."""
        assert self._collectives is not None, "a session is open"
        return self._collectives

    @override
    def agree_on_stop(self, received: int | None) -> int | None:
        """Send a received signal to all processes of the run, and return the run's stop signal.

        Return None if no process of the run has received a signal.

        After this call the worker does not wait for other workers, because the workers may stop in different steps.

        Args:
            received: The signal that this process has received, or `FINDING`; None if it has received none.
        """
        membership = self.collectives.membership
        if received is not None:
            membership.stop_all(received)
        signum = received if received is not None else membership.stop_signal
        self._alone = signum is not None
        return signum

    @override
    def requested_stop(self) -> int | None:
        return self.membership.stop_signal if self.membership is not None else None

    @override
    def fail_together(self, point: str, seconds: float, exception: BaseException) -> bool:
        if self.membership is None or isinstance(exception, RunEnded | RemovedError | ServersUnreachableError):
            return False
        # If the other workers have not failed, this call ends the run, so that the collective below ends as well.
        timer = threading.Timer(seconds, self._report, [exception])
        timer.start()
        try:
            points = self.gather(point, "save after an exception").values()
        except RunEnded:
            return False
        finally:
            timer.cancel()
        return len(set(points)) == 1

    def _report(self, exception: BaseException) -> None:
        if self.membership is not None:
            self.membership.end(f"worker {self.global_rank} failed: {last_line(exception)}")

    @override
    def on_exception(self, exception: BaseException) -> None:
        if isinstance(exception, Exception) and not isinstance(exception, RunEnded):
            self._report(exception)
        self._interrupted = True
        super().on_exception(exception)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        check_optimizer_states(len(checkpoint["optimizer_states"]), len(self.optimizers))
        super().load_optimizer_state_dict(checkpoint)

    @override
    def teardown(self) -> None:
        self.leave_session()
        super().teardown()

    def leave_session(self) -> None:
        """Leave the session, and stop the servers and the coordinator that this process has started.

        Do nothing if no session is open.
        """
        if self.membership is not None:
            present = None if self._collectives is None else self._collectives.present
            SESSIONS.lost = [] if present is None else [rank for rank in range(self.world_size) if rank not in present]
        if self._folder is not None:
            RunAddress.remove(self._folder)
        self._folder = None
        self.unregister()
        if self._has_group:
            close_worker_group()
        self._has_group = False
        for metric, sync, available in self._metrics:
            metric.dist_sync_fn, metric.distributed_available_fn = sync, available
        self._metrics.clear()
        if self._services is not None:
            self._services.stop(at_once=self._interrupted)
        self._services = None

    def unregister(self, done: Mapping[str, object] | None = None) -> None:
        """End this worker's membership. Do nothing if the worker is not a member.

        Args:
            done: This worker's progress. The key ``epoch`` has the number of an epoch, and the key ``processed`` the
                number of batches that the worker has processed in this epoch. The coordinator gives the worker's
                unprocessed batches to other workers. None if the worker reports no progress.
        """
        membership, self.membership, self._collectives = self.membership, None, None
        if membership is not None:
            membership.close(done=done)

    # Collectives among the workers

    @property
    def alone(self) -> bool:
        """Whether collectives do not wait for other workers, but return the result for this worker's own value."""
        return self._alone or self._collectives is None

    @property
    def is_in_batch(self) -> bool:
        """Whether this worker is between the start and the end of a training batch."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        progress = trainer.fit_loop.epoch_loop.batch_progress.current
        return trainer.training and progress.ready > progress.completed

    def gather(self, value: Any, operation: str) -> dict[int, Any]:
        """Send a value to all workers, and return the values of all living workers by rank.

        All workers must call this.

        Args:
            value: The value of this worker.
            operation: Name of the operation, which must be the same on all workers.
        """
        if self._alone or self._collectives is None:
            return {self.global_rank: value}
        return self._collectives.gather(value, operation).values

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self.gather(None, str(args[0]) if args and args[0] else "barrier")

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send an object from rank `src` to all ranks, and return it. All ranks must call this.

        Objects are not pickled: only the types that :mod:`cnnstrategies.codec` encodes can be sent.
        """
        return obj if self._alone or self._collectives is None else self._collectives.broadcast(obj, src)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: ReduceOp | str | None = "mean") -> Any:
        """Return the mean, or another reduction, of a tensor over all living workers. All workers must call this.

        A value that is not a tensor is returned unchanged. The mean of integers is of dtype float64.
        """
        if not isinstance(tensor, Tensor) or self._alone or self._collectives is None:
            return tensor
        name = str(reduce_op or "sum").lower().removeprefix("redoptype.").replace("avg", "mean")
        if name not in REDUCTIONS:
            raise ConfigurationError(f"reduce_op={reduce_op!r}: use one of {', '.join(REDUCTIONS)}, avg")
        return self._collectives.reduce(widened(tensor, name), name)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of all living workers, stacked along a new first dimension. All workers must call this.

        With `sync_grads`, backward passes the gradients of all workers to the worker of each tensor. All workers must
        be alive then.
        """
        if sync_grads:
            return super().all_gather(tensor, group, sync_grads)
        values = self.gather(tensor, "all_gather")
        return torch.stack([values[rank] for rank in sorted(values)]).to(tensor.device)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Combine the decisions of all workers into one decision, and return it. All workers must call this.

        Args:
            decision: The decision of this worker.
            all: Whether the result is True only if all workers have decided True. Otherwise one worker is enough.
        """
        decisions = self.gather(bool(decision), "decision").values()
        return bool(min(decisions) if all else max(decisions))

    # Metrics of the module

    def share_metrics(self, module: nn.Module) -> None:
        """Make the module's metrics combine their states over all workers. This lasts until the session ends."""
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
