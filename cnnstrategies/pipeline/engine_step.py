"""Run one batch on a rank: run the rank's tasks, and hold what each microbatch needs until its backward."""

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.engine_batch import Batch
from cnnstrategies.pipeline.engine_loss import MeanLoss
from cnnstrategies.pipeline.microbatches import Images
from cnnstrategies.pipeline.task_times import run_tasks
from cnnstrategies.pipeline.timetable import Task
from cnnstrategies.runtime.generator_states import GeneratorStates

if TYPE_CHECKING:
    from cnnstrategies.pipeline.engine import Pipeline


@dataclass
class Held:
    """The data of a microbatch that a rank holds between the microbatch's forward and backward.

    Attributes:
        leaves: For each stage that sent inputs, the inputs whose gradients must be sent back.
        roots: For each stage that received outputs, the gradient edges of these outputs. A gradient edge is the node of
            the autograd graph where a backward pass for the output starts; None if the output requires no gradient. In
            the last stage, the only key is None, and its value is a list with the gradient edge of the loss. The
            outputs themselves are not held, so that their memory can be freed.
        arguments: Arguments of the stage, if activations are recomputed; otherwise None.
        random: State of the random number generators before the forward, if activations are recomputed; otherwise None.
    """

    leaves: dict[int, list[Tensor]]
    roots: dict[int | None, list[GradientEdge | None]] = field(default_factory=dict)
    arguments: tuple[Any, ...] | None = None
    random: GeneratorStates | None = None


