"""`strategy: parameter_server`: workers with a full replica each, servers that hold parameters and optimizer."""

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, Self

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.client import Worker
from cnnstrategies.paramserver.collectives import Collectives
from cnnstrategies.paramserver.counters import Counters
from cnnstrategies.paramserver.dispatch import Chunk
from cnnstrategies.paramserver.membership import Membership
from cnnstrategies.paramserver.security import KeyPair
from cnnstrategies.paramserver.services import SPECIFICATION, load_keys
from cnnstrategies.paramserver.specification import Compression, Mode, PullCompression, Specification
from cnnstrategies.paramserver.supervision import Supervision
from cnnstrategies.paramserver.view import RunEnded
from cnnstrategies.strategies.parameter_server_launcher import WatchingProcessLauncher, WatchingScriptLauncher
from cnnstrategies.strategies.parameter_server_loader import DispatchedLoader
from cnnstrategies.strategies.parameter_server_options import (
    Dispatch,
    Options,
    Security,
    check_module,
    check_optimizers,
)
from cnnstrategies.strategies.parameter_server_run import (
    Layout,
    Place,
    choose_place,
    open_supervision,
    worker_address,
)
from cnnstrategies.strategies.parameter_server_state import restore_trainer, trainer_state
from cnnstrategies.strategies.parameter_server_step import Stepper

REDUCTIONS = {"sum": "sum", "mean": "mean", "avg": "mean", "max": "max", "min": "min", "product": "product"}


