"""`strategy: hybrid_pipeline`: the network is cut into stages, each of them replicated as often as it needs."""

import os
import sys
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed import ReduceOp
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from cnnstrategies._lightning_private import (
    asks_of_sigterm,
    check_start,
    keep_batches,
    leave_samplers,
    ranks_are_children,
)
from cnnstrategies.checkpoints.io import load_mapped
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.own_forward import network_at
from cnnstrategies.old_names import refuse_old_names
from cnnstrategies.pipeline.engine import Pipeline
from cnnstrategies.pipeline.timetable import Checkpointing, Order, Placement, Schedule
from cnnstrategies.pipeline.tracing import decide_by_shapes
from cnnstrategies.pipeline.transport import PeerError, Transport, broadcast_value, cpu_group
from cnnstrategies.quantities import Duration, Size, as_timedelta, size_in_bytes
from cnnstrategies.runtime.processes import end_group_at_exit, failed_before, leave_group_at_exit
from cnnstrategies.shares import Deals
from cnnstrategies.strategies.balancing import gather_rows
from cnnstrategies.strategies.dealt_loader import by_shares
from cnnstrategies.strategies.exact_means import widened
from cnnstrategies.strategies.failing import FailingTogetherDDPStrategy
from cnnstrategies.strategies.hybrid_pipeline.balancing import TimedStages, begin_dealing
from cnnstrategies.strategies.hybrid_pipeline.batches import NoBatch, PredictionLoader, StageLoader
from cnnstrategies.strategies.hybrid_pipeline.comparison import (
    compare_on_rank_zero,
    example_images,
    example_on_device,
    is_attached,
)
from cnnstrategies.strategies.hybrid_pipeline.contract import (
    check_callbacks,
    check_module,
    check_optimizers,
    compile_backend_of,
)
from cnnstrategies.strategies.hybrid_pipeline.divided_module import DividedModule
from cnnstrategies.strategies.hybrid_pipeline.hooks import EndTogether, summarise_whole
from cnnstrategies.strategies.hybrid_pipeline.layout import (
    ChosenLayout,
    LayoutRequest,
    describe_pipeline,
    differences_of_pipeline,
    stage_parameters,
)
from cnnstrategies.strategies.hybrid_pipeline.loading_ranks import LoadingRanks, warn_of_shares
from cnnstrategies.strategies.hybrid_pipeline.own_stage import (
    Plan,
    broadcast_weights,
    check_plan,
    own_stage_alone,
    plan_network,
    refuse_meta,
    share_stage,
    values_alone_to_cpu,
)
from cnnstrategies.strategies.hybrid_pipeline.stage_times import StageTimes
from cnnstrategies.strategies.hybrid_pipeline.steps import Steps, after_the_lost_rank, clip_by_joint_norm, clip_by_value
from cnnstrategies.strategies.protocol import GradientWeighting, StepKind, StrategyFacts
from cnnstrategies.strategies.without_ddp import check_keywords, own_metric_states


