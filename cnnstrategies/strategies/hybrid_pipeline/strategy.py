"""Pipeline training in which every rank runs the module's steps once, with the whole batch, as one device does."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from warnings import catch_warnings, filterwarnings
from zipfile import is_zipfile

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from cnnstrategies._lightning_private import allow_skipped_steps
from cnnstrategies.checkpoints.io import load_mapped
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.stage_runner import StageRunner
from cnnstrategies.pipeline.task_times import TaskTimes
from cnnstrategies.placed import Places
from cnnstrategies.strategies.batch_form import put_together, take_apart
from cnnstrategies.strategies.hybrid_pipeline.base import PipelineStrategy
from cnnstrategies.strategies.hybrid_pipeline.checks import placement_for
from cnnstrategies.strategies.hybrid_pipeline.descriptions import differences
from cnnstrategies.strategies.hybrid_pipeline.divided_run import DividedRun
from cnnstrategies.strategies.hybrid_pipeline.epoch_ends import summarise_whole
from cnnstrategies.strategies.hybrid_pipeline.loading import PlacedLoader
from cnnstrategies.strategies.hybrid_pipeline.metric_values import share
from cnnstrategies.strategies.hybrid_pipeline.order import settle_verdicts, tell_news
from cnnstrategies.strategies.hybrid_pipeline.own_stage import meta_tensors_stay, put_others_away
from cnnstrategies.strategies.hybrid_pipeline.placed_module import PlacedModule
from cnnstrategies.strategies.hybrid_pipeline.stage_shares import use_shares
from cnnstrategies.strategies.hybrid_pipeline.start_values import broadcast_weights
from cnnstrategies.strategies.joined_parts import count_samples, first_rows
from cnnstrategies.strategies.lost_rank import after_the_lost_rank

if TYPE_CHECKING:
    from cnnstrategies.planning.lighter import LighterPlan
    from cnnstrategies.planning.memory import PeakMemory

T = TypeVar("T")


class HybridPipelineStrategy(PipelineStrategy):
    """Pipeline training in which every rank runs the module's steps, hooks and callbacks as one device does.

    The module keeps its own network on every rank. Parameters and buffers of other stages are foreign tensors, see
    :mod:`cnnstrategies.placed`. A call of the network runs the stages for all microbatches of the batch, and its result
    is in the last stage. Whatever the module computes from the result follows the rules for placed tensors.

    The arguments are those of :class:`.PipelineStrategy`. The schedule is ``gpipe``, or ``1f1b`` for modules that
    declare their loss, see :mod:`cnnstrategies.pipeline.declared_loss`.
    """

    has_global_batches = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._run: DividedRun | None = None
        self._accumulates = False

    # Set-up

    @override
    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Return a context in which the module's ``configure_model`` builds the network."""
        self._check()
        with self._chosen.building(self._module, self._connected.places, self.placement):
            yield

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        module, fitting = self._module, trainer.state.fn == TrainerFn.FITTING
        self._check()
        self._failed = False
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(module)
        with meta_tensors_stay(module):
            self.model_to_device()
        is_whole = self._chosen.is_whole(module)
        if not is_whole:
            put_others_away(module, self._connected.places, self.root_device)
        else:
            broadcast_weights(module, self.time_limit)
            if fitting:
                # The optimizers are created with the whole network, because automatic cuts need the optimizers.
                self.setup_optimizers(trainer)
        if fitting:
            summarise_whole(trainer, module, trainer.callbacks)  # type: ignore[attr-defined]  # set outside the class
        layout = self._chosen.choose_layout(trainer, self.root_device)
        placement = placement_for(self.request, layout.microbatches, self.world_size)
        if self._history is not None:
            placement = replace(placement, shares=self._history.shares)
        self._run = run = DividedRun(module, self._chosen, self._connected, self.root_device)
        run.divide(placement)
        if fitting and not is_whole:
            with self._connected.places:
                self.setup_optimizers(trainer)
        # In a validation after a training, rank 0 has the whole states of the training's optimizers.
        run.divide_optimizers(self.optimizers if fitting else [])
        self.setup_precision_plugin()
        allow_skipped_steps(trainer)
        run.begin(self._gather)

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _divided(self) -> DividedRun:
        assert self._run is not None, "the strategy has been set up"
        return self._run

    @property
    def _values(self) -> PlacedModule | None:
        """The module's parameters and buffers; None outside of a run."""
        return None if self._run is None else self._run.values

    # Devices and data

    @override
    def process_dataloader(self, dataloader: object) -> Any:
        ranks = self._loading_ranks(dataloader)
        predicts = self._module.trainer.state.fn == TrainerFn.PREDICTING
        loader = dataloader if predicts else self._by_shares(dataloader, ranks)
        return PlacedLoader(loader, ranks, self._connected.places, self.placement, self._most, predicts=predicts)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self._connections is not None and self._connections.is_connected:
            use_shares(self._module.trainer, self._connections.transport, self._history)
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
        return predictions_on_rank_zero(self._connected.places, result)

    @after_the_lost_rank
    def _step(self, name: str, context: AbstractContextManager[Any], args: Sequence[Any], kwargs: Any) -> Any:
        return self._divided.steps.run(name, context, not self._accumulates, args, kwargs)

    @override
    @after_the_lost_rank
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward, and bring each gradient to the place of its parameter."""
        self.pre_backward(closure_loss)
        steps, is_last = self._divided.steps, not self._accumulates
        closure_loss = steps.backward(closure_loss, optimizer, self.precision_plugin, is_last, args, kwargs)
        self.post_backward(closure_loss)
        tell_news(self._divided.placed)
        return closure_loss

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        settle_verdicts(self._divided.placed)

    # Checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state dict, on rank 0 with the values of all ranks. All ranks must call this."""
        if self._in_parts:
            raise RuntimeError(
                "the run has failed, and each rank has the weights of its own stage alone: there is nothing whole to "
                "save; continue from the last checkpoint"
            )
        if self._values is not None:
            settle_verdicts(self._divided.placed)
            return self._values.state_on_rank_zero()
        if not self._chosen.is_whole(self._module):
            raise ConfigurationError(
                "the run has ended, and each rank has only the weights of its own stage, because configure_model has "
                "built the network: let ModelCheckpoint save it during fit"
            )
        return self._module.state_dict()

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint. A rank that has only its own stage reads only the values of this stage from the file."""
        if self._chosen.is_whole(self._module) or not is_zipfile(checkpoint_path):
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
        return optimizer.state_dict() if self._run is None else self._run.optimizer_state(optimizer)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self._values is not None
        self._values.load_optimizer_states(self.optimizers, checkpoint["optimizer_states"])

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self._values is not None:
            # Callbacks may have added values of their own, such as averaged weights.
            checkpoint = self._values.on_rank_zero(checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    # Facts

    @override
    def panel_rows(self, batch_size: int | None) -> list[tuple[str, str]]:
        return self._divided.panel_rows(batch_size)

    @override
    def differences(self, batch_size: int | None) -> list[str]:
        return differences(self._divided.placed, batch_size)

    @override
    def on_all_ranks(self, values: T) -> T:
        result: T = share(self._connected.places, values)
        return result

    @override
    def holders_of(self, tensor: Tensor) -> tuple[int, ...] | None:
        return self._connected.places.place_of(tensor)

    @override
    def local_code(self) -> AbstractContextManager[None]:
        return self._connected.places.local()

    @property
    @override
    def predicted_peaks(self) -> "Sequence[PeakMemory]":
        return self._divided.predicted_peaks()

    @property
    @override
    def lighter_plans(self) -> "Sequence[LighterPlan]":
        return self._divided.lighter_plans()

    @property
    @override
    def pipeline(self) -> TaskTimes | None:
        """The times of this rank's stage; None outside of a run."""
        return None if self._values is None else self._divided.placed.runner.times

    @property
    def timed_stages(self) -> StageRunner:
        """The stages, whose microbatches can be timed, after the set-up."""
        return self._divided.placed.runner

    @property
    @override
    def parameters_per_device(self) -> list[int]:
        """Numbers of parameters that the devices of each stage hold."""
        return self._divided.parameters_of_stages()

    # The end

    @override
    def teardown(self) -> None:
        """Bring the whole network back to all ranks. After a failure each rank keeps the values that it has."""
        (run, self._run), (connections, self._connections) = (self._run, None), (self._connections, None)
        self._in_parts = run is not None and run.end(self._failed)
        if self._in_parts:
            self._chosen.check_again()
        if connections is not None:
            connections.drop()
        with meta_tensors_stay(self.lightning_module):
            super().teardown()


