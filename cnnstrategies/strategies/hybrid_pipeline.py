"""`strategy: hybrid_pipeline`: the network is cut into stages, each of them replicated as often as it needs."""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from torchmetrics import Metric
from typing_extensions import override

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.batch import Batch
from cnnstrategies.pipeline.batchnorm import BatchNormMode
from cnnstrategies.pipeline.engine import Pipeline
from cnnstrategies.pipeline.optimizer_state import Groups, group_names, keep_own, merge_state, named_state, split_state
from cnnstrategies.pipeline.recompute import Checkpointing
from cnnstrategies.pipeline.timetable import Placement, Schedule
from cnnstrategies.pipeline.transport import new_group
from cnnstrategies.strategies.pipeline_contract import check_module, check_optimizers
from cnnstrategies.strategies.pipeline_layout import LayoutRequest
from cnnstrategies.strategies.pipeline_loader import NoBatch, StageLoader, stage_loader
from cnnstrategies.strategies.pipeline_step import HandOver, NetworkStandIn

PREFIX = "network."


class HybridPipelineStrategy(DDPStrategy):
    """Data and pipeline parallel: stages of the network on different devices, each replicated as often as it needs.

    Each replica of the first stage loads batches as a DDP process does, so the global batch is ``batch_size`` times
    the first stage's replicas; the other ranks load nothing. It is cut into microbatches, and microbatch m runs on
    replica ``m mod R`` of a stage with R replicas. The gradients are means over the samples of the global batch.

    On every rank the module's steps see the same: the targets of the global batch, its images only by shape, and from
    ``self.network(images)`` the outputs for it, sent from the last stage. So what they log is the same everywhere and
    as in one process; a sum over ranks is the value itself.

    Args:
        stages: Number of stages; by default as many as ``replicas`` or ``cuts`` say, else 2.
        replicas: Replicas of each stage; by default all devices are shared out evenly.
        cuts: Names of modules after which the network is cut; by default the cuts with the least predicted step time,
            from a profile taken when the run starts.
        microbatches: Microbatches of a global batch; by default 4 for each stage and replica of the widest stage.
        schedule: ``1f1b``, or ``gpipe``, which holds the activations of all microbatches.
        memory_limit: Bytes that a device may hold, for automatic cuts.
        batch_norm: Running statistics as after one full batch (``deferred``) or after the microbatches in turn
            (``microbatch``). In both, each microbatch is normalised by itself.
        activation_checkpointing: Recompute activations in the backward: ``never``, for all microbatches but each
            rank's last (``except_last``), or ``always``.
        timeout: How long to wait for another rank.
        **kwargs: Those of :class:`~lightning.pytorch.strategies.DDPStrategy` for devices and launching.

    Raises:
        ConfigurationError: The numbers contradict each other. What depends on the devices and the module is checked
            before processes are started.
    """

    def __init__(
        self,
        stages: int | None = None,
        replicas: list[int] | None = None,
        cuts: list[str] | None = None,
        microbatches: int | None = None,
        schedule: Schedule = "1f1b",
        memory_limit: int | None = None,
        batch_norm: BatchNormMode = "deferred",
        activation_checkpointing: Checkpointing = "never",
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=10),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            process_group_backend=process_group_backend, timeout=timeout, start_method=start_method, **kwargs
        )
        self.request = LayoutRequest(
            stages, replicas, cuts, microbatches, schedule, memory_limit, batch_norm, activation_checkpointing
        )
        self.stages = stages
        self.replicas = replicas
        self.cuts = cuts
        self.microbatches = microbatches
        self.schedule = schedule
        self.memory_limit = memory_limit
        self.batch_norm = batch_norm
        self.activation_checkpointing = activation_checkpointing
        self.time_limit = timeout
        self.pipeline: Pipeline | None = None
        self._checked: LightningModule | None = None
        self._network: nn.Module | None = None
        self._stand_in: NetworkStandIn | None = None
        self._state_names: list[str] = []
        self._groups: list[Groups] = []
        self._batch: Batch | None = None
        self._averaged: list[nn.Module] = []
        self._metrics: list[tuple[Metric, Any]] = []
        self._failed = False
        self._loss_checked = False

    # Before the processes start

    @property
    @override
    def launcher(self) -> Any:
        """Lightning's launcher. It is asked for right before processes are started: the last place for checks."""
        self._check()
        return super().launcher

    def _check(self) -> None:
        module = self.lightning_module
        if module is None or module is self._checked:
            return
        network = check_module(module)
        if self._layer_sync is not None:
            raise ConfigurationError(
                "sync_batchnorm=True: the replicas of a stage run different microbatches and would wait for each "
                "other; "
                "set trainer.sync_batchnorm to false; batch_norm: deferred keeps the whole batch's running statistics"
            )
        self.request.check(network, self.num_nodes * self.num_processes)
        self._checked = module

    # Devices and data

    @property
    def placement(self) -> Placement:
        """The numbering of the ranks."""
        return Placement(self.request.replicas_on(self.num_nodes * self.num_processes))

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The shards are those of the first stage's replicas; the other ranks name one and do not load it."""
        first = self.placement.replicas[0]
        return {"num_replicas": first, "rank": self.global_rank if self.global_rank < first else 0}

    @override
    def process_dataloader(self, dataloader: object) -> StageLoader:
        loads = self.global_rank < self.placement.replicas[0]
        return stage_loader(dataloader, loads, self._most)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Load this rank's part of the batch and make the global one known.

        Returns:
            The global batch as every rank sees it: images by shape alone, everything else in full.
        """
        if self.pipeline is None:
            return super().batch_to_device(batch, device, dataloader_idx)
        if isinstance(batch, NoBatch):
            images, rest, form = None, (), "tuple"
        else:
            batch = super().batch_to_device(batch, device, dataloader_idx)
            if isinstance(batch, Tensor):
                images, rest, form = batch, (), "tensor"
            elif isinstance(batch, (tuple, list)) and batch and isinstance(batch[0], Tensor):
                images, rest, form = batch[0], tuple(batch[1:]), type(batch).__name__
            else:
                raise ConfigurationError(
                    f"a batch is a {type(batch).__name__}: strategy hybrid_pipeline takes a tensor of images, or a "
                    "tuple (images, targets) of tensors with one row per sample"
                )
        self._batch = shared = self.pipeline.share(images, *rest, form=form)
        rows = shared.split.samples if self._sees_batch else 0
        seen = torch.zeros((), dtype=shared.image_dtype, device=self.root_device).expand(rows, *shared.image_shape)
        if shared.form == "tensor":
            return seen
        whole = (seen, *(tensor[:rows] for tensor in shared.rest))
        return list(whole) if shared.form == "list" else whole

    @property
    def _sees_batch(self) -> bool:
        # Predictions are collected from all ranks: each row may be there once only.
        assert self.lightning_module is not None
        return not self.lightning_module.trainer.predicting or self.is_global_zero

    # Set-up

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self._check()
        self._failed = self._loss_checked = False
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        network = check_module(self.lightning_module)
        self._broadcast_weights(network)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            # On the whole network: its groups are those of a checkpoint.
            self.setup_optimizers(trainer)
            check_optimizers(self.optimizers)
        self._divide(trainer, network)
        self.model_to_device()
        self._keep_own_parameters()
        self.setup_precision_plugin()
        plugin: Any = self.precision_plugin
        plugin.clip_grad_by_norm = self._clip_grad_by_norm  # The plugin's own knows this stage's gradients alone.
        scaler = getattr(plugin, "scaler", None)
        if scaler is not None and fitting and not self._pipeline.parameters:
            raise ConfigurationError(
                f"precision 16-mixed needs trainable parameters in every stage, and {self._pipeline.transport.me} has "
                "none: use bf16-mixed, or other cuts"
            )

    def _divide(self, trainer: Trainer, network: nn.Module) -> None:
        assert self.lightning_module is not None
        layout = self.request.choose(network, trainer, self.placement.world_size, self.root_device)
        self.pipeline = Pipeline(
            network,
            layout.cuts,
            layout.replicas,
            layout.microbatches,
            self.schedule,
            self.batch_norm,
            self.activation_checkpointing,
            self.root_device,
            self.time_limit,
        )
        self._network = network
        self._state_names = list(network.state_dict())
        own = set(self.pipeline.blueprint.state[self.pipeline.place.stage])
        for name, tensor in (*network.named_parameters(), *network.named_buffers()):
            if name not in own:
                tensor.data = torch.empty(0, dtype=tensor.dtype)  # Another rank holds it; `merge` brings it back.
        self._stand_in = NetworkStandIn(self.pipeline.module)
        self.lightning_module.network = self._stand_in
        self._divide_averaged(trainer)
        for module in self.lightning_module.modules():
            if isinstance(module, Metric):
                # Every rank has counted the whole batch; torchmetrics would add them up.
                self._metrics.append((module, module.distributed_available_fn))
                module.distributed_available_fn = _never

    def _divide_averaged(self, trainer: Trainer) -> None:
        """Divide the copies of the network that callbacks keep for weight averaging."""
        self._averaged = []
        blueprint, stage = self._pipeline.blueprint, self._pipeline.place.stage
        for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by the callback connector
            if isinstance(callback, StochasticWeightAveraging):
                raise ConfigurationError(
                    "StochasticWeightAveraging averages whole networks: with strategy hybrid_pipeline use "
                    "lightning.pytorch.callbacks.EMAWeightAveraging or WeightAveraging"
                )
            for value in vars(callback).values():
                if isinstance(value, AveragedModel):
                    copy = value.module
                    assert isinstance(copy, LightningModule)
                    whole = copy.network
                    assert isinstance(whole, nn.Module)
                    part = blueprint.of(whole).build(stage).to(self.root_device)
                    copy.network = NetworkStandIn(part)
                    self._averaged.append(value)

    def _broadcast_weights(self, network: nn.Module) -> None:
        """Start from rank 0's weights on every rank."""
        if self.world_size == 1:
            return
        group = new_group(range(self.world_size), self.time_limit, backend="gloo")
        with torch.no_grad():
            for tensor in (*network.parameters(), *network.buffers()):
                whole = tensor.detach().cpu().contiguous()
                dist.broadcast(whole, 0, group=group)
                tensor.copy_(whole)

    def _keep_own_parameters(self) -> None:
        assert self._network is not None
        names = {parameter: name for name, parameter in self._network.named_parameters()}
        self._groups = [group_names(optimizer, names) for optimizer in self.optimizers]
        for optimizer, groups in zip(self.optimizers, self._groups, strict=True):
            keep_own(optimizer, self._own, groups)
            if optimizer.state:
                optimizer.load_state_dict(optimizer.state_dict())  # Moves it to the parameters' device.

    @property
    def _own(self) -> dict[str, nn.Parameter]:
        return dict(self._pipeline.module.named_parameters())

    @property
    def _pipeline(self) -> Pipeline:
        assert self.pipeline is not None, "the strategy has been set up"
        return self.pipeline

    # Steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module, pipeline, batch = self._before_step()
        scaler = getattr(self.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        with self.precision_plugin.train_step_context():
            gradients, local = pipeline.train(batch, module.loss, scale)
            if scaler is not None:
                self._share_overflow(gradients)
            output = self._call_step("training_step", batch, pipeline.gather(batch, local), args, kwargs)
        loss = output["loss"] if isinstance(output, dict) else output
        if not isinstance(loss, Tensor):
            raise ConfigurationError(
                f"{type(module).__name__}.training_step returned {type(loss).__name__}: a pipeline's gradients are "
                "computed already; return the loss"
            )
        self._check_loss(batch, loss)
        loss = HandOver.apply(loss, gradients, scale, *pipeline.parameters)
        return {**output, "loss": loss} if isinstance(output, dict) else loss

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._evaluate("validation_step", args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._evaluate("test_step", args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._evaluate("predict_step", args, kwargs)

    def _before_step(self) -> tuple[Any, Pipeline, Batch]:
        assert self._stand_in is not None
        if self._batch is None:
            raise ConfigurationError(
                "a step takes a dataloader_iter: with strategy hybrid_pipeline it must take the batch, as in "
                "training_step(self, batch, batch_idx)"
            )
        self._pipeline.module.training = self._stand_in.training
        batch, self._batch = self._batch, None
        return self.lightning_module, self._pipeline, batch

    def _evaluate(self, step: str, args: Any, kwargs: Any) -> Any:
        _, pipeline, batch = self._before_step()
        outputs = pipeline.gather(batch, pipeline.evaluate(batch))
        return self._call_step(step, batch, outputs, args, kwargs)

    def _call_step(self, step: str, batch: Batch, outputs: Any, args: Any, kwargs: Any) -> Any:
        assert self._stand_in is not None
        if not self._sees_batch:
            outputs = torch.utils._pytree.tree_map(lambda leaf: leaf[:0] if isinstance(leaf, Tensor) else leaf, outputs)
        self._stand_in.put(outputs)
        return getattr(self.lightning_module, step)(*args, **kwargs)

    def _check_loss(self, batch: Batch, loss: Tensor) -> None:
        """In the first step, compare what training_step returned with what the last stage has trained."""
        if self._loss_checked:
            return
        self._loss_checked = True
        trained = self._pipeline.mean_loss()
        got = float(loss.detach())
        if trained == trained and abs(got - trained) > 0.02 * max(abs(trained), 1e-3):
            raise ConfigurationError(
                f"training_step returned the loss {got:.6g}, but the mean of loss(outputs, targets) over the "
                f"microbatches is {trained:.6g}: a pipeline trains loss() alone, which must be a mean over samples and "
                "all of what training_step returns"
            )

    def _share_overflow(self, gradients: list[Tensor | None]) -> None:
        """Have every rank find an overflow that one of them has, so that all skip the step and lower the scale."""
        finite = all(bool(torch.isfinite(g).all()) for g in gradients if g is not None)
        if not self.reduce_boolean_decision(finite) and finite:
            next(g for g in gradients if g is not None).fill_(float("inf"))

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip by the norm over all stages."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        squares = torch.zeros((), dtype=torch.float64, device=self.root_device)
        if self._pipeline.place.replica == 0 and parameters:
            norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            squares = norm.double() ** 2
        dist.all_reduce(squares)
        if parameters:
            torch.nn.utils.clip_grads_with_norm_(parameters, clip_val, squares.sqrt().to(parameters[0].dtype))

    # Collectives

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: ReduceOp | str | None = "mean") -> Any:
        """Combine a value over the ranks; a sum is taken as a mean, since every rank has counted the whole batch."""
        is_sum = str(reduce_op).lower() in ("sum", "redoptype.sum")
        return super().reduce(tensor, group, "mean" if is_sum else reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any, have decided so."""
        return bool(self._most(int(not decision)) == 0 if all else self._most(int(decision)))

    def _most(self, number: int) -> int:
        value = torch.tensor(number, device=self.root_device)
        if self.world_size > 1:
            dist.all_reduce(value, op=ReduceOp.MAX)
        return int(value)

    # Checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """On rank 0 the whole module's state, under the names that any strategy has; a collective."""
        assert self.lightning_module is not None
        return self._whole_state(self.lightning_module.state_dict())

    def _whole_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Replace this stage's part of a state dict by that of all stages on rank 0; a collective."""
        if self.pipeline is None:
            return state
        own = {name: value for name, value in state.items() if name.startswith(PREFIX)}
        parts = self.pipeline.collect(own)
        if parts is None:
            return state
        merged = {name: value for part in parts for name, value in part.items()}
        ordered = {PREFIX + name: merged[PREFIX + name] for name in self._state_names}
        return {**ordered, **{name: value for name, value in state.items() if name not in own}}

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self.pipeline is None:
            super().load_model_state_dict(checkpoint, strict)
            return
        assert self.lightning_module is not None
        own = self.lightning_module.state_dict().keys()
        state = {
            name: value
            for name, value in checkpoint["state_dict"].items()
            if name in own or not name.startswith(PREFIX) or name.removeprefix(PREFIX) not in self._state_names
        }
        self.lightning_module.load_state_dict(state, strict=strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """On rank 0 the optimizer's state over the whole network, as one process would save it; a collective."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        groups = self._groups[self.optimizers.index(optimizer)]
        parts = self._pipeline.collect(named_state(optimizer, self._own, groups))
        return {} if parts is None else merge_state(optimizer, parts, groups)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        for optimizer, groups, state in zip(self.optimizers, self._groups, states, strict=True):
            optimizer.load_state_dict(split_state(state, self._own, groups))

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        # Weight averaging has put this rank's part of its average there; `current_model_state` is whole already.
        if self._averaged and "current_model_state" in checkpoint:
            checkpoint["state_dict"] = self._whole_state(checkpoint["state_dict"])
        super().save_checkpoint(checkpoint, filepath, storage_options)

    # The end

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        if isinstance(
            exception, ProcessExitedException | ProcessRaisedException
        ):  # In the process that forked or spawned the ranks.
            exception.add_note(f"it was {self.placement.describe(exception.error_index)}")
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        """Put the whole network back, with its weights on every rank; after a failure, what this rank has."""
        if self.pipeline is not None:
            self._restore_network(self.pipeline)
        super().teardown()

    def _restore_network(self, pipeline: Pipeline) -> None:
        assert self.lightning_module is not None
        assert self._network is not None
        if not self._failed:
            merged = pipeline.merge()
            state = dict((*self._network.named_parameters(), *self._network.named_buffers()))
            for name, value in merged.items():
                state[name].data = value
        self.lightning_module.network = self._network
        for metric, available in self._metrics:
            metric.distributed_available_fn = available
        self._metrics.clear()
        self.pipeline = self._network = self._stand_in = None


def _never() -> Literal[False]:
    return False
