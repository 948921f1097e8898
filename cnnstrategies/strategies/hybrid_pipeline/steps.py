"""Run the module's own steps and backwards on every rank, once, with the whole batch."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from torch import Tensor
from torch.optim import Optimizer

from cnnstrategies._torch_private import parameters_in
from cnnstrategies.pipeline.call_sums import copy_changed_gradients
from cnnstrategies.pipeline.placed_network import PlacedNetwork
from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.shares.samplers import dealt
from cnnstrategies.strategies.hybrid_pipeline.connections import RunConnections
from cnnstrategies.strategies.hybrid_pipeline.descriptions import warn_after_first_batch
from cnnstrategies.strategies.hybrid_pipeline.logs import PlacedLogs
from cnnstrategies.strategies.hybrid_pipeline.placed_module import PlacedModule


class UserSteps:
    """The steps and backwards of a module whose network is divided.

    Args:
        module: The module.
        placed: The module's divided network.
        values: The module's parameters and buffers.
        logs: The module's logs.
        connections: The connections of this rank.
    """

    def __init__(
        self,
        module: LightningModule,
        placed: PlacedNetwork,
        values: PlacedModule,
        logs: PlacedLogs,
        connections: RunConnections,
    ) -> None:
        self._module, self._placed, self._values, self._logs = module, placed, values, logs
        self._connections = connections
        self._has_trained = False  # Whether a training step has run.

    def run(
        self, name: str, context: AbstractContextManager[Any], is_last: bool, args: Sequence[Any], kwargs: Any
    ) -> Any:
        """Run a step of the module.

        Args:
            name: Name of the step's method.
            context: The precision's context for the step.
            is_last: As in :meth:`backward`.
            args: Positional arguments of the step.
            kwargs: Keyword arguments of the step.
        """
        is_first = False
        watched: AbstractContextManager[None] = nullcontext()
        if name == "training_step":
            is_first, self._has_trained = not self._has_trained, True
            self._placed.window_ends, self._placed.calls = is_last and self._module.automatic_optimization, 0
            if is_first:
                self._placed.runner.usual = _usual_samples(self._module.trainer, self._placed.runner.placement)
            if self._placed.declared is not None:
                watched = self._placed.declared.step((args, kwargs))
        with context, self._logs.step(), self._connections.one_process(), watched:
            result = getattr(self._module, name)(*args, **kwargs)
        if is_first:
            warn_after_first_batch(self._placed)
        return result

    def backward(
        self,
        loss: Tensor,
        optimizer: Optimizer | None,
        precision: Precision,
        is_last: bool,
        args: Sequence[Any],
        kwargs: Any,
    ) -> Tensor:
        """Run the backward of a step, and bring each gradient to the place of its parameter.

        Args:
            loss: The loss of the batch.
            optimizer: The optimizer that makes a step after the backward; None under manual optimization.
            precision: The precision of the run.
            is_last: Whether this is the last of the batches whose gradients are accumulated.
            args: Other positional arguments of the backward.
            kwargs: Keyword arguments of the backward.

        Returns:
            The loss without a graph.
        """
        if (weight := _weight_of_batch(self._module.trainer)) != 1:
            loss = loss * weight
        loss = precision.pre_backward(loss, self._module)
        with self._connections.one_process():
            precision.backward(loss, self._module, optimizer, *args, **kwargs)
        self._connections.places.settle_gradients(parameters_in(self._module))
        if is_last:
            self._values.finish_gradients()
            with self._connections.places.local():
                copy_changed_gradients(self._placed)
        return precision.post_backward(loss, self._module)


def _weight_of_batch(trainer: Trainer) -> float:
    """Return the factor of the current batch's loss among the batches whose gradients are accumulated.

    The sampler of this package's data modules divides the samples of an optimizer's step among these batches, whose
    sizes may differ. Each sample has the same weight.
    """
    sampler = dealt(trainer)
    if sampler is None:
        return 1.0
    return sampler.weight(trainer.fit_loop.batch_idx, trainer.num_training_batches, "by_sample")


def _usual_samples(trainer: Trainer, placement: Placement) -> int:
    """Return the number of samples of a global batch that is not the last batch of an epoch; 0 if it is not known."""
    of_replica = getattr(trainer.train_dataloader, "usual", None)
    return (of_replica or 0) * placement.replicas[0]