class ParameterServerStrategy(DDPStrategy):
    """Data parallel through servers that hold the parameters, each a part, and make the optimizer's steps.

    Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014. Gradients are pushed while
    backward still runs, and a layer's forward waits for its own parameters only. There is no torch process group:
    a worker that dies is left out, and one that is started again joins at the next epoch.

    BatchNorm's running statistics are those of each worker's batches; before each validation, test and checkpoint
    they are averaged over the workers.

    Args:
        mode: ``sync`` makes one step on the mean gradient of all workers, as DDP does. ``async`` applies each gradient
            as it comes. ``ssp`` does too, but no worker runs more than ``staleness`` steps ahead of the slowest (Ho et
            al., NeurIPS 2013). ``local`` averages the weights of independent workers every ``sync_every`` steps.
        staleness: For ssp; 0 is sync.
        sync_every: For local: optimizer steps between two averages.
        servers: Server processes that each node starts.
        endpoints: Addresses of dedicated servers, started with ``cnnstrategies-server``, instead.
        coordinator: ``tcp://address:port`` on the machine of rank 0; by default a socket in a private directory on one
            machine, else Lightning's main address and port.
        compression: Of pushed gradients: ``none``, ``fp16``, ``bf16``, or with error feedback ``topk`` and ``onebit``.
        compression_ratio: Share of the elements that ``topk`` sends.
        pull_compression: Of pulled parameters: ``none``, ``fp16`` or ``bf16``. Forward and backward then use rounded
            weights; those of the servers keep their precision, and validation and checkpoints have them.
        delay_compensation: The factor of DC-ASGD (Zheng et al., ICML 2017) for async and ssp; 0 turns it off.
        replication: Servers that hold each part; with 2, one server can be lost without losing an update.
        snapshot_every: Updates between two snapshots of a server, from which it starts again; 0 for none.
        snapshot_directory: Where they are written.
        data_dispatch: ``static`` divides each epoch as DDP does. ``dynamic``, for async and ssp, gives batches to
            whoever asks, so faster workers take more and a dead worker's batches are given out again.
        security: ``curve`` encrypts and authenticates, ``none`` does not; ``auto`` does where other machines are
            reached, and needs ``key_file`` there.
        key_file: The run's keys, the same on every machine.
        heartbeat: Seconds between two signs of life of a process.
        timeout: Seconds without one after which a process counts as dead.
        max_restarts: How often each process may be started again after it was killed. Without restarts a run goes on
            without a dead worker, but not without rank 0, which writes checkpoints and logs.
        **kwargs: Those of :class:`~lightning.pytorch.strategies.DDPStrategy` for devices.

    Raises:
        ConfigurationError: The arguments contradict each other. What depends on the module is checked before
            processes are started.
    """

    finds_hosts = True  # Its coordinator knows who is there.

    def __init__(
        self,
        mode: Mode = "sync",
        staleness: int = 0,
        sync_every: int = 1,
        servers: int = 1,
        endpoints: list[str] | None = None,
        coordinator: str | None = None,
        compression: Compression = "none",
        compression_ratio: float = 0.01,
        pull_compression: PullCompression = "none",
        delay_compensation: float = 0.0,
        replication: int = 1,
        snapshot_every: int = 0,
        snapshot_directory: str | None = None,
        data_dispatch: Dispatch = "static",
        security: Security = "auto",
        key_file: str | None = None,
        heartbeat: float = 0.5,
        timeout: float = 10.0,
        max_restarts: int = 0,
        start_method: Literal["popen", "spawn", "fork"] = "popen",
        **kwargs: Any,
    ) -> None:
        super().__init__(start_method=start_method, timeout=timedelta(seconds=timeout), **kwargs)
        self.options = Options(
            mode,
            staleness,
            sync_every,
            servers,
            tuple(endpoints or ()),
            coordinator,
            compression,
            compression_ratio,
            pull_compression,
            delay_compensation,
            replication,
            snapshot_every,
            snapshot_directory,
            data_dispatch,
            security,
            key_file,
            heartbeat,
            timeout,
            max_restarts,
        )
        self._start = start_method
        self._checked: LightningModule | None = None
        self._membership: Membership | None = None
        self._collectives: Collectives | None = None
        self._services: Supervision | None = None
        self._place: Place | None = None
        self._keys: KeyPair | None = None
        self._worker: Worker | None = None
        self._stepper: Stepper | None = None
        self._trainer: Trainer | None = None
        self._admitted = False
        self._alone = False
        self._has_left = False
        self._seen = self._processed = 0
        self._buffers_are_equal = True
        self._metrics: list[tuple[Metric, Any, Any]] = []

    # Before the processes start

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self._start == "popen":
            self._launcher = WatchingScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes, self.options, self._layout
            )
        else:
            self._launcher = WatchingProcessLauncher(self, self._start, self.options, self._layout)

    def _layout(self) -> Layout:
        environment = self.cluster_environment
        assert environment is not None
        address, port = environment.main_address, environment.main_port
        return Layout(self.num_nodes, self.node_rank, self.num_processes, address, port)

    @property
    @override
    def launcher(self) -> Any:
        """The launcher. It is asked for right before processes are started: the last place for checks."""
        module = self.lightning_module
        if module is not None and module is not self._checked:
            check_module(module)
            if self._layer_sync is not None:
                raise ConfigurationError(
                    "sync_batchnorm=True: workers run independently of each other and exchange no statistics in a "
                    "step; set trainer.sync_batchnorm to false"
                )
            self._checked = module
        return super().launcher

    # Joining the run

    @override
    def setup_distributed(self) -> None:
        """Register with the coordinator; there is no torch process group."""
        reset_seed()
        self.set_world_ranks()
        if self._membership is not None:
            return
        assert self.lightning_module is not None
        place = Place.published()
        if place is None:
            place = choose_place(self.options, self._layout(), supervised=False)
            if self.local_rank == 0:
                training = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
                self._services = open_supervision(self.options, self._layout(), place, training, "program")
        self._place = place
        run_keys = load_keys(place.key_file)
        self._keys = None if run_keys is None else KeyPair.create()
        address = worker_address(self.options, place, self.global_rank)
        public = "" if self._keys is None else self._keys.public
        self._membership = Membership(address, public_key=public, keys=run_keys)
        self._collectives = Collectives(self._membership, run_keys)

    @property
    def _run(self) -> Collectives:
        assert self._collectives is not None, "the strategy has been set up"
        return self._collectives

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        self._trainer = trainer
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        self.model_to_device()
        self._take_state_of_rank_zero()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            check_optimizers(self.optimizers)
        self.setup_precision_plugin()
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise ConfigurationError(
                "precision 16-mixed scales the loss by a factor that workers would have to agree on in each step: with "
                "strategy parameter_server use bf16-mixed"
            )
        if trainer.state.fn == TrainerFn.FITTING:
            self._clip_elsewhere()
        self._share_metrics(self.lightning_module)

    def _take_state_of_rank_zero(self) -> None:
        """Start from rank 0's parameters and buffers on every rank."""
        assert self.lightning_module is not None
        state = (*self.lightning_module.parameters(), *self.lightning_module.buffers())
        values = self.broadcast([tensor.detach() for tensor in state] if self.global_rank == 0 else [])
        with torch.no_grad():
            for tensor, value in zip(state, values, strict=True):
                tensor.copy_(value)

    def _share_metrics(self, module: nn.Module) -> None:
        for metric in module.modules():
            if isinstance(metric, Metric):
                self._metrics.append((metric, metric.dist_sync_fn, metric.distributed_available_fn))
                metric.dist_sync_fn = self._gather_metric
                metric.distributed_available_fn = self._is_shared

    def _gather_metric(self, state: Tensor, group: Any = None) -> list[Tensor]:
        values = self._gather(state, "metric")
        return [values[rank].to(state.device) for rank in sorted(values)]

    def _is_shared(self) -> bool:
        return self.world_size > 1

    def __deepcopy__(self, memo: Any) -> Self:
        """This strategy itself: weight averaging copies the module with its trainer, but the run stays one."""
        return self

    # Data

    @override
    def process_dataloader(self, dataloader: object) -> object:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if self.options.data_dispatch == "static" or not trainer.training or trainer.train_dataloader is not None:
            return dataloader
        if trainer.val_check_interval != 1.0:
            raise ConfigurationError(
                f"val_check_interval={trainer.val_check_interval}: with data_dispatch: dynamic workers make different "
                "numbers of steps, so they validate at the end of an epoch; use 1.0, or data_dispatch: static"
            )
        return DispatchedLoader(dataloader, lambda: trainer.current_epoch, self._begin_epoch, self._take_batch)

    def _begin_epoch(self, epoch: int, batches: int) -> None:
        if batches < self.world_size:
            raise ConfigurationError(
                f"an epoch has {batches} batches for {self.world_size} workers: lower batch_size so that each gets one"
            )
        self._seen = self._processed = 0
        self._run.begin_epoch(epoch, batches, 1)

    def _take_batch(self, epoch: int) -> Chunk:
        return self._run.take(epoch, self._processed)

    # Training

    @override
    def on_train_start(self) -> None:
        """Meet the servers; a worker that was started again waits here until the others let it in."""
        trainer, optimizer, membership = self._trainer, self.optimizers[0], self._membership
        assert trainer is not None
        assert membership is not None
        assert self._place is not None
        assert isinstance(self.lightning_module, LightningModule)
        if self.global_rank == 0:
            module, nodes, clipping = self.lightning_module, self.num_nodes, self._clipping(trainer)
            whole = self.options.specification(module, optimizer, nodes, self.world_size, **clipping)
            self._run.put(SPECIFICATION, [whole.to_json().encode()])
        (text,) = self._run.get(SPECIFICATION)
        specification = Specification.from_json(bytes(text).decode())
        named = dict(self.lightning_module.named_parameters())
        parameters = [named[info.name].data for info in specification.parameters]
        # From here on the servers know this worker, and admit its keys.
        started = self._run.start()
        address = membership.address
        worker = Worker(
            specification,
            parameters,
            membership.source(),
            address.id,
            address.incarnation,
            self._keys,
            self._place.insecure,
        )
        if started.joined:
            state = started.values[started.leader]
            restore_trainer(trainer, optimizer, state)
            notice = f"Rank {self.global_rank} was started again and goes on in epoch {state['epoch']}"
            print(notice, file=sys.stderr, flush=True)
        elif self.global_rank == 0:
            served = optimizer.state and self.options.mode != "local"
            worker.initialise(optimizer.state_dict() if served else None)
        self._admitted = started.joined
        worker.join()
        if started.joined:
            self._run.barrier("admitted")
        if self.options.mode != "local":
            optimizer.state.clear()  # It is the servers' now.
        self._worker = worker
        self._stepper = Stepper(
            self.lightning_module,
            worker,
            specification,
            optimizer,
            eager=any(isinstance(callback, WeightAveraging) for callback in trainer.callbacks),  # type: ignore[attr-defined]
            local_every=self.options.sync_every if self.options.mode == "local" else 0,
        )

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """At an epoch's first batch, let in the workers that were started again."""
        assert self._trainer is not None
        if batch_idx > 0 or self._stepper is None:
            return
        if self._admitted:
            self._admitted = False  # It came in at this very boundary.
            return
        self._stepper.worker.wait_all()
        if self._run.boundary(trainer_state(self._trainer, self.optimizers[0])).admitted:
            self._run.barrier("admitted")  # Until those that came in have the parameters and their step.
        if self._has_left:
            self._stepper.worker.join()
            self._has_left = False

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._stepper is not None:
            self._stepper.samples += extract_batch_size(args[0] if args else next(iter(kwargs.values())))
        self._buffers_are_equal = False
        self._seen += 1
        return super().training_step(*args, **kwargs)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        if self._stepper is not None:
            self._stepper.before_backward()

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """While gradients accumulate, nothing is sent."""
        assert self._stepper is not None
        self._stepper.accumulating = True
        try:
            yield
        finally:
            self._stepper.accumulating = False

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the closure in the optimizer's step, which finds no gradients: the servers make the step."""
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        assert self._stepper is not None
        assert self._trainer is not None
        self._stepper.after_step()
        self._processed = self._seen
        if self.options.mode == "ssp" and self._trainer.is_last_batch:
            # Nobody shall wait for a worker that has no more batches in this epoch.
            self._stepper.worker.leave()
            self._has_left = True
        return output

    def _clipping(self, trainer: Trainer) -> dict[str, float]:
        value = trainer.gradient_clip_val
        if not value or self.options.mode == "local":
            return {}
        by_value = trainer.gradient_clip_algorithm == "value"
        return {"clip_value" if by_value else "clip_norm": float(value)}

    def _clip_elsewhere(self) -> None:
        """The servers clip, by the norm of the whole gradient; in mode ``local`` the worker does."""
        if self.options.mode != "local":
            plugin: Any = self.precision_plugin
            plugin.clip_grad_by_norm = plugin.clip_grad_by_value = _leave_alone

    # Weights and buffers at rest

    def _settle(self) -> None:
        """Have the servers' parameters, and the workers' mean of the buffers; a collective when training."""
        if self._stepper is None:
            return
        worker = self._stepper.worker
        if self.options.mode == "local":
            self._stepper.average()
        worker.wait_all()
        self._average_buffers()
        if self.options.mode in ("async", "ssp") or self.options.pull_compression != "none":
            self.barrier("refresh")
            worker.refresh()

    def _average_buffers(self) -> None:
        assert self.lightning_module is not None
        metrics = {id(b) for m in self.lightning_module.modules() if isinstance(m, Metric) for b in m.buffers()}
        buffers = [buffer for buffer in self.lightning_module.buffers() if id(buffer) not in metrics]
        if self._buffers_are_equal or not buffers or self.world_size == 1:
            return
        values = self._gather(buffers, "buffers")
        with torch.no_grad():
            for index, buffer in enumerate(buffers):
                stacked = torch.stack([values[rank][index] for rank in sorted(values)])
                buffer.copy_(stacked.mean(0) if buffer.is_floating_point() else stacked.amax(0))
        self._buffers_are_equal = True

    @override
    def on_validation_start(self) -> None:
        self._settle()

    @override
    def on_train_end(self) -> None:
        self._settle()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state; called on every rank."""
        self._settle()
        return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """On rank 0 the servers' optimizer state, as one process would save it; called on every rank."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        if self._worker is None or self.options.mode == "local":
            return optimizer.state_dict()
        self.barrier("optimizer state")
        state = optimizer.state_dict()
        if self.global_rank == 0:
            state["state"] = self._worker.optimizer_state()["state"]
        self.barrier("optimizer state")
        return state

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self._worker is None, "the servers get it in on_train_start"
        super().load_optimizer_state_dict(checkpoint)

    @property
    def counters(self) -> Counters | None:
        """What this worker has sent, received and waited; None when it does not train."""
        return None if self._worker is None else self._worker.counters

    # Stopping

    @property
    def steps_together(self) -> bool:
        """Whether all workers make the same steps at the same time."""
        return self.options.mode in ("sync", "local") or (self.options.mode == "ssp" and not self.options.staleness)

    def stop_signal(self, received: int | None) -> int | None:
        """Agree on a stop without waiting for each other; from then on this worker acts alone.

        Args:
            received: The signal that this rank has received, if any.

        Returns:
            The signal that some rank has received.
        """
        assert self._membership is not None
        if received is not None:
            self._membership.announce("stop", received)
        signum = received if received is not None else self._membership.announced("stop")
        self._alone = signum is not None
        return signum

    # Collectives

    def _gather(self, value: Any, operation: str) -> dict[int, Any]:
        """The values of all workers, by rank."""
        if self._alone or self._collectives is None:
            return {self.global_rank: value}
        return self._collectives.gather(value, operation).values

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self._gather(None, str(args[0]) if args and args[0] else "barrier")

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of one rank, on all; nothing is pickled."""
        return obj if self._alone or self._collectives is None else self._run.broadcast(obj, src)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: ReduceOp | str | None = "mean") -> Any:
        """Combine a tensor over the workers that are there."""
        if not isinstance(tensor, Tensor) or self._alone or self._collectives is None:
            return tensor
        name = str(reduce_op or "sum").lower().removeprefix("redoptype.")
        if name not in REDUCTIONS:
            raise ConfigurationError(f"reduce_op={reduce_op!r}: accepted are {', '.join(REDUCTIONS)}")
        return self._run.reduce(tensor, REDUCTIONS[name])

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The tensors of all workers that are there, stacked along a new first dimension."""
        if sync_grads:
            raise ConfigurationError("all_gather(sync_grads=True): workers exchange no gradients of activations")
        values = self._gather(tensor, "all_gather")
        return torch.stack([values[rank] for rank in sorted(values)]).to(tensor.device)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all workers, or any, have decided so."""
        decisions = self._gather(bool(decision), "decision").values()
        return bool(min(decisions) if all else max(decisions))

    # The end

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._membership is not None and isinstance(exception, Exception) and not isinstance(exception, RunEnded):
            reason = f"{type(exception).__name__}: {exception}"
            self._membership.end(f"worker {self.global_rank} failed: {reason}")
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self.leave_run()
        super().teardown()

    def leave_run(self) -> None:
        """Leave the servers and the coordinator; a second time does nothing."""
        for metric, sync, available in self._metrics:
            metric.dist_sync_fn, metric.distributed_available_fn = sync, available
        self._metrics.clear()
        if self._stepper is not None:
            self._stepper.close()
        if self._worker is not None:
            self._worker.close()
        if self._collectives is not None:
            self._collectives.close()
        if self._membership is not None:
            self._membership.close()
        if self._services is not None:
            self._services.stop()
        self._stepper = self._worker = self._collectives = self._membership = self._services = None


def _leave_alone(*args: Any, **kwargs: Any) -> None:
    """Clip nothing."""