class HybridPipelineStrategy(StrategyFacts, FailingTogetherDDPStrategy):
    """Pipeline and data parallel training: the network is cut into stages, and a stage may have several replicas.

    Each replica is one device. The replicas of the first stage load batches as DDP processes do; the other ranks load
    nothing. Together these batches are the global batch, which is divided into microbatches. Each microbatch is run by
    one replica of each stage. The gradients are means over all samples of the global batch.

    Every rank runs the module's steps once for the global batch. The steps get the targets of the global batch, the
    shapes of its images, and the network's outputs, which the last stage sends to all ranks. The values that the steps
    log are therefore the same on every rank, and the same as in one process.

    If the module builds the network in ``configure_model``, each rank keeps only the parameters of its own stage. The
    cuts must then be named.

    Args:
        stages: Number of stages. By default it follows from ``replicas`` or ``cuts``; without both it is 2.
        replicas: Number of replicas of each stage, such as ``[3, 1]``. By default all devices are divided evenly among
            the stages.
        cuts: Names of the modules after which the network is cut. By default the network is profiled when the run
            starts, and the cuts with the smallest predicted step time are chosen.
        microbatches: Number of microbatches of a global batch. The default is 4 times the number of stages times the
            largest number of replicas. If the network has batch normalisation and the batch size is known, the default
            is lowered until each microbatch has at least 8 samples.
        schedule: Order of the forward and backward passes: ``1f1b`` runs the backward pass of a microbatch as soon as
            possible; ``gpipe`` runs all forward passes first, and stores the activations of all microbatches.
        run_ahead: Whether stages under ``1f1b`` store the activations of one more microbatch than necessary, so that
            messages are sent during computation. If the cuts are chosen automatically, the default is true if the
            profile predicts that this saves time and fits into ``memory_limit``. With ``cuts`` or one stage, the
            default is true if there is no ``memory_limit``.
        memory_limit: Largest memory of a device for automatic cuts: a number of bytes, or a size such as ``8GiB``.
        activation_checkpointing: Whether activations are computed again in the backward, which saves memory:
            ``never``, ``always``, or ``except_last`` for all microbatches except the last of each rank.
        placement: Order in which ranks are numbered, which decides which ranks are on one node. ``stages`` puts the
            replicas of a stage, which sum their gradients, on the same node. ``replicas`` puts ranks that send each
            other activations on the same node.
        shares: Division of the microbatches among the replicas of each stage, with one number above 0 for each rank.
            With ``replicas: [2, 1]`` and ``[3, 1, 1]``, the first rank runs three of four microbatches of the first
            stage. ``equal`` gives all replicas of a stage the same number. ``auto`` begins with ``initial_shares`` and
            measures each rank's time for a microbatch; whenever other shares would make a step more than 3 % faster,
            the shares are rebalanced.
        initial_shares: The shares with which ``auto`` begins: ``equal``, or a list as for ``shares``. The command
            ``plan`` writes such a list.
        submodule: Path of the submodule that is divided, such as ``model``. By default it is the submodule that has all
            of the module's parameters.
        timeout: Longest time to wait for another rank: seconds, ``minutes:seconds`` or a timedelta.
        **kwargs: Options of :class:`~lightning.pytorch.strategies.DDPStrategy` for devices and launching.

    Raises:
        ConfigurationError: Options contradict each other. Options that do not fit the devices or the module are refused
            before processes are started.
    """

    gradient_weighting: GradientWeighting = "by_sample"
    compiles_network = True
    step_kind: StepKind = "stages"
    pipeline: Pipeline | None = None

    def __init__(
        self,
        stages: int | None = None,
        replicas: list[int] | None = None,
        cuts: list[str] | None = None,
        microbatches: int | None = None,
        schedule: Schedule = "1f1b",
        run_ahead: bool | None = None,
        memory_limit: Size | None = None,
        activation_checkpointing: Checkpointing = "never",
        placement: Order = "stages",
        shares: Literal["auto", "equal"] | list[float] = "equal",
        initial_shares: Literal["equal"] | list[float] = "equal",
        submodule: str | None = None,
        process_group_backend: str | None = None,
        timeout: Duration = 600.0,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **kwargs: Any,
    ) -> None:
        limit = as_timedelta(timeout, "timeout")
        given = {**locals(), "memory_limit": size_in_bytes(memory_limit, "memory_limit")}
        refuse_old_names(HybridPipelineStrategy, kwargs)
        check_keywords(type(self).__name__, kwargs)
        super().__init__(
            process_group_backend=process_group_backend, timeout=limit, start_method=start_method, **kwargs
        )
        self.request = LayoutRequest(**{field.name: given[field.name] for field in fields(LayoutRequest)})
        self.submodule = submodule
        self.time_limit = limit
        self._deals: Deals | None = None
        self._checked: LightningModule | None = None
        self._layout: tuple[nn.Module, ChosenLayout] | None = None
        self._steps: Steps | None = None
        self._failed = False
        self._callbacks: list[Any] = []  # the trainer's own, while it trains
        self._in_parts = False
        self._made_in = os.getpid()
        self._plan: Plan | None = None
        self._examined: tuple[object, LoadingRanks] | None = None  # the last loader, and the ranks that load its data
        self._apart: LightningModule | None = None  # the module, where each rank has built its own stage alone

    # Before the processes start

    @property
    @override
    def launcher(self) -> Any:
        """Lightning's launcher. It is asked for right before processes are started: the last place for checks."""
        launcher = super().launcher
        if not self._in_parts:  # After a failure it is asked to end the ranks; `setup` refuses to go on.
            if os.getpid() == self._made_in and ranks_are_children(launcher):  # In a rank nothing is started any more.
                check_start(self._start_method, self.root_device)
            self._check(before_setup=True)
        return launcher

    def _check(self, before_setup: bool = False) -> None:
        module = self.lightning_module
        if module is None or module is self._checked:
            return
        owner = module
        try:
            self._plan = plan_network(module, self.root_device if is_attached(module) else torch.device("cpu"))
        except Exception:
            if before_setup:
                return  # It may need what its setup makes in the ranks, which check again.
            raise
        if self._plan is not None:
            check_plan(self.request, self._start_method)
            module = self._plan.module
        path = check_module(module, self.submodule)
        compile_backend_of(module)
        network = network_at(module, path)
        if self._plan is None:
            refuse_meta(module, path)
        if self.root_device.type == "cuda" and self.process_group_backend == "gloo":
            raise ConfigurationError(
                "process_group_backend=gloo: gloo sends no messages from one GPU to another; leave it out for NCCL"
            )
        if self._layer_sync is not None:
            raise ConfigurationError(
                "sync_batchnorm=True: the replicas of a stage run different microbatches and would wait for each "
                "other; set trainer.sync_batchnorm to false; it is not needed for validation, because the running "
                "statistics are those of the whole batch"
            )
        if not decide_by_shapes(network, partial(example_on_device, module, path)) and not is_attached(module):
            return  # The ranks, which have the data, check again.
        self.request.check(network, self.num_nodes * self.num_processes)
        self._checked = owner

    # Devices and data

    @property
    def placement(self) -> Placement:
        """The numbering of the ranks."""
        return self.request.placement_on(self.num_nodes * self.num_processes)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The shards are those of the first stage's replicas; the other ranks name one and do not load it."""
        place = self.placement.place(self.global_rank)
        return {"num_replicas": self.placement.replicas[0], "rank": 0 if place.stage else place.replica}

    @override
    def process_dataloader(self, dataloader: object) -> StageLoader:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        ranks = self._loading_ranks(dataloader)
        if trainer.state.fn == TrainerFn.PREDICTING:
            return PredictionLoader(dataloader, ranks, self._most, has_rows=self.is_global_zero)
        return StageLoader(self._by_shares(dataloader, ranks), ranks, self._most)

    def _by_shares(self, loader: Any, ranks: LoadingRanks) -> Any:
        """Return a training loader whose batches the replicas of the first stage divide by their shares."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if self._deals is not None and self.placement.replicas[0] > 1:
            if not ranks.all_load:
                return by_shares(loader, trainer, self._deals)
            if trainer.training:
                warn_of_shares(loader)
        return loader

    @override
    def keeps_sampler(self, loader: DataLoader[Any]) -> bool:
        """Whether the user's code has divided a loader's data among all ranks. All ranks must call this."""
        return bool(self._loading_ranks(loader).all_load)

    def _loading_ranks(self, loader: object) -> LoadingRanks:
        """Return the ranks that load a loader's data. All ranks must call this."""
        if self._examined is None or self._examined[0] is not loader:
            ranks = LoadingRanks(loader, self.placement, self.global_rank, self._gather_early, self._transport)
            self._examined = loader, ranks
        return self._examined[1]

    @override
    @after_the_lost_rank
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Load this rank's part of the batch and make the global one known.

        Returns:
            The global batch as every rank sees it: images by shape alone, everything else in full.
        """
        if self._steps is None:
            return super().batch_to_device(batch, device, dataloader_idx)
        own = None if isinstance(batch, NoBatch) else super().batch_to_device(batch, device, dataloader_idx)
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if self._deals is not None and trainer.training:
            self._pipeline.deal(self._deals.at(trainer.current_epoch, trainer.fit_loop.batch_idx + 1))
        return self._steps.load(own, dataloader_idx)

    @property
    @override
    def batch_shares(self) -> Deals | None:
        return self._deals

    def loads(self, shares: Sequence[float]) -> tuple[float, ...]:
        """By which shares the replicas of the first stage load, where all ranks have such ones."""
        assert self._layout is not None, "the strategy has been set up"
        microbatches = self._layout[1].microbatches
        return replace(self.placement, microbatches=microbatches, shares=tuple(shares)).loads

    # Set-up

    @override
    def setup_environment(self) -> None:
        assert self.lightning_module is not None
        existed = dist.is_initialized()
        super().setup_environment()
        own_metric_states(self.lightning_module)
        keep_batches(self.lightning_module.trainer)
        if self.placement.replicas[0] == 1:
            leave_samplers(self.lightning_module.trainer)  # Lightning's would shuffle what is not to be.
        if not existed:
            end_group_at_exit()
        self._deals = begin_dealing(self, self.lightning_module.trainer, self._gather)

    @property
    def _is_whole(self) -> bool:
        """Whether each rank has built the whole network, and not its own stage alone."""
        return self._apart is None or self._apart is not self.lightning_module

    @override
    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Inside, the module's `configure_model` builds the network."""
        assert self.lightning_module is not None
        self._check()
        plan, self._plan = self._plan, None
        if plan is None:
            yield
            return
        path = check_module(plan.module, self.submodule)
        stage = self.placement.place(self.global_rank).stage
        with own_stage_alone(plan, self.lightning_module, path, self.request, stage) as built:
            yield
        if built:
            self._apart = self.lightning_module
        else:
            self._checked = None

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self._check()
        self._failed = False
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set outside the class
        path = check_module(self.lightning_module, self.submodule)
        network = network_at(self.lightning_module, path)
        whole = self._is_whole
        if whole:
            broadcast_weights(network, self.time_limit)
        else:
            # Of what a rank does not keep, the host may have drawn the values in place of the device: a step that draws
            # numbers would draw others on each rank.
            torch.set_rng_state(self.broadcast(torch.get_rng_state()).cpu())
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            check_callbacks(callbacks)
            # On the whole network: its groups are those of a checkpoint.
            self.setup_optimizers(trainer)
            check_optimizers(self.optimizers, self.root_device)
            summarise_whole(trainer, self.lightning_module, callbacks)
        if self._layout is None or self._layout[0] is not network:
            self._layout = (network, self._choose_layout(trainer, path, whole))
        layout = self._layout[1]
        self.pipeline = Pipeline(
            network,
            layout.cuts,
            layout.replicas,
            layout.microbatches,
            self.request.schedule,
            layout.run_ahead,
            self.request.activation_checkpointing,
            self.root_device,
            self.time_limit,
            placement=self.request.placement,
            compile_backend=compile_backend_of(self.lightning_module),
            shares=self.placement.shares,
        )
        if not whole:
            share_stage(self.pipeline)
        divided = DividedModule(self.lightning_module, path, self.pipeline, callbacks, whole)
        self.model_to_device()
        self._steps = Steps(divided, fitting)
        if fitting:
            divided.divide_optimizers(self.optimizers)
            callbacks.insert(0, EndTogether(self._end_together))
            if layout.planned:
                callbacks.append(StageTimes(self.pipeline, layout.recut, self._gather))
                self._layout = network, replace(layout, planned=False, recut=None)  # Once is enough.
            self._callbacks = callbacks
        self.setup_precision_plugin()
        plugin: Any = self.precision_plugin
        # The plugin's own know this stage's gradients alone, and fail where there are none.
        plugin.clip_grad_by_norm, plugin.clip_grad_by_value = self._clip_grad_by_norm, clip_by_value
        scaler = getattr(plugin, "scaler", None)
        if scaler is not None and fitting and not self._pipeline.parameters:
            raise ConfigurationError(
                f"precision 16-mixed needs trainable parameters in every stage, and {self._pipeline.transport.me} has "
                "none: use bf16-mixed, or other cuts"
            )

    @property
    def _pipeline(self) -> Pipeline:
        assert self.pipeline is not None, "the strategy has been set up"
        return self.pipeline

    def _choose_layout(self, trainer: Trainer, path: str, whole: bool) -> ChosenLayout:
        """A layout, whose stages compute what the whole network computes where that will be trained; a collective."""
        network = network_at(trainer.lightning_module, path)
        example = partial(example_images, trainer.lightning_module, path)
        layout = self.request.choose(network, trainer, trainer.world_size, self.root_device, example)
        if trainer.state.fn == TrainerFn.FITTING and layout.cuts:
            compare_on_rank_zero(trainer, path, layout.cuts, self.root_device, whole)
        if self.root_device.type == "cuda":
            # What the training holds is to be measured, and not what these trials have held.
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.root_device)
        return layout

    @property
    def timed_stages(self) -> TimedStages:
        """The stages, whose microbatches can be timed."""
        return self._pipeline

    @property
    def steps(self) -> Steps:
        """What runs the module's steps, from the set-up to the end."""
        assert self._steps is not None, "the strategy has been set up"
        return self._steps

    # Steps

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.steps.divided.check_groups()
            self.steps.begin_epoch()

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with self.steps.accumulating():
            yield

    def _end_together(self) -> None:
        assert self.lightning_module is not None
        if self.world_size > 1 and asks_of_sigterm(self.lightning_module.trainer):  # As Lightning for a batch.
            dist.broadcast(torch.zeros(1, dtype=torch.int64, device=self.root_device), 0)
        self._pipeline.end_together()

    @override
    @after_the_lost_rank
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.steps.watch.paused():  # A hook of the optimizer's step may call it.
            return self.steps.train(args, kwargs)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.steps.watch.paused():
            return super().optimizer_step(*args, **kwargs)

    @override
    @after_the_lost_rank
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self.steps.evaluate("validation_step", args, kwargs)

    @override
    @after_the_lost_rank
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self.steps.evaluate("test_step", args, kwargs)

    @override
    @after_the_lost_rank
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self.steps.evaluate("predict_step", args, kwargs)

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        with self.steps.watch.paused():
            clip_by_joint_norm(optimizer, clip_val, self._pipeline.place.replica == 0, self.root_device)

    # Collectives

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: ReduceOp | str | None = "mean") -> Any:
        """Combine a value over the ranks; a sum is taken as a mean, since every rank has counted the whole batch."""
        is_sum = str(reduce_op).lower() in ("sum", "redoptype.sum")
        reduce_op = "mean" if is_sum else reduce_op
        return super().reduce(widened(tensor, reduce_op), group, reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any, have decided so."""
        return bool(self._most(int(not decision)) == 0 if all else self._most(int(decision)))

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of one rank, on all; nothing is pickled."""
        return broadcast_value(obj, src, self.root_device) if dist.is_initialized() else obj

    def _most(self, number: int) -> int:
        # On the host, where it can be: to read it there waits for nothing that a device computes.
        group = None if self.pipeline is None else self.pipeline.transport.control
        value = torch.tensor(number, device=self.root_device if group is None else "cpu")
        if self.world_size > 1:
            dist.all_reduce(value, op=ReduceOp.MAX, group=group)
        return int(value)

    def _gather(self, row: list[float]) -> list[list[float]]:
        return gather_rows(row, self._pipeline.transport.control)

    def _gather_early(self, row: list[float]) -> list[list[float]]:
        """Gather rows of numbers, also before the set-up: `configure_optimizers` may ask for the length of an epoch."""
        if self.pipeline is not None:
            return self._gather(row)
        with cpu_group(self.time_limit) as group:
            return gather_rows(row, group)

    def _transport(self) -> Transport:
        return self._pipeline.transport

    # Checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """On rank 0 the whole module's state, under the names that any strategy has; a collective."""
        assert self.lightning_module is not None
        if self._in_parts:
            raise RuntimeError(
                "the run has failed, and each rank has the weights of its own stage alone: there is nothing whole to "
                "save; go on from the last checkpoint"
            )
        if self._steps is None and not self._is_whole:
            raise ConfigurationError(
                "the run has ended, and each rank has the weights of its own stage alone, as configure_model has built "
                "the network: have ModelCheckpoint save it during fit"
            )
        if self._steps is None:
            return self.lightning_module.state_dict()
        with self._steps.watch.paused():
            return self._steps.divided.whole_state(self.lightning_module.state_dict())

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint; a rank that has its own stage alone reads no more of it than that."""
        if self._is_whole or not zipfile.is_zipfile(checkpoint_path):
            return super().load_checkpoint(checkpoint_path, weights_only)
        return load_mapped(checkpoint_path, weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._steps is None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*to a meta parameter", UserWarning)  # That of another rank's stage.
                super().load_model_state_dict(checkpoint, strict)
            return
        assert self.lightning_module is not None
        with self._steps.watch.paused():
            own = self._steps.divided.own_state(checkpoint["state_dict"])
            self.lightning_module.load_state_dict(own, strict=strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """On rank 0 the optimizer's state over the whole network, as one process would save it; a collective."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        if self._steps is None:
            return optimizer.state_dict()
        with self._steps.watch.paused():
            return self._steps.divided.whole_optimizer_state(optimizer)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self.steps.divided.load_optimizer_states(checkpoint["optimizer_states"])

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        # Weight averaging has put this rank's part of its average there; `current_model_state` is whole already.
        if self._steps is not None and self._steps.divided.averages and "current_model_state" in checkpoint:
            checkpoint["state_dict"] = self._steps.divided.whole_state(checkpoint["state_dict"])
        super().save_checkpoint(checkpoint, filepath, storage_options)

    # Facts

    @override
    def panel_rows(self, batch_size: int | None) -> list[tuple[str, str]]:
        pipeline = self._pipeline
        graphs, parameters = pipeline.blueprint.stages[True], stage_parameters(pipeline)
        return describe_pipeline(pipeline.placement, graphs, parameters, self.request, batch_size)

    @override
    def differences(self, batch_size: int | None) -> list[str]:
        return differences_of_pipeline(self._pipeline.blueprint.network, self._pipeline.placement, batch_size)

    @property
    @override
    def parameters_per_device(self) -> list[int]:
        """Numbers of parameters that the devices of each stage hold."""
        return stage_parameters(self._pipeline)

    @override
    def check_job(self, module: LightningModule, processes: int) -> None:
        self.request.check(network_at(module, check_module(module, self.submodule)), processes)

    @override
    def loading_processes(self, processes: int) -> int:
        """Return the number of replicas of the first stage."""
        return self.request.replicas_on(processes)[0]

    # The end

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        leave_group_at_exit()
        if isinstance(exception, PeerError) and not (failed_before() or self.failed_elsewhere):
            # Lightning kills all ranks when it sees a dead one, maybe before the traceback is shown.
            print(exception, file=sys.stderr, flush=True)
        if isinstance(
            exception, ProcessExitedException | ProcessRaisedException
        ):  # In the process that forked or spawned the ranks.
            exception.add_note(f"it was {self.placement.describe(exception.error_index)}")
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        """Put the whole network back, with its weights on every rank; after a failure, what this rank has."""
        self._callbacks[:] = [one for one in self._callbacks if not isinstance(one, EndTogether | StageTimes)]
        self._callbacks = []
        if self._steps is not None:
            self._steps.watch.end()
            self._steps.divided.restore(merge=not self._failed and self._is_whole)
            self._in_parts = self._failed
            if self._failed:
                self._checked = None
            else:
                self._pipeline.close()
        self.pipeline = self._steps = self._examined = None
        for name in ("clip_grad_by_norm", "clip_grad_by_value"):
            vars(self.precision_plugin).pop(name, None)  # Another Trainer may be given the same plugin.
        with values_alone_to_cpu(self.lightning_module):
            super().teardown()
