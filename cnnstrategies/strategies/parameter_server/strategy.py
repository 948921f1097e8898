"""`strategy: parameter_server`: workers with a replica each, and servers with the parameters and the optimizer."""

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
    join_servers,
    take_state_of_rank_zero,
    trainer_state,
)
from cnnstrategies.strategies.parameter_server.step import Stepper
from cnnstrategies.strategies.protocol import StepKind

OUTER_STATE = "outer_optimizer_state"  # Key of a checkpoint.
CLIPPING = ("clip_grad_by_norm", "clip_grad_by_value")  # Methods of a precision plugin.


class ParameterServerStrategy(CoordinatedStrategy):
    """Data parallelism through servers that each hold a part of the parameters and make the optimizer's steps.

    Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014. Gradients are pushed while
    backward still runs, and a layer's forward waits only for the layer's own parameters. There is no torch process
    group: the run goes on without a worker that dies, and a restarted worker joins at the next epoch.

    BatchNorm's running statistics come from each worker's own batches. They are averaged over the workers before each
    validation, test and checkpoint.

    Args:
        mode: ``sync`` makes one step on the mean gradient of all workers, as DDP does. ``async`` applies each gradient
            when it arrives. ``ssp`` is like ``async``, but no worker runs more than ``staleness`` steps ahead of the
            slowest (Ho et al., NeurIPS 2013). In ``local`` each worker makes ``sync_every`` steps of its own optimizer;
            then the servers make an outer step on the mean of the workers' changes (DiLoCo, Douillard et al. 2023).
        staleness: For ssp: steps that a worker may be ahead of the slowest one, 4 by default; 0 is sync.
        sync_every: For local: optimizer steps between two outer steps, 8 by default.
        outer_lr: For local: learning rate of the outer step, an SGD step. The value 1 without momentum averages the
            weights (local SGD); DiLoCo uses 0.7 with momentum 0.9.
        outer_momentum: For local: Nesterov momentum of the outer step.
        servers_per_node: Server processes that each node starts.
        endpoints: Addresses of dedicated servers, which are started with ``cnnstrategies-server`` and replace the
            nodes' own servers. With dedicated servers and ``sync``, each slice is updated by itself, so that values
            return while gradients are still being sent.
        coordinator: ``tcp://address:port`` on the machine of rank 0. By default a socket in a private directory on one
            machine, else Lightning's main address and port.
        compression: Compression of pushed gradients: ``none``, ``fp16``, ``bf16``, or, with error feedback, ``topk`` or
            ``onebit``. ``auto`` measures step times during training, and uses the fastest of ``none``, ``bf16`` and
            ``onebit``.
        topk_density: Fraction of the elements that ``topk`` sends.
        pull_compression: Compression of pulled parameters: ``none``, ``fp16`` or ``bf16``. Forward and backward then
            use rounded weights, while the servers, validation and checkpoints keep full precision. ``sync`` and
            ``local`` also accept ``topk`` and ``onebit``, which compress the change of each step with error feedback
            (DoubleSqueeze, Tang et al., ICML 2019). ``auto`` chooses by step times between ``none``, ``fp16`` and, if
            all workers make the same steps, ``onebit``.
        replication: Number of servers that hold each part. With 2, one server can die without the loss of an update.
        data_dispatch: ``static`` divides each epoch as DDP does. ``dynamic``, for async and ssp, gives batches to the
            workers that ask for them: faster workers take more, and a dead worker's batches are given out again.
        security: ``curve`` encrypts and authenticates, ``none`` does not. ``auto`` is ``curve`` for TCP connections and
            ``none`` for the private directory; it needs ``key_file`` if the run has other machines.
        key_file: File with the run's keys, the same on every machine.
        timeout: Time in seconds, or as ``minutes:seconds``, after which a process without a heartbeat or an answer
            counts as dead.
        max_restarts: Number of times that each killed process may be restarted, in the first trainer function of a
            script. Without restarts a run goes on without a dead worker, but not without rank 0, which writes
            checkpoints and logs.
        max_joiners: Number of workers that may join and leave during training, with ``cnnstrategies join``. For async
            and ssp, with ``data_dispatch: dynamic``.
        combine_per_node: For sync: the workers of a node sum their gradients in shared memory, and one of them pushes
            and pulls for all, so that the node's link carries the bytes of one worker. If that worker dies, another
            one takes over.
        shares: For sync: the workers' parts of a global batch as a list of proportions such as ``[3, 1]``, or ``auto``:
            equal at first, then by each worker's measured time, as under ``ddp_balanced``.
        initial_shares: The shares with which ``auto`` begins, as ``plan`` writes them.
        **kwargs: Options of :class:`~lightning.pytorch.strategies.DDPStrategy` about devices.

    Raises:
        ConfigurationError: Options contradict each other. Checks that depend on the module follow before processes
            start.
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
        arguments = {
            **locals(),
            "endpoints": tuple(endpoints or ()),
            "timeout": seconds(timeout, "timeout"),
            "staleness": usual_staleness(mode) if staleness is None else staleness,
            "sync_every": usual_sync_every(mode) if sync_every is None else sync_every,
        }
        options = ParameterServerOptions(
            **{field.name: arguments[field.name] for field in fields(ParameterServerOptions)}
        )
        super().__init__(options=options, start_method=start_method, **kwargs)
        self._stepper: Stepper | None = None
        self._dealing = Dealing(self, shares, initial=initial_shares)
        self._dispatch = BatchDispatch(self)
        self._has_left = False
        self._buffers_are_equal = True
        self._outer_state: dict[str, Any] | None = None
        self._watch: HookContexts | None = None

    def check(self) -> None:
        """Refuse a module or a layout that the servers cannot train; called before processes start."""
        check_module(self.module, self.options)
        self.options.check_nodes(self.num_nodes)
        self._dealing.check()
        if self._layer_sync is not None:
            raise ConfigurationError(
                "sync_batchnorm=True: workers run independently and cannot exchange statistics within a step; set "
                "trainer.sync_batchnorm to false"
            )

    # Joining the run

    @property
    def module(self) -> LightningModule:
        """The module that is trained."""
        assert isinstance(self.lightning_module, LightningModule)
        return self.lightning_module

    @property
    def trainer(self) -> Trainer:
        """The trainer that runs this strategy."""
        return self.module.trainer

    @property
    def callbacks(self) -> list[Callback]:
        """The trainer's callbacks."""
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
                "precision=16-mixed: workers would have to agree on the loss scale in each step; with strategy "
                "parameter_server use bf16-mixed"
            )
        if trainer.state.fn == TrainerFn.FITTING and self.options.mode != "local":
            for name in CLIPPING:  # The servers clip, by the norm of the whole gradient.
                setattr(self.precision_plugin, name, _clip_nothing)
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
        """Connect to the servers; a restarted worker waits here until the run admits it."""
        self.leave_address(self.trainer)
        worker, specification, own_steps = join_servers(self, self.module, self.optimizers[0], self._outer_state)
        if self.options.mode == "sync" and self.world_size > 1:
            self._watch = watch_gradients(self.module, self.callbacks)
        self.joined_late = own_steps is not None
        self.collectives.membership.report_figures(lambda: self._figures(worker))
        self._stepper = self._stepper_of(worker, specification, own_steps or 0)

    def _stepper_of(self, worker: Worker | CombinedWorker, specification: Specification, own_steps: int) -> Stepper:
        """Return the stepper that connects the module's training to a worker."""
        local = self.options.mode == "local"  # Weights are then the worker's own; only an average reads all of them.
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
        """Return this worker's figures for ``watch``; called in another thread."""
        figures = worker.counters.figures()
        if self._stepper is not None and self.options.waits_for_pushes and not self._has_left:
            pushed = self._stepper.begun
            figures |= {"pushed": pushed, "needs": max(0, pushed - self.options.staleness)}
        return figures

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Admit restarted workers at the first batch of an epoch."""
        if batch_idx > 0 or self._stepper is None:
            return
        if self.joined_late:
            self.joined_late = False  # The run admitted this worker at this boundary.
            return
        self._stepper.worker.interrupt()
        self._stepper.worker.wait_all()
        state = trainer_state(self.trainer, self.optimizers[0], self._stepper.own_steps)
        if self.collectives.boundary(state).admitted:
            self.collectives.barrier("admitted")  # Wait until the admitted workers have parameters and step.
        if self._has_left:
            self._stepper.worker.join()
            self._stepper.note_values()
            self._has_left = False

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._stepper is not None
        if self._stepper.leaves_out():
            return torch.zeros((), device=self.root_device, requires_grad=True)  # Gives no parameter a gradient.
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
            return 0  # This batch only repeats samples, so that all ranks have equally many batches.
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
        """Send nothing while gradients accumulate."""
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
        """Run the closure in the optimizer's step, which finds no gradients because the servers make the step."""
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        assert self._stepper is not None
        self._stepper.after_step(self.trainer.is_last_batch)
        # The gradients have been sent: if this worker dies, no other worker must repeat these batches.
        self._dispatch.processed = self._dispatch.seen
        if self.options.mode == "ssp" and self.trainer.is_last_batch:
            # The other workers must not wait for a worker that has no more batches in this epoch.
            worker = self._stepper.worker
            assert not isinstance(worker, CombinedWorker), "in mode ssp each worker pushes for itself"
            worker.leave()
            self._has_left = True
        return output

    # Weights and buffers at rest

    def _settle(self, refresh: bool = True) -> None:
        """Load the servers' parameters and the mean of the workers' buffers; a collective during training."""
        if self._stepper is None:
            return
        worker = self._stepper.worker
        worker.interrupt()
        if self.options.mode == "local":
            self._stepper.outer_step()
            worker.interrupt()  # The time of an early outer step must not count for the choice of compressions.
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
            self._stepper.note_values()  # A callback may have replaced the weights during validation.

    @property
    def _averages_weights(self) -> bool:
        """Whether a callback averages all weights after each step, and writes the average at the end."""
        return any(isinstance(callback, WeightAveraging) for callback in self.callbacks)

    @override
    def on_train_end(self) -> None:
        """Take weights and optimizer state from the servers, and leave them.

        From here on the weights, and the optimizer of rank 0, hold the result of the run.
        """
        self._settle(refresh=not self._averages_weights)
        if self._averages_weights:
            take_state_of_rank_zero(self.module, self)  # Each rank has averaged the weights that it has seen.
        if self.options.mode == "local":
            self._outer_state = self._servers_state()
        else:
            state = self.optimizer_state(self.optimizers[0])
            if self.global_rank == 0:
                self.optimizers[0].load_state_dict(state)
        self._leave_servers()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state; a collective."""
        self._settle()
        return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return on rank 0 the servers' optimizer state, as one process would save it; a collective."""
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
        """Return on rank 0 the state of the servers' optimizer; a collective."""
        assert self._stepper is not None
        self.barrier("optimizer state")
        state = self._stepper.worker.optimizer_state() if self.global_rank == 0 else None
        self.barrier("optimizer state")
        return state

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a checkpoint, in mode ``local`` with the outer optimizer's state; a collective."""
        if self.options.mode == "local" and "optimizer_states" in checkpoint:
            checkpoint[OUTER_STATE] = self._outer_state if self._stepper is None else self._servers_state()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self._outer_state = checkpoint.get(OUTER_STATE)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights. The servers of the next training take them when it starts, with the optimizer's state."""
        if self._stepper is not None:
            raise ConfigurationError(
                "weights were loaded in the middle of training, where the servers would ignore them: save a "
                "checkpoint, and pass it to a new fit as ckpt_path"
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
        """Leave the servers and the coordinator; do nothing if no session is open."""
        self._leave_servers()
        super().leave_session()

    @override
    def teardown(self) -> None:
        for name in CLIPPING:
            vars(self.precision_plugin).pop(name, None)  # Another Trainer may use the same plugin.
        if self._watch is not None:
            self._watch.end()
            self._watch = None
        super().teardown()

    def _leave_servers(self) -> None:
        if self._stepper is not None:
            self._stepper.close()
            self._stepper.worker.close()
        self._stepper = None


def _clip_nothing(*args: Any, **kwargs: Any) -> None:
    """Replace the clipping of a precision plugin, because the servers clip."""
