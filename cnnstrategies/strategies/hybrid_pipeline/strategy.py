"""`strategy: hybrid_pipeline`: the network is cut into stages, each of them replicated as often as it needs."""

import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed import ReduceOp
from torch.optim import Optimizer
from typing_extensions import override

from cnnstrategies._lightning_private import (
    asks_of_sigterm,
)
from cnnstrategies.checkpoints.io import load_mapped
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.own_forward import network_at
from cnnstrategies.pipeline.engine import Pipeline
from cnnstrategies.pipeline.tracing import decide_by_shapes
from cnnstrategies.pipeline.transport import Transport
from cnnstrategies.strategies.balancing import gather_rows
from cnnstrategies.strategies.exact_means import widened
from cnnstrategies.strategies.hybrid_pipeline.balancing import TimedStages
from cnnstrategies.strategies.hybrid_pipeline.base import PipelineStrategy
from cnnstrategies.strategies.hybrid_pipeline.batches import NoBatch, PredictionLoader, StageLoader
from cnnstrategies.strategies.hybrid_pipeline.comparison import (
    compare_on_rank_zero,
    example_images,
    example_on_device,
)
from cnnstrategies.strategies.hybrid_pipeline.contract import (
    check_callbacks,
    check_module,
    check_optimizers,
    compile_backend_of,
)
from cnnstrategies.strategies.hybrid_pipeline.divided_module import DividedModule
from cnnstrategies.strategies.hybrid_pipeline.epoch_ends import EndTogether, summarise_whole
from cnnstrategies.strategies.hybrid_pipeline.first_samples import is_attached
from cnnstrategies.strategies.hybrid_pipeline.layout import (
    ChosenLayout,
    describe_pipeline,
    differences_of_pipeline,
    stage_parameters,
)
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
from cnnstrategies.strategies.hybrid_pipeline.steps import Steps, clip_by_joint_norm, clip_by_value
from cnnstrategies.strategies.lost_rank import after_the_lost_rank


class HybridPipelineStrategy(PipelineStrategy):
    """Pipeline and data parallel training: the network is cut into stages, and a stage may have several replicas.

    Each replica is one device. The replicas of the first stage load batches as DDP processes do; the other ranks load
    nothing. Together these batches are the global batch, which is divided into microbatches. Each microbatch is run by
    one replica of each stage. The gradients are means over all samples of the global batch.

    Every rank runs the module's steps once for the global batch. The steps get the targets of the global batch, the
    shapes of its images, and the network's outputs, which the last stage sends to all ranks. The values that the steps
    log are therefore the same on every rank, and the same as in one process.

    If the module builds the network in ``configure_model``, each rank keeps only the parameters of its own stage. The
    cuts must then be named.

    The arguments are those of :class:`.PipelineStrategy`.
    """

    pipeline: Pipeline | None = None
    _steps: Steps | None = None
    _callbacks: list[Any] | None = None  # the trainer's own, while it trains
    _plan: Plan | None = None
    _apart: LightningModule | None = None  # the module, where each rank has built its own stage alone

    # Before the processes start

    @override
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

    @override
    def process_dataloader(self, dataloader: object) -> StageLoader:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        ranks = self._loading_ranks(dataloader)
        if trainer.state.fn == TrainerFn.PREDICTING:
            return PredictionLoader(dataloader, ranks, self._most, has_rows=self.is_global_zero)
        return StageLoader(self._by_shares(dataloader, ranks), ranks, self._most)

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

    # Set-up

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
            layout.checkpointing,
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
    @override
    def timed_stages(self) -> TimedStages:
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
    def _most(self, number: int) -> int:
        # On the host, where it can be: to read it there waits for nothing that a device computes.
        group = None if self.pipeline is None else self.pipeline.transport.control
        value = torch.tensor(number, device=self.root_device if group is None else "cpu")
        if self.world_size > 1:
            dist.all_reduce(value, op=ReduceOp.MAX, group=group)
        return int(value)

    @override
    def _gather(self, row: list[float]) -> list[list[float]]:
        return gather_rows(row, self._pipeline.transport.control)

    @override
    def _gather_early(self, row: list[float]) -> list[list[float]]:
        return super()._gather_early(row) if self.pipeline is None else self._gather(row)

    @override
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
        rows = describe_pipeline(pipeline.placement, graphs, parameters, self.request, batch_size)
        return [*rows, *self._chosen_layout.panel_rows()]

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

    # The end

    @override
    def teardown(self) -> None:
        """Put the whole network back, with its weights on every rank; after a failure, what this rank has."""
        if self._callbacks is not None:
            self._callbacks[:] = [
                callback for callback in self._callbacks if not isinstance(callback, EndTogether | StageTimes)
            ]
        self._callbacks = None
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
