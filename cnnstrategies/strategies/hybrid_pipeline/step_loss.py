"""The loss that the last stage trains: the module's own step for each microbatch, or its method ``loss``."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.batch import Batch
from cnnstrategies.pipeline.losses import MeanLoss, PartialLoss, WeighedLoss
from cnnstrategies.pipeline.step import RandomState
from cnnstrategies.strategies.differences import has_mean_loss
from cnnstrategies.strategies.hybrid_pipeline.batches import form_of, seen, shapes_of_inputs
from cnnstrategies.strategies.hybrid_pipeline.divided_module import DividedModule
from cnnstrategies.strategies.hybrid_pipeline.images import ImagesElsewhere
from cnnstrategies.strategies.hybrid_pipeline.random_numbers import Draws
from cnnstrategies.strategies.hybrid_pipeline.shadow import NoCollectives, copy_metrics, same_random_numbers, shadow_of
from cnnstrategies.strategies.hybrid_pipeline.watch import HookWatch


class StepLoss(WeighedLoss):
    """What ``training_step`` returns for a part of the batch, when the network returns that part's outputs.

    The step runs on a copy of the module: nothing is logged, counted or stored, and no random number used up. It runs
    on the whole batch once more for that.

    Args:
        divided: The module.
        watch: Looks at what its code does with weights.
        device: Where the stage runs.
    """

    def __init__(self, divided: DividedModule, watch: HookWatch, device: torch.device) -> None:
        super().__init__(self._run, list(divided.own.values()))
        self._divided = divided
        self._watch = watch
        self._device = device
        self._stand_in = divided.another_stand_in()
        self._metrics = copy_metrics(divided.module)
        self._arguments: tuple[Sequence[Any], Mapping[str, Any]] = (), {}
        self._draws: Draws | None = None

    def called_with(self, args: Sequence[Any], kwargs: Mapping[str, Any], draws: Draws | None) -> None:
        """Take note of what the trainer calls ``training_step`` with, and of the random numbers that it draws."""
        self._arguments = args, kwargs
        self._draws = draws
        self.same_draws = draws is not None

    def begin(self, batch: Batch, microbatches: Sequence[int]) -> None:
        """Start on another batch."""
        super().begin(batch, microbatches)
        self._random = RandomState(self._device)

    def _run(self, outputs: Any, microbatch: int | None) -> Tensor:
        divided, draws = self._divided, self._draws
        computed = shapes_of_inputs(self._batch) if form_of(self._batch).computes else None
        called = None if draws is None else partial(draws.at_call.restore, self._device)
        self._stand_in.put(outputs, computed, called)
        self._stand_in.training = divided.stand_in.training
        shadow = shadow_of(divided.module, divided.path, self._stand_in, self._metrics)
        args, kwargs = list(self._arguments[0]), dict(self._arguments[1])
        batch = seen(self._batch, microbatch, self._device)
        if args:
            args[0] = batch
        else:
            kwargs["batch"] = batch
        with same_random_numbers(self._device), ExitStack() as stack:
            if draws is None:
                self._random.restore()
            else:
                draws.start.restore(self._device)
            if self.thorough:
                stack.enter_context(self._watch.watching_step(copies_alone=True))
                stack.enter_context(NoCollectives(divided.module, "training_step"))
            return loss_of(divided.module, shadow.training_step(*args, **kwargs))


def loss_of(module: LightningModule, output: Any) -> Tensor:
    """The loss of what a training step has returned.

    Raises:
        ConfigurationError: It has returned none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise ConfigurationError(
            f"{type(module).__name__}.training_step returned {type(loss).__name__}: a pipeline's gradients are "
            "computed already; return the loss"
        )
    if isinstance(loss, ImagesElsewhere):
        raise ConfigurationError(
            f"{type(module).__name__}.training_step returned a loss that is computed from the images of the batch, "
            "which only the first stage has: with strategy hybrid_pipeline have them in the batch a second time, as "
            "targets"
        )
    return loss


def loss_for(divided: DividedModule, watch: HookWatch, device: torch.device) -> PartialLoss:
    """How the loss of a divided module is computed in parts.

    Args:
        divided: The module.
        watch: Looks at what its code does with weights.
        device: Where the stage runs.
    """
    module: Any = divided.module
    return MeanLoss(module.loss, module.loss_weight) if has_mean_loss(module) else StepLoss(divided, watch, device)
