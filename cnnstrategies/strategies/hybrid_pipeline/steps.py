"""The steps of a divided module: from the batches that the first stage loads to what Lightning gets of them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from cnnstrategies.data.sampling import dealt
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.batch import Batch
from cnnstrategies.pipeline.losses import MeanLoss, PartialLoss, WeighedLoss, with_gradients
from cnnstrategies.pipeline.probes import Rows
from cnnstrategies.pipeline.step import RandomState
from cnnstrategies.strategies.differences import has_mean_loss
from cnnstrategies.strategies.hybrid_pipeline.batches import check_forms, seen
from cnnstrategies.strategies.hybrid_pipeline.contract import check_loss
from cnnstrategies.strategies.hybrid_pipeline.divided_module import DividedModule
from cnnstrategies.strategies.hybrid_pipeline.hooks import HookWatch
from cnnstrategies.strategies.hybrid_pipeline.inputs import Inputs
from cnnstrategies.strategies.hybrid_pipeline.layout import warn_of_small_microbatches
from cnnstrategies.strategies.hybrid_pipeline.placeholders import NetworkStandIn
from cnnstrategies.strategies.shadow import NoCollectives, copy_metrics, same_random_numbers, shadow_of

P = ParamSpec("P")
T = TypeVar("T")


class StepLoss(WeighedLoss):
    """What ``training_step`` returns for a part of the batch, when the network returns that part's outputs.

    The step runs on a copy of the module: nothing is logged, counted or stored, and no random number used up. It runs
    once for each microbatch, with a few samples more, and once for the whole batch.
    """

    def __init__(self, divided: DividedModule) -> None:
        super().__init__(self._run, list(divided.own.values()))
        self._divided = divided
        self._device = divided.pipeline.device
        self._stand_in = NetworkStandIn(divided.pipeline.module, divided.path, divided.network)
        self._metrics = copy_metrics(divided.module)
        self.arguments: tuple[Sequence[Any], Mapping[str, Any]] = (), {}

    def begin(self, batch: Batch) -> None:
        """Start on another batch."""
        super().begin(batch)
        self._random = RandomState(self._device)

    def _run(self, outputs: Any, rows: Rows | None) -> Tensor:
        divided = self._divided
        self._stand_in.put(outputs)
        self._stand_in.training = divided.stand_in.training
        shadow = shadow_of(divided.module, divided.path, self._stand_in, self._metrics)
        args, kwargs = self._with_batch(seen(self._batch, rows, self._device))
        watched = NoCollectives(divided.module, "training_step") if self.thorough else nullcontext()
        with same_random_numbers(self._device), watched:
            self._random.restore()
            return loss_of(divided.module, shadow.training_step(*args, **kwargs))

    def _with_batch(self, batch: Any) -> tuple[list[Any], dict[str, Any]]:
        """The step's arguments with another batch in the place of theirs."""
        args, kwargs = self.arguments
        return ([batch, *args[1:]], dict(kwargs)) if args else ([], {**kwargs, "batch": batch})


