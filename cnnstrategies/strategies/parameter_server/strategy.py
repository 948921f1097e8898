"""`strategy: parameter_server`: workers with a full replica each, servers that hold parameters and optimizer."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from cnnstrategies.data.sampling import dealt
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.samples import count_samples
from cnnstrategies.old_names import refuse_old_names
from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.combiner.worker import CombinedWorker
from cnnstrategies.paramserver.specification import Mode, PullCompression, PushCompression, Specification
from cnnstrategies.paramserver.worker.connections import Counters
from cnnstrategies.quantities import Duration, seconds
from cnnstrategies.shares import Deals
from cnnstrategies.strategies.dealing import Dealing
from cnnstrategies.strategies.observer_hooks import HookContexts, gradient_observers, weight_observers
from cnnstrategies.strategies.parameter_server.base import CoordinatedStrategy
from cnnstrategies.strategies.parameter_server.checks import check_module, check_optimizers, watch_gradients
from cnnstrategies.strategies.parameter_server.loader import BatchDispatch
from cnnstrategies.strategies.parameter_server.options import (
    Dispatch,
    ParameterServerOptions,
    Security,
    usual_staleness,
    usual_sync_every,
)
from cnnstrategies.strategies.parameter_server.start import (
    average_buffers,
    meet_servers,
    take_state_of_rank_zero,
    trainer_state,
)
from cnnstrategies.strategies.parameter_server.step import Stepper
from cnnstrategies.strategies.protocol import StepKind

OUTER_STATE = "outer_optimizer_state"  # in a checkpoint
CLIPPING = ("clip_grad_by_norm", "clip_grad_by_value")  # of a precision plugin


class ParameterServerStrategy(CoordinatedStrategy):
    """Data parallel through servers that hold the parameters, each a part, and make the optimizer's steps.

    Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014. Gradients are pushed while
    backward still runs, and a layer's forward waits for its own parameters only. There is no torch process group:
    a worker that dies is left out, and one that is started again joins at the next epoch.

    BatchNorm's running statistics are those of each worker's batches; before each validation, test and checkpoint
    they are averaged over the workers.

    Args:
        mode: ``sync`` makes one step on the mean gradient of all workers, as DDP does. ``async`` applies each gradient
            as it comes. ``ssp`` does too, but no worker runs more than ``staleness`` steps ahead of the slowest (Ho et
            al., NeurIPS 2013). In ``local`` workers are independent for ``sync_every`` steps of their own optimizer;
            then the servers make an outer step on the mean of the differences (DiLoCo, Douillard et al. 2023).
        staleness: For ssp: steps that a worker may be ahead of the slowest one, 4 by default; 0 is sync.
        sync_every: For local: optimizer steps between two outer steps, 8 by default.
        outer_lr: For local: learning rate of the outer step, which is SGD's. 1 without momentum averages the weights
            (local SGD); DiLoCo's are 0.7 and 0.9.
        outer_momentum: For local: Nesterov momentum of the outer step.
        servers_per_node: Server processes that each node starts.
        endpoints: Addresses of dedicated servers, started with ``cnnstrategies-server``, instead. With them each slice
            of a step in ``sync`` is made for itself, so that values come back while gradients leave.
        coordinator: ``tcp://address:port`` on the machine of rank 0; by default a socket in a private directory on one
            machine, else Lightning's main address and port.
        compression: Of pushed gradients: ``none``, ``fp16``, ``bf16``, or with error feedback ``topk`` and ``onebit``.
            ``auto`` uses the one of ``none``, ``bf16`` and ``onebit`` with which steps take the least time, as
            measured while it trains.
        topk_density: Share of the elements that ``topk`` sends.
        pull_compression: Of pulled parameters: ``none``, ``fp16`` or ``bf16``. Forward and backward then use rounded
            weights; those of the servers keep their precision, and validation and checkpoints have them. For ``sync``
            and ``local`` also ``topk`` and ``onebit``: of what each step changes, with error feedback (DoubleSqueeze,
            Tang et al., ICML 2019). ``auto`` chooses, as above, between ``none``, ``fp16`` and, where all workers
            have each step in common, ``onebit``.
        replication: Servers that hold each part; with 2, one server can be lost without losing an update.
        data_dispatch: ``static`` divides each epoch as DDP does. ``dynamic``, for async and ssp, gives batches to
            whoever asks, so faster workers take more and a dead worker's batches are given out again.
        security: ``curve`` encrypts and authenticates, ``none`` does not; ``auto`` does wherever TCP is used, and needs
            ``key_file`` where other machines are reached.
        key_file: The run's keys, the same on every machine.
        timeout: Seconds, or ``minutes:seconds``, without a heartbeat or without an answer after which a
            process counts as dead.
        max_restarts: How often each process may be started again after it was killed, in the first trainer function
            of a script. Without restarts a run goes on without a dead worker, but not without rank 0, which writes
            checkpoints and logs.
        max_joiners: How many workers may join and leave while it trains, with ``cnnstrategies join``. For async and
            ssp, with ``data_dispatch: dynamic``.
        combine_per_node: For sync: the workers of a node add their gradients up in memory that they share, and one of
            them pushes and pulls for all, so that the node's link carries one worker's bytes. If it dies another takes
            its place.
        shares: For sync: each worker's part of a global batch in proportion to the others', such as ``[3, 1]``, or
            ``auto``: equal at first, then by each worker's own time, as under ``ddp_balanced``.
        initial_shares: The shares with which ``auto`` begins, as ``plan`` writes them.
        **kwargs: Those of :class:`~lightning.pytorch.strategies.DDPStrategy` for devices.

    Raises:
        ConfigurationError: The arguments contradict each other. What depends on the module is checked before
            processes are started.
    """

    step_kind: StepKind = "worker"
    joined_late = False

    def __init__(
        self,
        mode: Mode = "sync",
        staleness: int | None = None,
        sync_every: int | None = None,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        servers_per_node: int = 1,
        endpoints: list[str] | None = None,
        coordinator: str | None = None,
        compression: PushCompression = "none",
        topk_density: float = 0.01,
        pull_compression: PullCompression = "none",
        replication: int = 1,
        data_dispatch: Dispatch = "static",
        security: Security = "auto",
        key_file: str | None = None,
        timeout: Duration = 10.0,
        max_restarts: int = 0,
        max_joiners: int = 0,
        combine_per_node: bool = False,
        shares: Literal["auto", "equal"] | list[float] = "equal",
        initial_shares: Literal["equal"] | list[float] = "equal",
        start_method: Literal["popen", "spawn", "fork"] = "popen",
        **kwargs: Any,
    ) -> None:
        refuse_old_names(ParameterServerStrategy, kwargs)
        given = {
            **locals(),
            "endpoints": tuple(endpoints or ()),
            "timeout": seconds(timeout, "timeout"),
            "staleness": usual_staleness(mode) if staleness is None else staleness,
            "sync_every": usual_sync_every(mode) if sync_every is None else sync_every,
        }
        options = ParameterServerOptions(**{field.name: given[field.name] for field in fields(ParameterServerOptions)})
        super().__init__(options=options, start_method=start_method, **kwargs)
        self._stepper: Stepper | None = None
        self._dealing = Dealing(self, shares, initial=initial_shares)
        self._dispatch = BatchDispatch(self)
        self._has_left = False
        self._buffers_are_equal = True
        self._outer_state: dict[str, Any] | None = None
        self._watch: HookContexts | None = None

    def check(self) -> None:
        """Refuse what it cannot train; called before processes are started."""
        check_module(self.module, self.options)
        self.options.check_nodes(self.num_nodes)
        self._dealing.check()
        if self._layer_sync is not None:
            raise ConfigurationError(
                "sync_batchnorm=True: workers run independently of each other and exchange no statistics in a step; "
                "set trainer.sync_batchnorm to false"
            )

    # Joining the run

    @property
    def module(self) -> LightningModule:
        """What is trained."""
        assert isinstance(self.lightning_module, LightningModule)
        return self.lightning_module

    @property
    def trainer(self) -> Trainer:
        """Whose."""
        return self.module.trainer

    @property
    def callbacks(self) -> list[Callback]:
        """The trainer's."""
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        return callbacks

    @override
    def setup_distributed(self) -> None:
        super().setup_distributed()
        self._dealing.begin(lambda: self._gather_times, self._waited)

    def _gather_times(self, row: list[float]) -> list[list[float]]:
        return list(self.gather(row, "times").values())

    def _waited(self) -> float:
        return 0.0 if self.traffic is None else self.traffic.seconds_waited

    @override
    def open_session(self) -> None:
        super().open_session()
        self.joined_late = self._has_left = False
        self._buffers_are_equal = True

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.module)
        self.model_to_device()
        take_state_of_rank_zero(self.module, self)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            self._outer_state = None
            self._dispatch.has_loader = False
            check_optimizers(self.optimizers, self.options)
        self.setup_precision_plugin()
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise ConfigurationError(
                "precision 16-mixed scales the loss by a factor that workers would have to agree on in each step: with "
                "strategy parameter_server use bf16-mixed"
            )
        if trainer.state.fn == TrainerFn.FITTING and self.options.mode != "local":
            for name in CLIPPING:  # The servers clip, by the norm of the whole gradient.
                setattr(self.precision_plugin, name, _leave_alone)
        self.share_metrics(self.module)

    # Data

    @property
    @override
    def batch_shares(self) -> Deals:
        return self._dealing.deals

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if self.options.shares != "equal":
            return self._dealing.loader(dataloader)
        if self.options.data_dispatch == "static" or not self.trainer.training:
            return dataloader
        return self._dispatch.loader(dataloader, self.trainer)

    # Training

    @override
    def on_train_start(self) -> None:
        """Meet the servers; a worker that was started again waits here until the others let it in."""
        self.leave_address(self.trainer)
        worker, specification, own_steps = meet_servers(self, self.module, self.optimizers[0], self._outer_state)
        if self.options.mode == "sync" and self.world_size > 1:
            self._watch = watch_gradients(self.module, self.callbacks)
        self.joined_late = own_steps is not None
        self.collectives.membership.report_figures(lambda: self._figures(worker))
        self._stepper = self._stepper_of(worker, specification, own_steps or 0)

    def _stepper_of(self, worker: Worker | CombinedWorker, specification: Specification, own_steps: int) -> Stepper:
        """What connects the module's training to a worker."""
        local = self.options.mode == "local"  # There weights are the worker's own, and only an average looks at all.
        average = ["an average of the weights"] * self._averages_weights
        return Stepper(
            self.module,
            worker,
            specification,
            self.optimizers[0],
            early=not gradient_observers(self.module, self.callbacks),
            sees_weights=average if local else weight_observers(self.module, self.callbacks),
            sync_every=self.options.sync_every if local else 0,
            own_steps=own_steps,
        )

    def _figures(self, worker: Worker | CombinedWorker) -> dict[str, float]:
        """What this worker says of itself; called in another thread."""
        figures = worker.counters.figures()
        if self._stepper is not None and self.options.waits_for_pushes and not self._has_left:
            pushed = self._stepper.begun
            figures |= {"pushed": pushed, "needs": max(0, pushed - self.options.staleness)}
        return figures

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """At an epoch's first batch, let in the workers that were started again."""
        if batch_idx > 0 or self._stepper is None:
            return
        if self.joined_late:
            self.joined_late = False  # At this very boundary.
            return
        self._stepper.worker.interrupt()
        self._stepper.worker.wait_all()
        state = trainer_state(self.trainer, self.optimizers[0], self._stepper.own_steps)
        if self.collectives.boundary(state).admitted:
            self.collectives.barrier("admitted")  # Until those that came in have the parameters and their step.
        if self._has_left:
            self._stepper.worker.join()
            self._stepper.note_values()
            self._has_left = False

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._stepper is not None
        if self._stepper.leaves_out():
            return torch.zeros((), device=self.root_device, requires_grad=True)  # No parameter has a gradient of it.
        self._stepper.count(self._samples_in(args[0] if args else next(iter(kwargs.values()))))
        self._buffers_are_equal = False
        self._dispatch.seen += 1
        if self._dealing.stopwatch is not None:
            self._dealing.stopwatch.begin()
        with self._stepper.forward():
            return super().training_step(*args, **kwargs)

    def _samples_in(self, batch: Any) -> int:
        sampler = dealt(self.trainer) if self.options.aggregates else None
        if sampler is not None and not sampler.counts(self.trainer.fit_loop.batch_idx)[sampler.rank]:
            return 0  # It repeats another rank's, so that all have as many batches.
        return max(1, count_samples(batch))

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        if self._stepper is not None:
            self._stepper.before_backward()

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        if self._dealing.stopwatch is not None:
            self._dealing.stopwatch.end()

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
        self._stepper.after_step(self.trainer.is_last_batch)
        self._dispatch.processed = self._dispatch.seen  # What has left need not be done by another if this worker dies.
        if self.options.mode == "ssp" and self.trainer.is_last_batch:
            # Nobody shall wait for a worker that has no more batches in this epoch.
            worker = self._stepper.worker
            assert not isinstance(worker, CombinedWorker), "in mode ssp each pushes for itself"
            worker.leave()
            self._has_left = True
        return output

    # Weights and buffers at rest

    def _settle(self, refresh: bool = True) -> None:
        """Have the servers' parameters, and the workers' mean of the buffers; a collective when training."""
        if self._stepper is None:
            return
        worker = self._stepper.worker
        worker.interrupt()
        if self.options.mode == "local":
            self._stepper.outer_step()
            worker.interrupt()  # It came early.
        worker.wait_all()
        self._dispatch.processed = self._dispatch.seen
        if not self._buffers_are_equal:
            average_buffers(self.module, self)
            self._buffers_are_equal = True
        if refresh and (self.options.mode in ("async", "ssp") or self.options.pull_compression != "none"):
            self.barrier("refresh")
            worker.refresh()
        self._stepper.note_values()

    @override
    def on_validation_start(self) -> None:
        self._settle()

    @override
    def on_validation_end(self) -> None:
        if self._stepper is not None:
            self._stepper.note_values()  # A callback may have had others in their place meanwhile.

    @property
    def _averages_weights(self) -> bool:
        """Whether a callback reads all weights after each step, and puts their average in their place at the end."""
        return any(isinstance(callback, WeightAveraging) for callback in self.callbacks)

    @override
    def on_train_end(self) -> None:
        """Leave the servers with what they have: from here on the weights and rank 0's optimizer are the run's."""
        self._settle(refresh=not self._averages_weights)
        if self._averages_weights:
            take_state_of_rank_zero(self.module, self)  # Each rank averaged what it has seen.
        if self.options.mode == "local":
            self._outer_state = self._servers_state()
        else:
            state = self.optimizer_state(self.optimizers[0])
            if self.global_rank == 0:
                self.optimizers[0].load_state_dict(state)
        self._leave_servers()

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
        if self._stepper is None or self.options.mode == "local":
            return optimizer.state_dict()
        state = optimizer.state_dict()
        served = self._servers_state()
        if served is not None:
            state["state"] = served["state"]
        return state

    def _servers_state(self) -> dict[str, Any] | None:
        """On rank 0 the state of the servers' optimizer; called on every rank."""
        assert self._stepper is not None
        self.barrier("optimizer state")
        state = self._stepper.worker.optimizer_state() if self.global_rank == 0 else None
        self.barrier("optimizer state")
        return state

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """In mode ``local`` with the outer optimizer's state; called on every rank."""
        if self.options.mode == "local" and "optimizer_states" in checkpoint:
            checkpoint[OUTER_STATE] = self._outer_state if self._stepper is None else self._servers_state()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self._outer_state = checkpoint.get(OUTER_STATE)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights, which the servers of the next training get, with the optimizer's state, when it starts."""
        if self._stepper is not None:
            raise ConfigurationError(
                "weights were loaded in the middle of training, which the servers go on with as they have them: save "
                "a checkpoint, and give it to a new fit as ckpt_path"
            )
        super().load_model_state_dict(checkpoint, strict)

    @property
    @override
    def traffic(self) -> Counters | None:
        """Bytes, steps and waiting time of this worker; None unless it trains."""
        return None if self._stepper is None else self._stepper.worker.counters

    @property
    @override
    def may_skip_steps(self) -> bool:
        """Whether the other nodes may make a step without this worker's node, which then goes on with their step."""
        return self.options.combines(self.num_processes)

    @property
    @override
    def steps_in_lockstep(self) -> bool:
        return self.options.aggregates

    @override
    def panel_rows(self, batch_size: int | None) -> list[tuple[str, str]]:
        """Return the rows about mode and servers; none unless the run trains."""
        if self.trainer.state.fn != TrainerFn.FITTING:
            return []
        shares = [self._dealing.panel_row()] * (self.options.shares != "equal")
        return self.options.describe(self.num_nodes) + shares

    @override
    def differences(self, batch_size: int | None) -> list[str]:
        sees = gradient_observers(self.module, self.callbacks)
        accumulated = self.trainer.accumulate_grad_batches
        return self.options.differences(self.module, self.world_size, batch_size, accumulated, sees)

    @override
    def leave_session(self) -> None:
        """Leave the servers and the coordinator; a second time does nothing."""
        self._leave_servers()
        super().leave_session()

    @override
    def teardown(self) -> None:
        for name in CLIPPING:
            vars(self.precision_plugin).pop(name, None)  # Another Trainer may be given the same plugin.
        if self._watch is not None:
            self._watch.end()
            self._watch = None
        super().teardown()

    def _leave_servers(self) -> None:
        if self._stepper is not None:
            self._stepper.close()
            self._stepper.worker.close()
        self._stepper = None


def _leave_alone(*args: Any, **kwargs: Any) -> None:
    """Clip nothing."""
