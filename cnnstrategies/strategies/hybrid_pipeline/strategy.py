"""Pipeline training in which every rank runs the module's steps once, with the whole batch, as one device does."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from warnings import catch_warnings, filterwarnings
from zipfile import is_zipfile

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from typing_extensions import override

from cnnstrategies._lightning_private import allow_skipped_steps, asks_of_sigterm
from cnnstrategies.checkpoints.io import load_mapped
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.batch import Images
from cnnstrategies.pipeline.engine import AHEAD
from cnnstrategies.pipeline.placed_network import PlacedNetwork
from cnnstrategies.pipeline.random_draws import generator_of
from cnnstrategies.pipeline.task_times import MeasuredPipeline
from cnnstrategies.pipeline.timetable import Schedule
from cnnstrategies.pipeline.tracing import trace_open
from cnnstrategies.pipeline.transport import Transport, new_group
from cnnstrategies.placed import DeviceLink, GlooLink, Places
from cnnstrategies.placed.hidden import hide_foreign_gradients
from cnnstrategies.strategies.balancing import gather_rows
from cnnstrategies.strategies.hybrid_pipeline.balancing import TimedStages
from cnnstrategies.strategies.hybrid_pipeline.base import PipelineStrategy
from cnnstrategies.strategies.hybrid_pipeline.checks import check_layout_of, check_stages, check_state, placement_for
from cnnstrategies.strategies.hybrid_pipeline.compiling import compile_stages
from cnnstrategies.strategies.hybrid_pipeline.dealing import use_shares
from cnnstrategies.strategies.hybrid_pipeline.epoch_ends import EndTogether, summarise_whole
from cnnstrategies.strategies.hybrid_pipeline.example import example_inputs
from cnnstrategies.strategies.hybrid_pipeline.facts import (
    differences,
    usual_samples,
    warn_after_first_batch,
    weight_of_batch,
)
from cnnstrategies.strategies.hybrid_pipeline.first_samples import is_attached, on_device_of
from cnnstrategies.strategies.hybrid_pipeline.kept_values import bring_kept_values
from cnnstrategies.strategies.hybrid_pipeline.layout import (
    ChosenLayout,
    LayoutRequest,
    describe_pipeline,
)
from cnnstrategies.strategies.hybrid_pipeline.loader_messages import end_together
from cnnstrategies.strategies.hybrid_pipeline.loading import PlacedLoader, PlacedPredictionLoader
from cnnstrategies.strategies.hybrid_pipeline.logs import PlacedLogs
from cnnstrategies.strategies.hybrid_pipeline.measuring import callbacks_for_cuts, measure_waits
from cnnstrategies.strategies.hybrid_pipeline.metric_values import share_metrics
from cnnstrategies.strategies.hybrid_pipeline.metrics import metrics_of_one_process
from cnnstrategies.strategies.hybrid_pipeline.network import DividedForward, find_network, module_at
from cnnstrategies.strategies.hybrid_pipeline.order import (
    check_run_ahead,
    declare_loss,
    describe_order,
    order_of,
    settle_verdicts,
    tell_news,
)
from cnnstrategies.strategies.hybrid_pipeline.own_stage import (
    NetworkPlan,
    check_plan,
    meta_tensors_stay,
    own_stage_alone,
    plan_network,
    put_others_away,
    refuse_meta,
)
from cnnstrategies.strategies.hybrid_pipeline.placing import PlacedModule
from cnnstrategies.strategies.hybrid_pipeline.predictions import predictions_on_rank_zero
from cnnstrategies.strategies.hybrid_pipeline.random_states import random_states, set_random_states
from cnnstrategies.strategies.hybrid_pipeline.stage_times import StageTimes
from cnnstrategies.strategies.hybrid_pipeline.start_values import broadcast_weights, share_among_replicas
from cnnstrategies.strategies.lost_rank import after_the_lost_rank


class HybridPipelineStrategy(PipelineStrategy):
    """Pipeline training in which every rank runs the module's steps, hooks and callbacks as one device does.

    The module keeps its own network on every rank. Parameters and buffers of other stages are foreign tensors, see
    :mod:`cnnstrategies.placed`. A call of the network runs the stages for all microbatches of the batch, and its result
    is in the last stage. Whatever the module computes from the result follows the rules for placed tensors.

    The arguments are those of :class:`.PipelineStrategy`. The schedule is ``gpipe``, or ``1f1b`` for modules that
    declare their loss, see :mod:`cnnstrategies.pipeline.declared_loss`.

    Attributes:
        places: The rules of this rank; None outside of a run.
    """

    places: Places | None = None
    has_global_batches = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # The first step, and steps of modules that do not declare their loss, run in the order of GPipe.
        self._schedule: Schedule = kwargs.get("schedule", "1f1b")
        self._connections: Transport | None = None
        self._forward: DividedForward | None = None
        self._placed: PlacedModule | None = None
        self._logs: PlacedLogs | None = None
        self._accumulates = False
        self._alone: dist.ProcessGroup | None = None  # A group of this rank.
        self._everyone: dist.ProcessGroup | None = None  # The default group, outside of a step.
        self._groups: list[Any] = []  # Groups that the strategy destroys at the end of a run.
        self._divided_optimizers: list[Optimizer] = []  # Optimizers whose states are divided among the ranks.
        self._planned: NetworkPlan | None = None  # The network that `configure_model` will build.
        self._apart: LightningModule | None = None  # The module, if each rank has built its own stage only.
        self._has_trained = False  # Whether a training step has run since the set-up.
        self._replaced = ExitStack()  # Gives objects of the user their own methods back.
        self._entered = ExitStack()  # Turns the rules off.

    @override
    @classmethod
    def layout_request(cls, options: Mapping[str, Any], module: LightningModule | None = None) -> LayoutRequest:
        request = super().layout_request(options)
        return replace(request, schedule="gpipe" if module is None else order_of(module, request.schedule))

    # Before the processes start

    @override
    def _check(self, before_setup: bool = False) -> None:
        module = self.lightning_module
        if module is None or module is self._checked:
            return
        if self._layer_sync is not None:
            raise ConfigurationError(
                "sync_batchnorm=True: the stages of a pipeline run different microbatches; set trainer.sync_batchnorm "
                "to false"
            )
        if self.root_device.type == "cuda" and self.process_group_backend == "gloo":
            raise ConfigurationError(
                "process_group_backend=gloo: gloo sends no messages from one GPU to another; leave it out for NCCL"
            )
        try:
            device = self.root_device if is_attached(module) else torch.device("cpu")
            self._planned = plan_network(module, self.submodule, device)
        except Exception:
            if before_setup:
                return  # The code may need what its setup makes in the ranks, which check again.
            raise
        if self._planned is not None:
            check_plan(self.request, self._start_method)
            module = self._planned.module
        path = find_network(module, self.submodule)
        check_state(module, path)
        check_run_ahead(self.request.run_ahead, module, self._schedule)
        network = module_at(module, path)
        if self._planned is None:
            refuse_meta(module, path)
        if before_setup and not is_attached(module) and not any(True for _ in network.parameters()):
            return
        devices = self.num_nodes * self.num_processes
        if check_layout_of(self.request, network, devices, partial(self._example, module)):
            self._checked = self.lightning_module  # Otherwise the ranks, which have the data, check again.

    def _example(self, module: LightningModule, size: int) -> Images | None:
        """Return example inputs of the network; None if they are not known, as before the module has a trainer."""
        if not is_attached(module):
            return None
        path = find_network(module, self.submodule)
        images = example_inputs(module, path, size)
        return None if images is None else on_device_of(module_at(module, path), images)

    @override
    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Return a context in which the module's ``configure_model`` builds the network."""
        assert self.lightning_module is not None
        self._check()
        plan, self._planned = self._planned, None
        if plan is None:
            yield
            return
        with own_stage_alone(plan, self.lightning_module, self._rules, self.placement, self.request) as built:
            yield
        if built:
            self._apart = self.lightning_module
        else:
            self._checked = None

    @property
    def _is_whole(self) -> bool:
        """Whether each rank has built the whole network, and not its own stage only."""
        return self._apart is None or self._apart is not self.lightning_module

    # Set-up

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        # Loaders, which may be asked for before the set-up, need the rules.
        group = new_group(range(self.world_size), self.time_limit, backend="gloo")
        assert group is not None
        groups = [new_group([rank], self.time_limit) for rank in range(self.world_size)]
        self._alone = groups[self.global_rank]
        self._groups = [group, self._alone]
        link = GlooLink(group, self.global_rank, self.world_size)
        everyone = dist.group.WORLD
        assert everyone is not None
        self._everyone = everyone
        devices = None if dist.get_backend() == "gloo" else DeviceLink(everyone, self.root_device)
        self.places = Places(self.global_rank, self.world_size, link, devices)

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        module = self.lightning_module
        assert module is not None
        self._check()
        self._failed = self._has_trained = False
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(module)
        with meta_tensors_stay(module):
            self.model_to_device()
        path = find_network(module, self.submodule)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if not self._is_whole:
            put_others_away(module, self._rules, self.root_device)
        else:
            broadcast_weights(module, self.time_limit)
            if fitting:
                # The optimizers are created with the whole network, because automatic cuts need the optimizers.
                self.setup_optimizers(trainer)
        if fitting:
            summarise_whole(trainer, module, trainer.callbacks)  # type: ignore[attr-defined]  # set outside the class
        network = module_at(module, path)
        if self._layout is None or self._layout[0] is not network:
            self._layout = (network, self._layout_of(trainer, path))
        assert self.places is not None
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set outside the class
        # Before the division, because logs change metrics as well, and changes are undone in reverse order.
        self._replaced.callback(share_metrics(self.places, [module, *callbacks]))
        self._divide(network, self._layout[1])
        if not self._is_whole:
            share_among_replicas(module, self._network.runner.replicas.group)
            if fitting:
                with self.places:
                    self.setup_optimizers(trainer)
        # In a validation after a training, rank 0 has the whole states of the training's optimizers.
        self._divided_optimizers = self.optimizers if fitting else []
        for optimizer in self._divided_optimizers:
            self._replaced.callback(hide_foreign_gradients(self.places, optimizer).remove)
        self.setup_precision_plugin()
        allow_skipped_steps(trainer)
        self._same_random_numbers()
        self._replaced.enter_context(metrics_of_one_process())
        if fitting:
            callbacks.insert(0, EndTogether(self._end_together))
            callbacks += callbacks_for_cuts(self.places, self._network.runner.times, self._layout[1], self._gather)
            self._layout = network, replace(self._layout[1], planned=False, recut=None)  # One comparison is enough.
            self._replaced.callback(_remove, callbacks, EndTogether, StageTimes)
        self._entered.enter_context(self.places)

    def _layout_of(self, trainer: Trainer, path: str) -> ChosenLayout:
        example = partial(example_inputs, trainer.lightning_module, path)
        network = module_at(trainer.lightning_module, path)
        traced = partial(trace_open, training=True)
        request, first = self.request, None
        if request.activation_checkpointing is None:
            # The prediction is for the order in which most steps run. The first steps run as `saves_memory` says.
            request = replace(request, schedule=order_of(trainer.lightning_module, self._schedule))
            first = self.request.schedule
        return request.choose(network, trainer, trainer.world_size, self.root_device, example, traced, first)

    def _divide(self, network: nn.Module, layout: ChosenLayout) -> None:
        """Divide the network, and give all parameters and buffers of the module their places."""
        assert self.lightning_module is not None
        placement = placement_for(self.request, layout.microbatches, self.world_size)
        if self._deals is not None:
            placement = replace(placement, shares=self._deals.shares)
        assert self.places is not None
        self._connections = transport = Transport(placement, self.time_limit, self.root_device)
        ahead = AHEAD if transport.has_tags else 0
        example = partial(self._example, self.lightning_module)
        check = partial(check_stages, self.lightning_module, example, self.broadcast)
        placed = PlacedNetwork(network, layout.cuts, self.places, transport, ahead, self.lightning_module, check)
        placed.runner.microbatches = layout.microbatches
        compile_stages(self.lightning_module, placed.division)
        placed.runner.activation_checkpointing, placed.runner.run_ahead = layout.checkpointing, layout.run_ahead
        self._forward = DividedForward(placed)
        self._replaced.callback(self._forward.remove)
        self.places.messages.describe = placement.describe
        measure_waits(self.places, placed.runner.times)
        self._placed = PlacedModule(self.lightning_module, placed, self.places, in_parts=not self._is_whole)
        self._logs = PlacedLogs(self.lightning_module, self.places)
        self._replaced.callback(self._logs.remove)
        # Without a limit, as on a CPU, the first step need not save memory.
        is_limited = self.root_device.type == "cuda" or self.request.memory_limit is not None
        saves_memory = is_limited and self.request.activation_checkpointing is None
        declare_loss(placed, self.lightning_module, self._logs, self._schedule, saves_memory)

    def _same_random_numbers(self) -> None:
        """Continue on all ranks with the random numbers of rank 0."""
        assert self.places is not None
        generator = generator_of(self.root_device)
        on_device = {} if generator is None else {"device": generator.get_state()}
        states = self.broadcast({**random_states(), **on_device})
        states = {name: state.cpu() if isinstance(state, Tensor) else state for name, state in states.items()}
        set_random_states(states)
        if generator is not None:
            generator.set_state(states["device"])

    @property
    def _rules(self) -> Places:
        assert self.places is not None, "the strategy has been set up"
        return self.places

    # Devices and data

    @override
    def process_dataloader(self, dataloader: object) -> Any:
        assert self.lightning_module is not None
        trainer, ranks = self.lightning_module.trainer, self._loading_ranks(dataloader)
        common = ranks, self._rules, self.placement, self._most
        if trainer.state.fn == TrainerFn.PREDICTING:
            return PlacedPredictionLoader(dataloader, *common, has_rows=self.is_global_zero)
        return PlacedLoader(self._by_shares(dataloader, ranks), *common)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        assert self.lightning_module is not None
        if self._connections is not None:
            use_shares(self.lightning_module.trainer, self._connections, self._deals)
        return super().batch_to_device(batch, device, dataloader_idx)

    # Steps

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Return a context for the batches whose gradients are accumulated, except for the last one."""
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        is_first, self._has_trained = not self._has_trained, True
        if is_first:
            assert self.lightning_module is not None
            self._network.runner.usual = usual_samples(self.lightning_module.trainer, self.placement)
        result = self._step("training_step", self.precision_plugin.train_step_context(), args, kwargs)
        if is_first:
            warn_after_first_batch(self._network)
        return result

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("validation_step", self.precision_plugin.val_step_context(), args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("test_step", self.precision_plugin.test_step_context(), args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        result = self._step("predict_step", self.precision_plugin.predict_step_context(), args, kwargs)
        # Predictions are read after the run, by the caller of `Trainer.predict`.
        return predictions_on_rank_zero(self._rules, result)

    def _end_together(self) -> None:
        assert self.lightning_module is not None
        if self.world_size > 1 and asks_of_sigterm(self.lightning_module.trainer):
            # Before each batch, Lightning broadcasts whether rank 0 has got a signal. A rank that continues waits here.
            with self._rules.local():
                dist.broadcast(torch.zeros(1, dtype=torch.int64, device=self.root_device), 0)
        end_together(self._rules, self.placement.ranks(0))

    @after_the_lost_rank
    def _step(self, name: str, context: AbstractContextManager[Any], args: Sequence[Any], kwargs: Any) -> Any:
        assert self._logs is not None
        declared = self._network.declared if name == "training_step" else None
        watched = nullcontext() if declared is None else declared.step((args, kwargs))
        with context, self._logs.step(), self._one_process(), watched:
            return getattr(self.lightning_module, name)(*args, **kwargs)

    @contextmanager
    def _one_process(self) -> Iterator[None]:
        """Return a context in which the default process group has one process.

        Losses that gather over all processes, such as contrastive losses, thus see the whole batch once.
        """
        everyone = dist.group.WORLD
        dist.group.WORLD = self._alone
        try:
            yield
        finally:
            dist.group.WORLD = everyone

    @contextmanager
    def _all_processes(self) -> Iterator[None]:
        """Return a context in which the default process group has all processes, also in a step."""
        current = dist.group.WORLD
        dist.group.WORLD = self._everyone or current
        try:
            yield
        finally:
            dist.group.WORLD = current

    @override
    @after_the_lost_rank
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward, and bring each gradient to the place of its parameter."""
        module = self.lightning_module
        assert module is not None
        self.pre_backward(closure_loss)
        if (weight := weight_of_batch(module.trainer)) != 1:
            closure_loss = closure_loss * weight
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        with self._one_process():
            self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        self._rules.settle_gradients(module.parameters())
        if not self._accumulates:
            assert self._placed is not None
            self._placed.finish_gradients()
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        tell_news(self._network)
        return closure_loss

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        settle_verdicts(self._network)

    # Collectives

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        with self._all_processes():
            super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of one rank, without pickling, and without places. All ranks must call this."""
        if self.places is None:
            return super().broadcast(obj, src)

        def everywhere(leaf: Any) -> Any:
            return self._rules.everywhere(leaf.detach(), "broadcast") if isinstance(leaf, Tensor) else leaf

        with self._all_processes():
            obj = tree_map(everywhere, obj)
            with self._rules.local():
                return super().broadcast(obj, src)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a value that all ranks have: each rank has counted the whole batch, so nothing is combined.

        Only the largest or the smallest value is combined, because such values, as of a signal, may differ between
        ranks.
        """
        if not isinstance(tensor, Tensor):
            return tensor
        value = tensor.detach() if self.places is None else self.places.everywhere(tensor.detach(), "reduce")
        how = str(reduce_op).lower().rpartition(".")[2]
        return getattr(self.gather_from_ranks(value), f"a{how}")(0) if how in ("max", "min") else value

    @override
    def gather_from_ranks(self, values: Tensor) -> Tensor:
        """Return tensors of all ranks, whose values may differ. All ranks must call this."""
        if self.places is None:  # After the end of a run.
            return super().all_gather(values).reshape(self.world_size, *values.shape)
        with self.places.local():
            row = values.detach().cpu().contiguous()
            rows = [torch.empty_like(row) for _ in range(self.world_size)]
            dist.all_gather(rows, row, group=self._transport().control)
            return torch.stack(rows).to(values.device)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the tensor, as on one device, because each rank has the whole batch."""
        return tensor

    @override
    def _most(self, number: int) -> int:
        return int(max(row[0] for row in self._gather_early([number])))

    @override
    def _gather(self, row: list[float]) -> list[list[float]]:
        return gather_rows(row, self._transport().control)

    @override
    def _gather_early(self, row: list[float]) -> list[list[float]]:
        return super()._gather_early(row) if self._connections is None else self._gather(row)

    @override
    def _transport(self) -> Transport:
        assert self._connections is not None, "the strategy has been set up"
        return self._connections

    # Checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state dict, on rank 0 with the values of all ranks. All ranks must call this."""
        assert self.lightning_module is not None
        if self._in_parts:
            raise RuntimeError(
                "the run has failed, and each rank has the weights of its own stage alone: there is nothing whole to "
                "save; continue from the last checkpoint"
            )
        if self._placed is not None:
            settle_verdicts(self._network)
            return self._placed.state_on_rank_zero()
        if not self._is_whole:
            raise ConfigurationError(
                "the run has ended, and each rank has only the weights of its own stage, because configure_model has "
                "built the network: let ModelCheckpoint save it during fit"
            )
        return self.lightning_module.state_dict()

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint. A rank that has only its own stage reads only the values of this stage from the file."""
        if self._is_whole or not is_zipfile(checkpoint_path):
            return super().load_checkpoint(checkpoint_path, weights_only)
        return load_mapped(checkpoint_path, weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        with catch_warnings():
            # Before the set-up, parameters of other stages may be on the meta device, where they need no values.
            filterwarnings("ignore", ".*to a meta parameter", UserWarning)
            super().load_model_state_dict(checkpoint, strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state, on rank 0 with the values of all ranks. All ranks must call this."""
        optimizer = getattr(optimizer, "optimizer", optimizer)  # Lightning may have wrapped the optimizer.
        if self._placed is None or not self._divided_optimizers:
            return optimizer.state_dict()
        return self._placed.optimizer_state_on_rank_zero(optimizer)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self._placed is not None
        self._placed.load_optimizer_states(self.optimizers, checkpoint["optimizer_states"])

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self._placed is not None:
            # Callbacks may have added values of their own, such as averaged weights.
            checkpoint = self._placed.on_rank_zero(checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    # Facts

    @property
    @override
    def timed_stages(self) -> TimedStages:
        return self._network.runner

    @property
    def _network(self) -> PlacedNetwork:
        assert self._forward is not None, "the strategy has been set up"
        return self._forward.placed

    @override
    def panel_rows(self, batch_size: int | None) -> list[tuple[str, str]]:
        placed, placement = self._network, self._transport().placement
        configured = replace(self.request, schedule=self._schedule)
        rows = describe_pipeline(
            placement, placed.division.graphs(), self.parameters_per_device, configured, batch_size
        )
        if placed.runner.microbatches == 1:
            rows[0] = ("microbatches", "1, which runs on the first replica of each stage")
        assert self.lightning_module is not None
        rows.append(("order", describe_order(placed, self.lightning_module, self._schedule)))
        rows += self._chosen_layout.panel_rows()
        return rows if placed.one_microbatch is None else [*rows, ("one microbatch", placed.one_microbatch)]

    @override
    def differences(self, batch_size: int | None) -> list[str]:
        return differences(self._network, self._transport().placement, batch_size)

    @property
    @override
    def pipeline(self) -> MeasuredPipeline | None:
        """The times of this rank's stage; None outside of a run."""
        return None if self._forward is None else self._network.runner.times

    @property
    @override
    def parameters_per_device(self) -> list[int]:
        """Numbers of parameters that the devices of each stage hold."""
        division = self._network.division
        counts = [0] * division.stages
        for _, stage, tensor in division.tensors():
            counts[stage] += tensor.numel() if isinstance(tensor, nn.Parameter) else 0
        return counts

    @override
    def check_job(self, module: LightningModule, processes: int) -> None:
        network = module_at(module, find_network(module, self.submodule))
        check_layout_of(self.request, network, processes, partial(self._example, module))

    # The end

    @override
    def teardown(self) -> None:
        """Bring the whole network back to all ranks. After a failure each rank keeps the values that it has."""
        places, self.places = self.places, None
        runners = [] if self._forward is None else self._forward.runners
        # If the set-up has failed, there is nothing to bring back, and the other ranks may have ended.
        self._replaced.close()
        self._in_parts = self._placed is not None and self._failed
        if self._in_parts:
            self._checked = None
        if self._placed is not None and not self._failed:
            self._placed.restore(self._divided_optimizers)
            assert places is not None
            assert self.lightning_module is not None
            trainer: Any = self.lightning_module.trainer
            bring_kept_values(places, self.lightning_module, trainer.callbacks)
            self._entered.close()
            places.messages.close()
            self._transport().close()
            for runner in runners:
                runner.close()
            for group in self._groups:
                dist.destroy_process_group(group)
        self._alone = self._everyone = None
        self._groups.clear()  # The threads of a group end when nothing refers to the group.
        self._entered.close()
        self._connections = self._forward = self._placed = self._logs = None
        with meta_tensors_stay(self.lightning_module):
            super().teardown()


def _remove(callbacks: list[Any], *kinds: type[Any]) -> None:
    """Remove the callbacks of some classes from a list."""
    callbacks[:] = [callback for callback in callbacks if not isinstance(callback, kinds)]