def loss_of(module: LightningModule, output: Any) -> Tensor:
    """The loss of what a training step has returned; a ConfigurationError if it is none."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise ConfigurationError(
            f"{type(module).__name__}.training_step returned {type(loss).__name__}: a pipeline's gradients are "
            "computed already; return the loss"
        )
    return loss


class Steps:
    """Runs them; each method is a collective."""

    def __init__(self, divided: DividedModule, fitting: bool) -> None:
        self.divided = divided
        self.watch = HookWatch(divided)
        self._pipeline = pipeline = divided.pipeline
        self._device = pipeline.device
        self._trainer: Any = divided.module.trainer
        self._inputs = Inputs(divided.module, divided.path, divided.network, self._device)
        self._loss: PartialLoss | None = None
        if fitting:
            module: Any = divided.module
            has_mean = has_mean_loss(module)
            self._loss = MeanLoss(module.loss, module.loss_weight) if has_mean else StepLoss(divided)
        self._batch: Batch | None = None
        self._loss_checked = False
        self._accumulates = False
        self.overflow = Overflow(self._device, pipeline.placement.world_size)

    def load(self, batch: Any, dataloader: int) -> Any:
        """Make the global batch known, with this rank's part of it, on its device; None where it has none.

        Gives it as every rank sees it: images by shape alone, everything else in full.
        """
        images, rest, form = (None, (), None) if batch is None else self._inputs.take(batch, dataloader)
        # Samples of a replica's usual batch, where batch normalisation trains on the microbatches.
        usual = getattr(self._trainer.train_dataloader, "usual", None) if self._trainer.training else None
        with self._announced("share_batch"):
            self._batch = shared = self._pipeline.share(images, *rest, form=form, usual=usual)
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
        """Run ``training_step`` for the loaded batch; the loss that it returns brings the gradients in its backward."""
        pipeline, plugin = self._pipeline, self._trainer.precision_plugin
        batch = self._take_batch()
        if not self._loss_checked:
            warn_of_small_microbatches(self.divided.network, batch.split.sizes)
        scaler = getattr(plugin, "scaler", None)
        # Left on the device: reading a number there would wait for all that was computed.
        scale = 1.0 if scaler is None else scaler.scale(torch.ones((), device=self._device))
        with plugin.train_step_context():
            assert self._loss is not None
            if isinstance(self._loss, StepLoss):
                self._loss.arguments = args, kwargs
                self._loss.thorough = not self._loss_checked
                self._loss.at_once = self._loss.thorough or self._trainer.is_last_batch
            gradients, local = pipeline.train(batch, self._loss, scale * self._weight(), self._accumulates)
            if scaler is not None:
                self.overflow.share(gradients, self._accumulates)
            outputs = self._gather(batch, local)
            with nullcontext() if self._loss_checked else self.watch.watching(self._step_name):
                output = self._call("training_step", outputs, args, kwargs)
        loss = loss_of(self.divided.module, output)
        self._check_loss(loss)
        loss = hand_over(loss, gradients, scale, pipeline.parameters)
        return {**output, "loss": loss} if isinstance(output, dict) else loss

    def _weight(self) -> float:
        """That of the batch among those whose gradients are accumulated, by its samples."""
        sampler = dealt(self._trainer)
        batches = self._trainer.num_training_batches
        return 1.0 if sampler is None else sampler.weight(self._trainer.fit_loop.batch_idx, batches, "by_sample")

    def evaluate(self, step: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a step that trains nothing for the loaded batch, with what the trainer calls it with."""
        batch = self._take_batch()
        outputs = self._gather(batch, self._pipeline.evaluate(batch))
        return self._call(step, outputs, args, kwargs)

    @property
    def _step_name(self) -> str:
        return f"{type(self.divided.module).__name__}.training_step"

    @property
    def _sees_batch(self) -> bool:
        # Predictions are collected from all ranks: each row may be there once only.
        return not self._trainer.predicting or self._trainer.is_global_zero

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
        with self._announced("gather_outputs"):
            return self._pipeline.gather(batch, outputs)

    def _call(self, step: str, outputs: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The user's step for the whole batch, on every rank."""
        if not self._sees_batch:
            outputs = tree_map(lambda leaf: leaf[:0] if isinstance(leaf, Tensor) else leaf, outputs)
        self.divided.stand_in.put(outputs)
        return getattr(self.divided.module, step)(*args, **kwargs)

    def _check_loss(self, loss: Tensor) -> None:
        """In an epoch's first step, compare what training_step returned with what the last stage has trained."""
        if self._loss_checked:
            return
        self._loss_checked = True
        with self._announced("gather_outputs"):
            trained = float(self._pipeline.mean_loss())
        check_loss(loss.detach(), trained, isinstance(self._loss, MeanLoss))

    def _announced(self, action: str) -> AbstractContextManager[None]:
        """Tell the Trainer's profiler, as Lightning does of the strategy's own functions."""
        name = f"[Strategy]{type(self._trainer.strategy).__name__}.{action}"
        announced: AbstractContextManager[None] = self._trainer.profiler.profile(name)
        return announced


def hand_over(
    loss: Tensor, gradients: Sequence[Tensor | None], scale: float | Tensor, parameters: Sequence[nn.Parameter]
) -> Tensor:
    """The loss that Lightning goes backward from, with its accumulation, loss scale and hooks; it has the gradients.

    A stage that is frozen has nothing to get.
    """
    if not parameters:
        return loss.detach().clone().requires_grad_()
    return with_gradients(loss, gradients, scale, parameters)


def clip_by_joint_norm(optimizer: Optimizer, clip_val: int | float, counts: bool, device: torch.device) -> None:
    """Clip this stage's gradients by the norm over those of all stages, of which one replica counts; a collective."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    squares = torch.zeros((), dtype=torch.float64, device=device)
    if counts and parameters:
        squares = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).double() ** 2
    dist.all_reduce(squares)
    if parameters:
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_val, squares.sqrt().to(parameters[0].dtype))


def clip_by_value(optimizer: Optimizer, clip_val: int | float) -> None:
    """Clip each gradient that this stage has; torch's own function fails where there is none."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if parameters:
        torch.nn.utils.clip_grad_value_(parameters, clip_val)


class Overflow:
    """Has every rank find an overflow that one of them has, so that all skip the step and lower the scale."""

    def __init__(self, device: torch.device, world_size: int) -> None:
        self._found = torch.zeros((), device=device)
        self._world_size = world_size

    def share(self, gradients: Sequence[Tensor | None], more: bool) -> None:
        """Look through the gradients of a batch; a collective, once for each step of the optimizer.

        They are made infinite where another rank has found an overflow. Where there is ``more`` before the optimizer's
        step, what was found is kept until then.
        """
        own = [gradient for gradient in gradients if gradient is not None]
        if own:
            finite = torch.isfinite(torch.nn.utils.get_total_norm(own, float("inf")))
            self._found = torch.maximum(self._found, 1.0 - finite.float())
        if more:
            return
        if self._world_size > 1:
            dist.all_reduce(self._found, op=ReduceOp.MAX)
        if own:
            own[0].masked_fill_(self._found > 0, float("inf"))
        self._found = torch.zeros_like(self._found)
