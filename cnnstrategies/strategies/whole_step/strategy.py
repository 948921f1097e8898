"""Pipeline training in which every rank runs the module's steps once, with the whole batch, as one device does."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from cnnstrategies._lightning_private import allow_skipped_steps
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.batch import Images
from cnnstrategies.pipeline.engine import AHEAD
from cnnstrategies.pipeline.placed_network import PlacedNetwork
from cnnstrategies.pipeline.random_draws import generator_of
from cnnstrategies.pipeline.stage import check_cuts
from cnnstrategies.pipeline.timetable import check_layout
from cnnstrategies.pipeline.tracing import cut_positions, decide_by_shapes, trace_open
from cnnstrategies.pipeline.transport import Transport, new_group
from cnnstrategies.placed import DeviceLink, GlooLink, Places
from cnnstrategies.placed.hidden import hide_foreign_gradients
from cnnstrategies.strategies.balancing import gather_rows
from cnnstrategies.strategies.failing import FailingTogetherDDPStrategy
from cnnstrategies.strategies.hybrid_pipeline.comparison import is_attached, on_device_of
from cnnstrategies.strategies.hybrid_pipeline.contract import compile_backend_of
from cnnstrategies.strategies.hybrid_pipeline.hooks import EndTogether
from cnnstrategies.strategies.hybrid_pipeline.layout import (
    ChosenLayout,
    describe_pipeline,
    differences_of_pipeline,
)
from cnnstrategies.strategies.hybrid_pipeline.own_stage import broadcast_weights
from cnnstrategies.strategies.hybrid_pipeline.steps import after_the_lost_rank
from cnnstrategies.strategies.hybrid_pipeline.strategy import HybridPipelineStrategy
from cnnstrategies.strategies.whole_step.example import example_inputs
from cnnstrategies.strategies.whole_step.loader_messages import end_together
from cnnstrategies.strategies.whole_step.loading import PlacedLoader, PlacedPredictionLoader
from cnnstrategies.strategies.whole_step.logs import PlacedLogs
from cnnstrategies.strategies.whole_step.metric_values import share_metrics
from cnnstrategies.strategies.whole_step.metrics import metrics_of_one_process
from cnnstrategies.strategies.whole_step.network import DividedForward, find_network, module_at
from cnnstrategies.strategies.whole_step.placing import PlacedModule
from cnnstrategies.strategies.whole_step.predictions import predictions_on_rank_zero
from cnnstrategies.strategies.whole_step.random_states import random_states, set_random_states


class WholeStepStrategy(HybridPipelineStrategy):
    """Pipeline training in which every rank runs the module's steps, hooks and callbacks as one device does.

    The module keeps its own network on every rank. Parameters and buffers of other stages are foreign tensors, see
    :mod:`cnnstrategies.placed`. A call of the network runs the stages for all microbatches of the batch, and its result
    is in the last stage. Whatever the module computes from the result follows the rules for placed tensors.

    The arguments are those of :class:`HybridPipelineStrategy`. The schedule is always ``gpipe``.

    Attributes:
        places: The rules of this rank; None outside of a run.
    """

    places: Places | None = None
    has_global_batches = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name, default in (("shares", "equal"), ("activation_checkpointing", "never"), ("run_ahead", None)):
            if (value := getattr(self.request, name)) != default:
                raise ConfigurationError(
                    f"{name}={value!r}: WholeStepStrategy does not have this option yet; leave it out, or use strategy "
                    "hybrid_pipeline"
                )
        self.request = replace(self.request, schedule="gpipe")
        self._connections: Transport | None = None
        self._forward: DividedForward | None = None
        self._placed: PlacedModule | None = None
        self._logs: PlacedLogs | None = None
        self._accumulates = False
        self._alone: dist.ProcessGroup | None = None  # A group of this rank.
        self._replaced = ExitStack()  # Gives objects of the user their own methods back.
        self._entered = ExitStack()  # Turns the rules off.

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
        if compile_backend_of(module) is not None:
            raise ConfigurationError(
                "compile_backend: WholeStepStrategy does not compile stages yet; leave it out, or use strategy "
                "hybrid_pipeline"
            )
        devices = self.num_nodes * self.num_processes
        network = module_at(module, find_network(module, self.submodule))
        if before_setup and not is_attached(module) and not any(True for _ in network.parameters()):
            return
        placement = self.request.placement_on(devices, self.request.microbatches_on(devices, network))
        check_layout(self.request.stage_count - 1, placement, devices)
        if not decide_by_shapes(network, self._example):
            return  # The ranks, which have the data, check again.
        traced = trace_open(network)
        number = len(cut_positions(traced))
        if number < self.request.stage_count - 1:
            raise ConfigurationError(
                f"stages={self.request.stage_count}: {type(network).__name__} has {number} places to cut; use at most "
                f"{number + 1} stages"
            )
        if self.request.cuts is not None:
            check_cuts(traced, self.request.cuts)
        self._checked = module

    def _example(self, size: int) -> Images | None:
        """Return example inputs of the network; None if they are not known, as before the module has a trainer."""
        module = self.lightning_module
        if module is None or not is_attached(module):
            return None
        path = find_network(module, self.submodule)
        images = example_inputs(module, path, size)
        return None if images is None else on_device_of(module_at(module, path), images)

    @override
    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Return a context in which the module's ``configure_model`` builds the network."""
        yield

    # Set-up

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        # Loaders, which may be asked for before the set-up, need the rules.
        group = new_group(range(self.world_size), self.time_limit, backend="gloo")
        assert group is not None
        groups = [new_group([rank], self.time_limit) for rank in range(self.world_size)]
        self._alone = groups[self.global_rank]
        link = GlooLink(group, self.global_rank, self.world_size)
        has_devices = dist.group.WORLD is not None and dist.get_backend() != "gloo"
        devices = DeviceLink(dist.group.WORLD, self.root_device) if has_devices else None
        self.places = Places(self.global_rank, self.world_size, link, devices)

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        module = self.lightning_module
        assert module is not None
        self._check()
        self._failed = False
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        path = find_network(module, self.submodule)
        broadcast_weights(module, self.time_limit)
        if trainer.state.fn == TrainerFn.FITTING:
            # The optimizers are created with the whole network, because their groups are those of a checkpoint.
            self.setup_optimizers(trainer)
        network = module_at(module, path)
        if self._layout is None or self._layout[0] is not network:
            self._layout = (network, self._layout_of(trainer, path))
        assert self.places is not None
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set outside the class
        # Before the division, because logs change metrics as well, and changes are undone in reverse order.
        self._replaced.callback(share_metrics(self.places, [module, *callbacks]))
        self._divide(network, self._layout[1])
        for optimizer in self.optimizers:
            self._replaced.callback(hide_foreign_gradients(self.places, optimizer).remove)
        self.setup_precision_plugin()
        allow_skipped_steps(trainer)
        self._same_random_numbers()
        self._replaced.enter_context(metrics_of_one_process())
        if trainer.state.fn == TrainerFn.FITTING:
            callbacks.insert(0, EndTogether(partial(end_together, self.places, self.placement.ranks(0))))
            self._replaced.callback(callbacks.remove, callbacks[0])
        self._entered.enter_context(self.places)

    def _layout_of(self, trainer: Trainer, path: str) -> ChosenLayout:
        example = partial(example_inputs, trainer.lightning_module, path)
        network = module_at(trainer.lightning_module, path)
        return self.request.choose(network, trainer, trainer.world_size, self.root_device, example)

    def _divide(self, network: nn.Module, layout: ChosenLayout) -> None:
        """Divide the network, and give all parameters and buffers of the module their places."""
        assert self.lightning_module is not None
        placement = self.request.placement_on(self.world_size, layout.microbatches)
        assert self.places is not None
        self._connections = transport = Transport(placement, self.time_limit, self.root_device)
        ahead = AHEAD if transport.has_tags else 0
        placed = PlacedNetwork(network, layout.cuts, self.places, transport, ahead, self.lightning_module)
        self._forward = DividedForward(placed)
        self._replaced.callback(self._forward.remove)
        self._placed = PlacedModule(self.lightning_module, placed, self.places)
        self._logs = PlacedLogs(self.lightning_module, self.places)
        self._replaced.callback(self._logs.remove)

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
        arguments = dataloader, ranks, self._rules, self.placement, self._most
        if trainer.state.fn == TrainerFn.PREDICTING:
            return PlacedPredictionLoader(*arguments, has_rows=self.is_global_zero)
        return PlacedLoader(*arguments)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        return FailingTogetherDDPStrategy.batch_to_device(self, batch, device, dataloader_idx)

    # Steps

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        pass

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
        return self._step("training_step", self.precision_plugin.train_step_context(), args, kwargs)

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

    @after_the_lost_rank
    def _step(self, name: str, context: AbstractContextManager[Any], args: Sequence[Any], kwargs: Any) -> Any:
        assert self._logs is not None
        with context, self._logs.step(), self._one_process():
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

    @override
    @after_the_lost_rank
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward, and bring each gradient to the place of its parameter."""
        module = self.lightning_module
        assert module is not None
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        with self._one_process():
            self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        self._rules.settle_gradients(module.parameters())
        if not self._accumulates:
            assert self._placed is not None
            self._placed.finish_gradients()
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        return FailingTogetherDDPStrategy.optimizer_step(self, *args, **kwargs)

    # Collectives

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a value that all ranks have.

        Each rank has counted the whole batch, so means and sums combine nothing. Only the ranks' own values, such as a
        signal that one rank has received, have a largest value that is not the same on each rank.
        """
        if isinstance(tensor, Tensor):
            tensor = self._rules.everywhere(tensor.detach(), "reduce")
        is_extreme = reduce_op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN) or str(reduce_op).lower() in ("max", "min")
        return FailingTogetherDDPStrategy.reduce(self, tensor, group, reduce_op) if is_extreme else tensor

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
        return self.lightning_module.state_dict() if self._placed is None else self._placed.state_on_rank_zero()

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        FailingTogetherDDPStrategy.load_model_state_dict(self, checkpoint, strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state, on rank 0 with the values of all ranks. All ranks must call this."""
        optimizer = getattr(optimizer, "optimizer", optimizer)  # Lightning may have wrapped the optimizer.
        return optimizer.state_dict() if self._placed is None else self._placed.optimizer_state_on_rank_zero(optimizer)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self._placed is not None
        self._placed.load_optimizer_states(self.optimizers, checkpoint["optimizer_states"])

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self._placed is not None:
            # Callbacks may have added values of their own, such as averaged weights.
            checkpoint = self._placed.on_rank_zero(checkpoint)
        FailingTogetherDDPStrategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    # Facts

    @property
    def _network(self) -> PlacedNetwork:
        assert self._forward is not None, "the strategy has been set up"
        return self._forward.placed

    @override
    def panel_rows(self, batch_size: int | None) -> list[tuple[str, str]]:
        placed, placement = self._network, self._transport().placement
        rows = describe_pipeline(
            placement, placed.division.graphs(), self.parameters_per_device, self.request, batch_size
        )
        return rows if placed.one_microbatch is None else [*rows, ("one microbatch", placed.one_microbatch)]

    @override
    def differences(self, batch_size: int | None) -> list[str]:
        return differences_of_pipeline(self._network.division.network, self._transport().placement, batch_size)

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
        pass

    # The end

    @override
    def teardown(self) -> None:
        """Bring the whole network back to all ranks. After a failure each rank keeps the values that it has."""
        places, self.places = self.places, None
        # If the set-up has failed, there is nothing to bring back, and the other ranks may have ended.
        self._replaced.close()
        self._in_parts = self._placed is not None and self._failed
        if self._placed is not None and not self._failed:
            self._placed.restore(self.optimizers)
            assert places is not None
            self._entered.close()
            places.messages.close()
            self._transport().close()
        self._entered.close()
        self._connections = self._forward = self._placed = self._logs = None
        FailingTogetherDDPStrategy.teardown(self)
