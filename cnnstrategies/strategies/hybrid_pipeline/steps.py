"""The steps of a divided module: from the batches that the first stage loads to what Lightning gets of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils._pytree import tree_map

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.batch import Batch
from cnnstrategies.pipeline.losses import MeanLoss, PartialLoss, WeighedLoss
from cnnstrategies.pipeline.step import RandomState
from cnnstrategies.strategies.differences import has_mean_loss
from cnnstrategies.strategies.hybrid_pipeline.batches import check_forms, form_of, seen
from cnnstrategies.strategies.hybrid_pipeline.contract import check_loss
from cnnstrategies.strategies.hybrid_pipeline.divided_module import DividedModule
from cnnstrategies.strategies.hybrid_pipeline.gradients import Overflow, hand_over
from cnnstrategies.strategies.hybrid_pipeline.images import ImagesElsewhere
from cnnstrategies.strategies.hybrid_pipeline.inputs import Inputs, with_batch
from cnnstrategies.strategies.hybrid_pipeline.layout import warn_of_small_microbatches
from cnnstrategies.strategies.hybrid_pipeline.shadow import (
    Draws,
    NoCollectives,
    RandomNumbers,
    copy_metrics,
    same_random_numbers,
    shadow_of,
)
from cnnstrategies.strategies.hybrid_pipeline.watch import HookWatch


class StepLoss(WeighedLoss):
    """What ``training_step`` returns for a part of the batch, when the network returns that part's outputs.

    The step runs on a copy of the module: nothing is logged, counted or stored, and no random number used up. It runs
    on the whole batch once more for that.
    """

    def __init__(self, divided: DividedModule, watch: HookWatch) -> None:
        super().__init__(self._run, list(divided.own.values()))
        self._divided = divided
        self._watch = watch
        self._device = divided.pipeline.device
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
        computed = self._batch.image_shapes if form_of(self._batch).computes else None
        called = None if draws is None else partial(draws.at_call.restore, self._device)
        self._stand_in.put(outputs, computed, called)
        self._stand_in.training = divided.stand_in.training
        shadow = shadow_of(divided.module, divided.path, self._stand_in, self._metrics)
        args, kwargs = with_batch(seen(self._batch, microbatch, self._device), *self._arguments)
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
    """The loss of what a training step has returned; a ConfigurationError if it is none."""
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


def loss_for(divided: DividedModule, watch: HookWatch) -> PartialLoss:
    """How the loss of a divided module is computed in parts."""
    module: Any = divided.module
    return MeanLoss(module.loss, module.loss_weight) if has_mean_loss(module) else StepLoss(divided, watch)


Announce = Callable[[str], AbstractContextManager[None]]


class Steps:
    """Runs them; each method is a collective.

    Attributes:
        overflow: The decision of all stages to skip a step.
    """

    def __init__(self, divided: DividedModule, plugin: Any, announce: Announce, fitting: bool) -> None:
        self.divided = divided
        self.watch = HookWatch(divided)
        self._pipeline = divided.pipeline
        self._device = divided.pipeline.device
        self._plugin = plugin
        self._announce = announce
        self._inputs = Inputs(divided, plugin)
        self._loss = loss_for(divided, self.watch) if fitting else None
        self._batch: Batch | None = None
        self._loss_checked = False
        self._accumulates = False
        self.overflow = Overflow(self._device, self._pipeline.placement.world_size)

    def load(self, batch: Any, dataloader: int) -> Any:
        """Make the global batch known, with this rank's part of it, on its device; None where it has none.

        Returns:
            The global batch as every rank sees it: images by shape alone, everything else in full.
        """
        images, rest, form = (None, (), None) if batch is None else self._inputs.take(batch, dataloader)
        with self._announce("share_batch"):
            self._batch = shared = self._pipeline.share(images, *rest, form=form, usual=self._usual)
        check_forms(shared)
        return seen(shared, None, self._device, none=not self._sees_batch)

    def begin_epoch(self) -> None:
        """Look anew which parameters are trained, and whether the loss is what the stages make of it."""
        self._loss_checked = False
        self._pipeline.refresh()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """The steps inside are followed by others before the optimizer's: replicas keep their gradients."""
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    def train(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run ``training_step`` for the loaded batch, with what the trainer calls it with.

        Returns:
            What it returns, with a loss whose backward brings the gradients.
        """
        pipeline = self._pipeline
        batch = self._take_batch()
        if not self._loss_checked:
            warn_of_small_microbatches(self.divided.network, batch.split)
        scaler = getattr(self._plugin, "scaler", None)
        # Left on the device: reading a number there would wait for all that was computed.
        scale = 1.0 if scaler is None else scaler.scale(torch.ones((), device=self._device))
        with self._plugin.train_step_context():
            assert self._loss is not None
            batch, draws = self._inputs.compute(batch, "training_step", args, kwargs)
            if isinstance(self._loss, StepLoss):
                self._loss.called_with(args, kwargs, draws)
                self._loss.thorough = not self._loss_checked
            gradients, local = pipeline.train(batch, self._loss, scale, self._accumulates, gather=True)
            if scaler is not None:
                self.overflow.share(gradients, self._accumulates)
            outputs = self._gather(batch, local)
            with nullcontext() if self._loss_checked else self.watch.watching_step():
                output = self._call("training_step", batch, outputs, args, kwargs, draws)
        loss = loss_of(self.divided.module, output)
        self._check_loss(loss)
        loss = hand_over(loss, gradients, scale, pipeline.parameters)
        return {**output, "loss": loss} if isinstance(output, dict) else loss

    def evaluate(self, step: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a step that trains nothing for the loaded batch, with what the trainer calls it with."""
        batch, draws = self._inputs.compute(self._take_batch(), step, args, kwargs)
        outputs = self._gather(batch, self._pipeline.evaluate(batch))
        return self._call(step, batch, outputs, args, kwargs, draws)

    @property
    def _usual(self) -> int | None:
        """Samples of a replica's usual batch, where batch normalisation trains on the microbatches."""
        trainer: Any = self.divided.module.trainer
        return getattr(trainer.train_dataloader, "usual", None) if trainer.training else None

    @property
    def _sees_batch(self) -> bool:
        # Predictions are collected from all ranks: each row may be there once only.
        trainer: Any = self.divided.module.trainer
        return not trainer.predicting or trainer.is_global_zero

    def _take_batch(self) -> Batch:
        if self._batch is None:
            raise ConfigurationError(
                "a step takes a dataloader_iter: with strategy hybrid_pipeline it must take the batch, as in "
                "training_step(self, batch, batch_idx)"
            )
        self._pipeline.module.training = self.divided.stand_in.training
        batch, self._batch = self._batch, None
        return batch

    def _gather(self, batch: Batch, outputs: dict[int, Any]) -> Any:
        with self._announce("gather_outputs"):
            return self._pipeline.gather(batch, outputs)

    def _call(
        self,
        step: str,
        batch: Batch,
        outputs: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        draws: Draws | None,
    ) -> Any:
        """The user's step for the whole batch, on every rank; it draws the same random numbers on all."""
        if not self._sees_batch:
            outputs = tree_map(lambda leaf: leaf[:0] if isinstance(leaf, Tensor) else leaf, outputs)
        stand_in, run = self.divided.stand_in, getattr(self.divided.module, step)
        computed = batch.image_shapes if form_of(batch).computes else None
        if draws is None:
            stand_in.put(outputs, computed)
            return run(*args, **kwargs)
        # On the first stage they go on from there, as on one device; elsewhere from where they were.
        after = RandomNumbers(self._device)
        first = self._pipeline.place.stage == 0
        at_call = after if first else draws.at_call
        stand_in.put(outputs, computed, lambda: at_call.restore(self._device))
        draws.start.restore(self._device)
        try:
            return run(*args, **kwargs)
        finally:
            if not first:
                after.restore(self._device)

    def _check_loss(self, loss: Tensor) -> None:
        """In an epoch's first step, compare what training_step returned with what the last stage has trained."""
        if self._loss_checked:
            return
        self._loss_checked = True
        with self._announce("gather_outputs"):
            trained = self._pipeline.mean_loss()
        check_loss(loss.detach(), trained, isinstance(self._loss, MeanLoss))
