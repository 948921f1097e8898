"""The strategy ``parameter_server``: workers compute gradients; servers hold the parameters and run the optimizer."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from cnnstrategies._lightning_private import ask_of_sigterm
from cnnstrategies.data.division import Row, is_divided
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.samples import count_samples
from cnnstrategies.old_names import refuse_old_names
from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.combiner.worker import CombinedWorker
from cnnstrategies.paramserver.joined_optimizers import joined
from cnnstrategies.paramserver.optimizer_state import renumber_state
from cnnstrategies.paramserver.specification import (
    STEP_CLIP_NORM,
    STEP_CLIP_VALUE,
    Mode,
    PullCompression,
    PushCompression,
    Specification,
)
from cnnstrategies.paramserver.worker.counters import Counters
from cnnstrategies.quantities import Duration, seconds
from cnnstrategies.shares.history import ShareHistory
from cnnstrategies.shares.samplers import dealt
from cnnstrategies.strategies.parameter_server.added_groups import check_added, follow_groups
from cnnstrategies.strategies.parameter_server.base import CoordinatedStrategy
from cnnstrategies.strategies.parameter_server.checks import (
    check_importable,
    check_module,
    check_optimizers,
    watch_gradients,
)
from cnnstrategies.strategies.parameter_server.joint_scaler import JointScaler, enabled_scaler
from cnnstrategies.strategies.parameter_server.loader import BatchDispatch
from cnnstrategies.strategies.parameter_server.observer_hooks import (
    HookContexts,
    gradient_observers,
    later_readers,
    weight_observers,
)
from cnnstrategies.strategies.parameter_server.options import (
    Dispatch,
    ParameterServerOptions,
    Security,
    usual_staleness,
    usual_sync_every,
)
from cnnstrategies.strategies.parameter_server.served_state import reading_state
from cnnstrategies.strategies.parameter_server.start import (
    average_buffers,
    join_servers,
    take_state_of_rank_zero,
    trainer_state,
)
from cnnstrategies.strategies.parameter_server.step import Stepper
from cnnstrategies.strategies.protocol import StepKind
from cnnstrategies.strategies.share_options import ShareOptions

OUTER_STATE = "outer_optimizer_state"  # Key in a checkpoint for the state of the outer optimizer of mode ``local``.
# Names of the clipping methods of a precision plugin, and of the limit that workers send to the servers instead.
CLIPPING = {"clip_grad_by_norm": STEP_CLIP_NORM, "clip_grad_by_value": STEP_CLIP_VALUE}


class ParameterServerStrategy(CoordinatedStrategy):
    """Data parallelism with parameter servers: each server holds a part of the parameters and updates this part.

    The design follows Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014. Workers
    push gradients while backward still runs. The forward of each layer waits only for the parameters of this layer. The
    process group of ``torch.distributed`` uses the run's coordinator: if a worker dies, the run continues without this
    worker. A restarted worker joins again when the next epoch begins, or earlier with ``data_dispatch: dynamic``.

    Each worker computes BatchNorm's running statistics from its own batches. Before each validation, test and
    checkpoint, the statistics are averaged over the workers.

    Args:
        mode: When the servers update the parameters. ``sync``: in each step, with the mean of all workers' gradients,
            as under DDP. ``async``: with each gradient when it arrives. ``ssp`` (stale synchronous parallel, Ho et al.,
            NeurIPS 2013): like ``async``, but no worker runs more than ``staleness`` steps ahead of the slowest worker.
            ``local`` (DiLoCo, Douillard et al. 2023): each worker makes ``sync_every`` steps with its own optimizer;
            then the servers make an outer step with the mean of the changes that the workers made to their weights.
        staleness: For mode ``ssp``: number of steps that a worker may be ahead of the slowest worker; 4 by default.
            With 0, ``ssp`` is the same as ``sync``.
        sync_every: For mode ``local``: number of steps that each worker makes between two outer steps; 8 by default.
        outer_lr: For mode ``local``: learning rate of the outer step, which is a step of SGD. With ``outer_lr`` 1 and
            ``outer_momentum`` 0 an outer step averages the workers' weights (local SGD). DiLoCo uses 0.7 and 0.9.
        outer_momentum: For mode ``local``: Nesterov momentum of the outer step; 0 or more, and less than 1.
        servers_per_node: Number of server processes that each node starts.
        endpoints: Addresses of dedicated servers, as ``tcp://address:port``. Start each dedicated server with
            ``cnnstrategies-server``; the nodes then start no servers. In mode ``sync`` a dedicated server updates each
            slice as soon as all gradients of the slice have arrived, so new values return while other gradients are
            still being sent.
        coordinator: Address at which the coordinator listens, as ``tcp://address:port``, on the machine of rank 0. By
            default a run on one node uses a socket file in a private directory, and a run on several nodes uses
            Lightning's main address and port.
        compression: Compression of pushed gradients. ``none`` sends them as they are. ``fp16`` and ``bf16`` round to 16
            bits. ``topk`` sends only the elements with the largest absolute values. ``onebit`` sends one bit for each
            element. ``topk`` and ``onebit`` use error feedback: the error of a push is added to the next gradient.
            ``auto`` measures step times during training, and uses the fastest of ``none``, ``bf16`` and ``onebit``.
        topk_density: For ``topk``: fraction of the elements that are sent; above 0 and at most 1.
        pull_compression: Compression of pulled parameters. With ``fp16`` and ``bf16``, forward and backward use rounded
            weights; the servers, validation and checkpoints use full precision. ``topk`` and ``onebit`` need mode
            ``sync`` or ``local``: they compress the change of the parameters in each step, with error feedback
            (DoubleSqueeze, Tang et al., ICML 2019). ``auto`` measures step times during training, and uses the fastest
            of ``none``, ``fp16`` and, if all workers step together, ``onebit``.
        replication: Number of servers that hold each slice of the parameters. With 2, no update is lost if one server
            dies.
        data_dispatch: Division of an epoch's batches among the workers. ``static`` gives all workers the same number of
            batches, as under DDP. ``dynamic`` needs mode ``async`` or ``ssp``: each worker requests its next batch when
            it needs one, so faster workers compute more batches, and the batches of a worker that dies go to other
            workers.
        security: ``curve`` encrypts and authenticates all connections; ``none`` does not. ``auto`` means ``none`` for a
            socket file in a private directory, and ``curve`` for TCP. With ``curve`` on several machines, set
            ``key_file``.
        key_file: File with the run's keys. Make the file with ``cnnstrategies-server --make-keys FILE``, and copy it to
            every machine.
        timeout: A process counts as dead if it sends no heartbeat or reply for this time, in seconds or as
            ``minutes:seconds``.
        max_restarts: Number of times that each process may be restarted after it was killed. Processes are restarted
            only in the first trainer function that a script calls. Without a restart, the run continues if a worker
            dies, but ends if rank 0 dies, because rank 0 writes checkpoints and logs.
        max_joiners: Number of additional workers that may join and leave during training, with ``cnnstrategies join``.
            This needs ``data_dispatch: dynamic``, and mode ``async`` or mode ``ssp`` with a staleness above 0.
        combine_per_node: For mode ``sync``: the workers of a node add their gradients in shared memory, and one worker
            of the node pushes and pulls for all of them. The node's link then carries the bytes of a single worker. If
            the worker that pushes dies, another worker of the node takes its role.
        shares: For mode ``sync``: division of each global batch among the workers, as under ``ddp_balanced``. A list
            has one number above 0 for each worker, such as ``[3, 1]``. ``equal`` gives all workers the same number of
            samples. ``auto`` begins with ``initial_shares``, and then follows the workers' measured times.
        initial_shares: The shares with which ``auto`` begins: ``equal``, or a list as for ``shares``. The command
            ``plan`` writes such a list.
        start_method: How the workers of a node are started: ``popen`` runs the script again for each worker, ``spawn``
            starts new Python processes that run only the trainer function, and ``fork`` forks the process that calls
            the trainer function. The strategy names ``parameter_server_spawn`` and ``parameter_server_fork`` set this
            option.
        **kwargs: Options of :class:`~lightning.pytorch.strategies.DDPStrategy` about devices.

    Raises:
        ConfigurationError: Options contradict each other. The module is checked later, right before processes start.
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
        self._share_options = ShareOptions(self, shares, initial=initial_shares)
        self._dispatch = BatchDispatch(self)
        self._has_left = False
        # The loader that was compared last, and whether its data differ from worker to worker.
        self._examined: tuple[DataLoader[Any], bool] | None = None
        self._buffers_are_equal = True
        self._outer_state: dict[str, Any] | None = None
        self._watch: HookContexts | None = None
        self._scaler: JointScaler | None = None

    def check(self) -> None:
        """Check the module, the number of nodes and the shares, before the run starts.

        The launcher calls this before it starts processes.

        Raises:
            ConfigurationError: The servers cannot train the module, or an option contradicts the number of processes.
        """
        check_module(self.module, self.options)
        self.options.check_nodes(self.num_nodes)
        self._share_options.check()
        if enabled_scaler(self.precision_plugin) is not None and not self.module.automatic_optimization:
            raise ConfigurationError(
                f"{type(self.module).__name__} sets automatic_optimization=False, which does not work with precision "
                "16-mixed and strategy parameter_server: use bf16-mixed, or strategy ddp"
            )
        if self._layer_sync is not None:
            raise ConfigurationError(
                "sync_batchnorm=True: workers run independently, and cannot exchange BatchNorm's statistics within a "
                "step; set trainer.sync_batchnorm to false"
            )

    # Joining the run and connecting to the servers

    @property
    def module(self) -> LightningModule:
        """The LightningModule of the run."""
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
        self._share_options.begin(lambda: self._gather_times)

    def _gather_times(self, row: list[float]) -> list[list[float]]:
        return list(self.gather(row, "times").values())

    @override
    def open_session(self) -> None:
        super().open_session()
        self._examined = None
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
            served = check_optimizers(self.optimizers, self.options)
            self.served = served[0]
            for optimizer, way in zip(self.optimizers, served, strict=True):
                way.add_counters(optimizer)
                check_importable(optimizer, self.options, self._start == "fork")
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING and self.options.mode != "local":
            # The servers clip instead of this plugin, because only the servers know the norm of the whole gradient.
            automatic = self.module.automatic_optimization
            for name, limit in CLIPPING.items() if automatic or self.options.aggregates else ():
                setattr(self.precision_plugin, name, _clip_nothing if automatic else partial(self._clip_in_step, limit))
            scaler = enabled_scaler(self.precision_plugin)
            if scaler is not None:
                self._scaler = JointScaler(scaler, self, lambda: self._stepper)
        self.share_metrics(self.module)

    # Loading of the data

    @property
    @override
    def batch_shares(self) -> ShareHistory:
        return self._share_options.history

    @property
    @override
    def divides_by_shares(self) -> bool:
        return self.options.shares != "equal"

    @override
    def keeps_sampler(self, loader: DataLoader[Any]) -> bool:
        """Whether the user's code has divided a loader's data among the workers. All workers must call this."""
        if self.alone or self.world_size == 1 or self.options.data_dispatch == "dynamic":
            return False
        if self._examined is None or self._examined[0] is not loader:
            self._examined = loader, bool(is_divided(loader, self.world_size, self._rows_of_loaders))
        return self._examined[1]

    def _rows_of_loaders(self, row: Row) -> list[Row]:
        return list(self.gather(row, "data of a loader").values())

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if self.options.shares != "equal":
            return self._share_options.loader(dataloader)
        if self.options.data_dispatch == "static" or not self.trainer.training:
            return dataloader
        return self._dispatch.loader(dataloader, self.trainer)

    # Training steps

    @override
    def on_train_start(self) -> None:
        """Connect to the servers. A restarted worker waits here until the run admits it."""
        ask_of_sigterm(self.trainer, False)  # The broadcast would make all workers wait for each other in each step.
        self.leave_address(self.trainer)
        worker, specification, own_steps = join_servers(self, self.module, joined(self.optimizers), self._outer_state)
        if self.options.mode != "local" and self.options.aggregates and self.world_size > 1:
            self._watch = watch_gradients(self.module, self.callbacks)
        self.joined_late = own_steps is not None
        self.collectives.membership.report_figures(lambda: self._figures(worker))
        self._stepper = self._stepper_of(worker, specification, own_steps or 0)

    def _stepper_of(self, worker: Worker | CombinedWorker, specification: Specification, own_steps: int) -> Stepper:
        """Return the stepper that connects the module's training to a worker.

        Args:
            worker: This worker's connection to the servers.
            specification: The run's specification.
            own_steps: In mode ``local``, the number of steps since the last outer step.
        """
        # In mode local the weights between two steps are the worker's own, so hooks may read and change them.
        local = self.options.mode == "local"
        average = ["an average of the weights"] * self._averages_weights
        return Stepper(
            self.module,
            worker,
            specification,
            joined(self.optimizers),
            early=not gradient_observers(self.module, self.callbacks) and enabled_scaler(self.precision_plugin) is None,
            sees_weights=average if local else weight_observers(self.module, self.callbacks),
            sync_every=self.options.sync_every if local else 0,
            own_steps=own_steps,
        )

    def _figures(self, worker: Worker | CombinedWorker) -> dict[str, float]:
        """Return this worker's measured values by name, for the command ``watch``.

        The thread that sends heartbeats calls this method.
        """
        figures = worker.counters.figures()
        if self._stepper is not None and self.options.waits_for_pushes and not self._has_left:
            pushed = self._stepper.begun
            figures |= {"pushed": pushed, "needs": max(0, pushed - self.options.staleness)}
        return figures

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Admit restarted workers at the first batch of an epoch, and follow changes of the parameter groups."""
        if self._stepper is None:
            return
        if batch_idx == 0:
            self._admit()
        if self._stepper.groups_changed:
            self._follow_groups(batch_idx)

    def _follow_groups(self, batch: int) -> None:
        """Give the servers the parameters that were added to the optimizer. All workers must call this.

        Args:
            batch: Index of the batch that begins.
        """
        before = self._stepper
        assert before is not None
        check_added(self, before, batch)
        self._take_values()
        worker = follow_groups(self, self.module, before)
        self.collectives.membership.report_figures(lambda: self._figures(worker))
        self._stepper = self._stepper_of(worker, worker.specification, 0)
        self._stepper.unfinished = before.unfinished
        self._has_left = False

    def _admit(self) -> None:
        assert self._stepper is not None
        if self.joined_late:
            # This worker took part in this epoch's admission when it joined, so it does not take part again.
            self.joined_late = False
            return
        self._stepper.worker.interrupt()
        self._stepper.worker.wait_all()
        state = trainer_state(
            self.trainer, self._stepper.optimizer, self._stepper.unfinished.own_steps, self.configuration
        )
        if self.collectives.boundary(state).admitted:
            # Wait until the admitted workers have received the parameters from the servers.
            self.collectives.barrier("admitted")
        if self._has_left:
            self._stepper.worker.join()
            self._stepper.note_values()
            self._has_left = False

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._stepper is not None
        if self._stepper.leaves_out():
            # This batch is skipped. The loss does not depend on parameters, so no parameter gets a gradient.
            return torch.zeros((), device=self.root_device, requires_grad=True)
        self._stepper.count(self._samples_in(args[0] if args else next(iter(kwargs.values()))))
        self._buffers_are_equal = False
        self._dispatch.seen += 1
        with self._stepper.forward():
            output = super().training_step(*args, **kwargs)
        if not self.module.automatic_optimization:  # This was the whole batch, with all its steps.
            self._leave_after_last_batch()
        return output

    def _samples_in(self, batch: Any) -> int:
        sampler = dealt(self.trainer) if self.options.aggregates else None
        if sampler is not None and not sampler.counts(self.trainer.fit_loop.batch_idx)[sampler.rank]:
            return 0  # The batch only repeats samples, so that all ranks have the same number of batches.
        return max(1, count_samples(batch))

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        if self._stepper is not None:
            self._stepper.before_backward()

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Send no gradients inside this context, because gradients accumulate over several batches."""
        assert self._stepper is not None
        self._stepper.unfinished.accumulating = True
        try:
            yield
        finally:
            self._stepper.unfinished.accumulating = False

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run forward and backward, and push the gradients. The servers make the optimizer's step.

        The optimizer's own `step` calls the closure, which runs forward and backward. Pushed gradients are removed
        before the closure returns, so the optimizer finds no gradients and changes nothing.
        """
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        assert self._stepper is not None
        self._stepper.after_step(self.trainer.is_last_batch)
        # The gradients of these batches have been sent. If this worker dies, no other worker must process these batches
        # again.
        self._dispatch.processed = self._dispatch.seen
        if self.module.automatic_optimization:
            self._leave_after_last_batch()
        return output

    def _leave_after_last_batch(self) -> None:
        """Leave an epoch of mode ``ssp`` after this worker's last batch, so that others do not wait for its pushes."""
        if self.options.mode == "ssp" and self.trainer.is_last_batch:
            assert self._stepper is not None
            worker = self._stepper.worker
            assert not isinstance(worker, CombinedWorker), "in mode ssp workers are not combined"
            worker.leave()
            self._has_left = True

    def _clip_in_step(self, limit: str, optimizer: Optimizer, clip_val: float) -> None:
        """Let the servers clip in the optimizer's next step. This method replaces those of the precision plugin."""
        assert self._stepper is not None
        member = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        self._stepper.clip(member, limit, clip_val)

    # Weights and buffers outside of training steps

    def _settle(self, refresh: bool = True) -> None:
        """Load the servers' parameters and the mean of the workers' buffers into the module.

        All workers must call this during training. Outside of training this method does nothing.

        Args:
            refresh: Whether to pull the parameters again, in full precision, if this worker may have older or rounded
                values.
        """
        if self._stepper is None:
            return
        self._dispatch.processed = self._dispatch.seen
        if not self._buffers_are_equal:
            average_buffers(self.module, self)
            self._buffers_are_equal = True
        self._take_values(refresh)

    def _take_values(self, refresh: bool = True) -> None:
        """Load the servers' parameters into the module. All workers must call this. See :meth:`_settle`."""
        assert self._stepper is not None
        worker = self._stepper.worker
        worker.interrupt()
        if self.options.mode == "local":
            self._stepper.outer_step()
            # The outer step above was made before `sync_every` steps had passed. This call excludes the step's duration
            # from the times by which `auto` chooses the encodings.
            worker.interrupt()
        worker.wait_all()
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
            # A callback may write weights during validation. This call makes the next step accept these writes.
            self._stepper.note_values()

    @property
    def _averages_weights(self) -> bool:
        """Whether a callback averages the weights of all steps, and writes the average into the module at the end."""
        return any(isinstance(callback, WeightAveraging) for callback in self.callbacks)

    @override
    def on_train_end(self) -> None:
        """Take the weights and the optimizer's state from the servers, and disconnect from the servers.

        Afterwards the module of each rank holds the trained weights, and rank 0 also holds the optimizer's state.
        """
        self._settle(refresh=not self._averages_weights)
        if self._averages_weights:
            # The ranks may have averaged different weights, so all ranks take the average of rank 0.
            take_state_of_rank_zero(self.module, self)
        if self.options.mode == "local":
            self._outer_state = self._servers_state()
        else:
            states = [self.optimizer_state(optimizer) for optimizer in self.optimizers]
            for optimizer, state in zip(self.optimizers, states, strict=True):
                if self.global_rank == 0:
                    optimizer.load_state_dict(state)
        self._leave_servers()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state, with the servers' parameters. All ranks must call this."""
        self._settle()
        return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer for a checkpoint, in the same form as in a run on one device.

        Unless the mode is ``local``, the servers hold the state during training, and only rank 0 receives the state.
        All ranks must call this.
        """
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        if self._stepper is None or self.options.mode == "local":
            return optimizer.state_dict()
        with reading_state(optimizer):
            state = optimizer.state_dict()
        served = self._servers_state()
        if served is not None:
            names = {id(parameter): name for name, parameter in self.module.named_parameters()}
            held = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
            state["state"] = renumber_state(served["state"], self._stepper.specification.held_names, held)
        return state

    def _servers_state(self) -> dict[str, Any] | None:
        """Return the state of the servers' optimizer on rank 0, and None on other ranks. All ranks must call this."""
        assert self._stepper is not None
        self.barrier("optimizer state")
        state = self._stepper.worker.optimizer_state() if self.global_rank == 0 else None
        self.barrier("optimizer state")
        return state

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a checkpoint. In mode ``local``, add the outer optimizer's state. All ranks must call this."""
        if self.options.mode == "local" and "optimizer_states" in checkpoint:
            checkpoint[OUTER_STATE] = self._outer_state if self._stepper is None else self._servers_state()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self._outer_state = checkpoint.get(OUTER_STATE)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights into the module. The servers receive the weights and the optimizer's state when training starts.

        Raises:
            ConfigurationError: Training has started already.
        """
        if self._stepper is not None:
            raise ConfigurationError(
                "weights were loaded in the middle of training, but the servers hold the weights and would overwrite "
                "the loaded values: save a checkpoint, and pass it to a new fit as ckpt_path"
            )
        super().load_model_state_dict(checkpoint, strict)

    @property
    @override
    def traffic(self) -> Counters | None:
        """Counters of this worker's bytes, steps and waiting time. The value is None unless the worker trains."""
        return None if self._stepper is None else self._stepper.worker.counters

    @property
    @override
    def may_skip_steps(self) -> bool:
        """Whether the other nodes may make a step without this worker's node.

        This is possible only if the workers of each node combine their gradients. After a skipped step, the node
        continues with the other nodes' next step.
        """
        return self.options.combines(self.num_processes)

    @property
    @override
    def steps_in_lockstep(self) -> bool:
        return self.options.aggregates

    @property
    @override
    def replicas_agree(self) -> bool:
        return self.options.aggregates and self.options.mode != "local"

    @override
    def settle_weights(self) -> None:
        if self.replicas_agree and self._stepper is not None:
            self._take_values(refresh=False)

    @override
    def panel_rows(self, batch_size: int | None) -> list[tuple[str, str]]:
        """Return the start panel's rows about the mode, the servers and the shares.

        A run that does not train has no rows.
        """
        if self.trainer.state.fn != TrainerFn.FITTING:
            return []
        shares = [self._share_options.panel_row()] * (self.options.shares != "equal")
        joint = type(self.optimizers[0]).__name__ if self.served.is_joint else ""
        return self.options.describe(self.num_nodes, joint) + shares

    @override
    def differences(self, batch_size: int | None) -> list[str]:
        sees = gradient_observers(self.module, self.callbacks)
        accumulated = self.trainer.accumulate_grad_batches
        lines = self.options.differences(self.module, self.world_size, batch_size, accumulated, sees)
        later = (
            later_readers(self.module, self.callbacks) if self.world_size > 1 and self.options.mode != "local" else []
        )
        if later:
            lines.append(
                f"{', '.join(later)} reads the gradients of one worker's images, not the mean over the workers"
            )
        separate = self.world_size > 1 and (self.options.mode == "local" or not self.options.aggregates)
        if separate and enabled_scaler(self.precision_plugin) is not None:
            lines.append("each worker has its own loss scale, and skips steps on its own")
        return lines

    @override
    def leave_session(self) -> None:
        """Disconnect from the servers and the coordinator. Do nothing if no session is open."""
        self._leave_servers()
        super().leave_session()

    @override
    def teardown(self) -> None:
        for name in CLIPPING:
            # `setup` has replaced the plugin's clipping methods. This line restores the original methods, because
            # another Trainer may use the same plugin.
            vars(self.precision_plugin).pop(name, None)
        if self._scaler is not None:
            self._scaler.end()
            self._scaler = None
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
    """Do nothing. This function replaces the clipping methods of a precision plugin, because the servers clip."""