class Step:
    """The run of one batch on a rank, for training or evaluation.

    Args:
        pipeline: The rank's pipeline.
        batch: The batch.
        loss: Loss that can be computed for each microbatch; None for evaluation.
        scale: Factor by which the loss is multiplied.

    Attributes:
        outputs: In the last stage, the network's outputs for each microbatch of the rank. Empty in other stages.
        loss_sum: In the last stage, the part of the batch's loss that comes from the microbatches that the rank has run
            so far; 0 in other stages.
    """

    def __init__(
        self,
        pipeline: "Pipeline",
        batch: Batch,
        loss: MeanLoss | None = None,
        scale: float | Tensor = 1.0,
    ) -> None:
        self.pipeline = pipeline
        self.batch = batch
        self.loss = loss
        self.scale = scale
        self.channels = pipeline.channels[pipeline.module.training]
        self.outputs: dict[int, Any] = {}
        self.loss_sum = torch.zeros((), device=pipeline.device)
        self._held: dict[int, Held] = {}
        self._last: int | None = None  # Microbatch of this rank's last backward; None if the rank runs no microbatch.

    def train(self, more: bool) -> list[Tensor | None]:
        """Run all forward and backward passes.

        Args:
            more: Whether another batch follows before the optimizer's step.

        Returns:
            The gradients of the scaled loss; see :meth:`GradientReducer.finish`.
        """
        pipeline = self.pipeline
        tasks = [task for task in pipeline.tasks if self.batch.split.sizes[task.microbatch]]
        self._last = max((task.microbatch for task in tasks), default=None)
        pipeline.reducer.begin()
        pipeline.buffers.begin()

        def run(task: Task) -> None:
            if task.kind == "forward":
                self._forward(task.microbatch)
                return
            if task.microbatch == self._last and self.overlaps(task.microbatch):
                pipeline.buffers.send()
                if not more:
                    pipeline.reducer.overlap()
            self._backward(task.microbatch)

        try:
            self._run(tasks, run)
            with self.timed("reduce", None), pipeline.transport.collective("summing the gradients of the stage"):
                pipeline.buffers.send()
                gradients = pipeline.reducer.finish(keep=more)
                pipeline.buffers.finish()
        except BaseException:
            pipeline.reducer.abandon()
            pipeline.buffers.abandon()
            raise
        with self.timed("send", None):
            self.channels.finish()
        return gradients

    @torch.no_grad()
    def evaluate(self) -> None:
        """Run the forward passes of the rank's microbatches without autograd."""
        microbatches = [m for m in self.pipeline.own_microbatches if self.batch.split.sizes[m]]
        self._run([Task("forward", self.pipeline.place.stage, m) for m in microbatches], self._infer)
        self.channels.finish()

    def _run(self, tasks: Sequence[Task], run: Callable[[Task], None]) -> None:
        run_tasks(self.channels, tasks, self._size, self.pipeline.ahead, run, self.timed)

    def _infer(self, task: Task) -> None:
        microbatch, size = task.microbatch, self._size(task.microbatch)
        values, _ = self.channels.receive_forward(microbatch, size)
        result = self.pipeline.module(*self.channels.inputs(values, self._images(microbatch)))
        if self.pipeline.last:
            check_rows(result, self.batch.split.sizes[microbatch])
            self.outputs[microbatch] = result
        else:
            self.channels.send_forward(microbatch, size, self._named(result), training=False)

    def _forward(self, microbatch: int) -> None:
        pipeline, size = self.pipeline, self._size(microbatch)
        checkpointing = pipeline.activation_checkpointing
        again = checkpointing == "always" or (checkpointing == "except_last" and microbatch != self._last)
        with self.timed("receive", microbatch):
            values, leaves = self.channels.receive_forward(microbatch, size)
        held = self._held[microbatch] = Held(leaves)
        arguments = self.channels.inputs(values, self._images(microbatch))
        if again:
            held.arguments, held.random = arguments, GeneratorStates.current(pipeline.device)
        tracked = self.tracks(again)
        # Autocast caches converted weights. The cache is turned off if the forward runs without autograd: otherwise the
        # recomputation would use the cached weights, and the network's weights would get no gradients.
        enabled, dtype = self._autocast
        with (
            torch.set_grad_enabled(tracked),
            torch.autocast(pipeline.device.type, dtype, enabled=enabled, cache_enabled=tracked),
            pipeline.buffers.microbatch(),
            self.timed("forward", microbatch),
        ):
            result = pipeline.module(*arguments)
            if not pipeline.last:
                roots = self.channels.send_forward(microbatch, size, self._named(result), training=True)
                if not again:
                    held.roots.update((target, _edges(tensors)) for target, tensors in roots.items())
                return
            check_rows(result, self.batch.split.sizes[microbatch])
            self.outputs[microbatch] = tree_map(_detached, result)
            if not again:
                held.roots[None] = _edges([self.part_of_loss(result, microbatch)])

    def _backward(self, microbatch: int) -> None:
        with self.timed("receive", microbatch):
            gradients = self.channels.receive_backward(microbatch)
        held = self._held[microbatch]
        with self.timed("backward", microbatch):
            if held.arguments is not None:
                self._recompute(microbatch, held)
            self._backpropagate(held, gradients)
        self.channels.send_backward(microbatch, held.leaves)
        del self._held[microbatch]

    def _backpropagate(self, held: Held, gradients: dict[int, list[Tensor | None]]) -> None:
        roots: list[GradientEdge] = []
        starts: list[Tensor | None] = []
        for target, edges in held.roots.items():
            received = [None] * len(edges) if target is None else gradients[target]
            for root, start in zip(edges, received, strict=True):
                if root is not None and (target is None or start is not None):
                    roots.append(root)
                    starts.append(start)
        if roots:
            with torch.autocast(self.pipeline.device.type, enabled=False):
                torch.autograd.backward(roots, starts)

    def _recompute(self, microbatch: int, held: Held) -> None:
        assert held.arguments is not None
        assert held.random is not None
        present = GeneratorStates.current(self.pipeline.device)
        held.random.restore(self.pipeline.device)
        with self.pipeline.buffers.microbatch(again=True):
            result = self.pipeline.module(*held.arguments)
            if self.pipeline.last:
                held.roots[None] = _edges([self.part_of_loss(result, microbatch)])
            else:
                roots = self.channels.roots(self._named(result))
                held.roots.update((target, _edges(tensors)) for target, tensors in roots.items())
        present.restore(self.pipeline.device)

    def tracks(self, again: bool) -> bool:
        """Whether a forward runs with autograd.

        A forward that will be recomputed runs without autograd, unless the stage is compiled. For a compiled stage,
        torch would compile different code for a forward without autograd and for its recomputation, and the two might
        draw different random numbers.

        Args:
            again: Whether the forward will be recomputed for the backward.
        """
        return self.pipeline.compiled or not again

    def overlaps(self, microbatch: int) -> bool:
        """Whether the replicas of the stage may sum their gradients while their last backward passes run.

        Args:
            microbatch: The microbatch of this rank's last backward.
        """
        return self.pipeline.placement.end_together(self.pipeline.place.stage, self.batch.split.sizes, microbatch)

    def part_of_loss(self, outputs: Any, microbatch: int) -> Tensor:
        """Return a microbatch's part of the global batch's loss, multiplied by the scale.

        The part without the scale is also added to ``loss_sum``. The unscaled parts of all microbatches add up to the
        loss of the global batch.
        """
        assert self.loss is not None
        part = self.loss.part(outputs, microbatch)
        self.loss_sum = self.loss_sum + part.detach()
        return part * self.scale

    @cached_property
    def _autocast(self) -> tuple[bool, torch.dtype]:
        kind = self.pipeline.device.type
        return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    @cached_property
    def _kind(self) -> tuple[Hashable, ...]:
        return self.batch.image_shapes, self.batch.image_dtypes, self._autocast, torch.is_grad_enabled()

    def _size(self, microbatch: int) -> Hashable:
        """Return the size key of a microbatch.

        If two microbatches have equal size keys, their inputs and outputs have equal shapes and dtypes in every stage.
        """
        return self.batch.split.sizes[microbatch], *self._kind

    def _images(self, microbatch: int) -> Images | None:
        if self.batch.images is None:
            return None
        start, stop = self.batch.split.bounds[microbatch]
        microbatch_images: Images = tree_map(lambda images: images[start:stop], self.batch.images)
        return microbatch_images

    def _named(self, outputs: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip(self.channels.graph.outputs, outputs, strict=True))

    def timed(self, kind: str, microbatch: int | None) -> AbstractContextManager[None]:
        """Return a context for the code of a span; see `TaskTimes.timed`. Nothing is measured in an evaluation."""
        return nullcontext() if self.loss is None else self.pipeline.times.timed(kind, microbatch)


def check_rows(outputs: Any, samples: int) -> None:
    """Check that every tensor in the outputs of a microbatch has one row per sample.

    Raises:
        ConfigurationError: The number of rows of a tensor is not ``samples``.
    """
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, Tensor) and (leaf.ndim == 0 or len(leaf) != samples):
            raise ConfigurationError(
                f"the network returns a tensor of shape {tuple(leaf.shape)} for {samples} samples: a network that is "
                "cut into stages runs on parts of the batch, so all tensors that it returns must have one row per "
                "sample (compute means in the module's loss; if the network is an ensemble that returns a row for each "
                "member, use strategy ddp)"
            )


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _edges(tensors: Sequence[Tensor]) -> list[GradientEdge | None]:
    """Return each tensor's gradient edge: the node of the autograd graph where a backward pass for the tensor starts.

    A gradient edge does not keep its tensor alive, so the tensor's memory can be freed. The result has None for a
    tensor that requires no gradient.
    """
    return [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in tensors]