def predictions_on_rank_zero(places: Places, predictions: Any) -> Any:
    """Return the result of a ``predict_step``, on rank 0 with the values of all tensors. All ranks must call this.

    Lightning's writers write the predictions of all ranks, so other ranks get the result for a batch without samples.
    Code that only some ranks run may read the returned tensors, because the rules for placed tensors do not apply to
    them.

    Args:
        places: The rules of this rank.
        predictions: The result, possibly in nested containers.
    """
    try:
        plain = take_apart(predictions, lambda tensor, _: tensor.detach())
    except ConfigurationError:  # The result contains an object that cannot be sent, such as an image of PIL.
        plain = None
    form = predictions if plain is None else plain
    tensors = [leaf for leaf in tree_leaves(form) if isinstance(leaf, Tensor)]
    copies = places.bring_all(tensors, (0,), "predictions")

    def unmarked(tensor: Tensor) -> Tensor:
        return copies.get(id(tensor), tensor).clone()

    with places.local():
        if places.rank == 0:
            form = tree_map_only(Tensor, unmarked, form)
        else:
            # Items of lists may belong to samples as well.
            form = form if plain is None else first_rows(plain, count_samples(plain), 0)
            form = tree_map_only(Tensor, _without_rows, form)
    return form if plain is None else put_together(form)


def _without_rows(tensor: Tensor) -> Tensor:
    return torch.empty((0, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
