"""Run of one batch on a rank: the rank's tasks, and the state between forward and backward of a microbatch."""

import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.batch import Batch, Images
from cnnstrategies.pipeline.losses import PartialLoss
from cnnstrategies.pipeline.timeline import Span
from cnnstrategies.pipeline.timetable import Task

if TYPE_CHECKING:
    from cnnstrategies.pipeline.engine import Pipeline


class RandomState:
    """State of the random generators that a stage on a device uses, taken when the object is created."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cpu = torch.get_rng_state()
        self.accelerator = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        """Restore the state."""
        torch.set_rng_state(self.cpu)
        if self.accelerator is not None:
            torch.cuda.set_rng_state(self.accelerator, self.device)


@dataclass
class Held:
    """State of a microbatch between its forward and its backward on a rank.

    Attributes:
        leaves: For each source stage the inputs whose gradients the source stage needs.
        roots: For each target stage the points at which the received gradients enter the graph, None for a value that
            needs no gradient; in the last stage the point of the loss, under the key None. The outputs are not held.
        arguments: Arguments of the stage, if the forward runs again.
        random: State of the random generators before the forward, if the forward runs again.
    """

    leaves: dict[int, list[Tensor]]
    roots: dict[int | None, list[GradientEdge | None]] = field(default_factory=dict)
    arguments: tuple[Any, ...] | None = None
    random: RandomState | None = None


class Step:
    """Run of one batch on a rank, for training or evaluation.

    Args:
        pipeline: The rank's pipeline.
        batch: The batch.
        loss: Loss of the batch in parts; None for evaluation.
        scale: Factor on the loss.

    Attributes:
        outputs: In the last stage the network's outputs for each of the rank's microbatches.
        loss_sum: In the last stage the sum of the loss's parts so far.
    """

    def __init__(
        self,
        pipeline: "Pipeline",
        batch: Batch,
        loss: PartialLoss | None = None,
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
        self._last: int | None = None  # microbatch of the last backward

    def train(self, more: bool) -> list[Tensor | None]:
        """Run forwards and backwards, and return the gradients as :meth:`GradientReducer.finish` does.

        The gradients are those of the loss multiplied by the scale.
        """
        pipeline = self.pipeline
        tasks = [task for task in pipeline.tasks if self.batch.split.sizes[task.microbatch]]
        self._last = max((task.microbatch for task in tasks), default=None)
        pipeline.reducer.begin()
        pipeline.buffers.begin(self.batch.split.microbatches)

        def run(task: Task) -> None:
            if task.kind == "forward":
                self._forward(task.microbatch)
                return
            if task.microbatch == self._last and not more and self.overlaps(task.microbatch):
                pipeline.reducer.overlap()
            self._backward(task.microbatch)

        try:
            self._run(tasks, run)
            with self.timed("reduce", None), pipeline.transport.collective("summing the gradients of the stage"):
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
        """Run forwards only."""
        microbatches = [m for m in self.pipeline.own_microbatches if self.batch.split.sizes[m]]
        self._run([Task("forward", self.pipeline.place.stage, m) for m in microbatches], self._infer)
        self.channels.finish()

    def _run(self, tasks: Sequence[Task], run: Callable[[Task], None]) -> None:
        """Run tasks, and begin messages before and between the tasks."""
        channels, ahead, transport = self.channels, self.pipeline.ahead, self.pipeline.transport
        channels.plan(tasks, self._size)
        times = [*map(channels.turn, tasks), *[math.inf] * (ahead + 1)]
        channels.exchange(times[0], times[ahead])
        for index, task in enumerate(tasks):
            try:
                run(task)
                with self.timed("send", task.microbatch):
                    channels.exchange(times[index + 1], times[index + 1 + ahead])
            except Exception as error:
                error.add_note(f"in {transport.me}: {task.kind} of microbatch {task.microbatch}")
                raise

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
            held.arguments, held.random = arguments, RandomState(pipeline.device)
        tracked = self.tracks(again)
        # The second run must not use autocast's cached copies of the weights that were made without autograd.
        enabled, dtype = self._autocast
        with (
            torch.set_grad_enabled(tracked),
            torch.autocast(pipeline.device.type, dtype, enabled=enabled, cache_enabled=tracked),
            pipeline.buffers.microbatch(microbatch),
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
                self._run_again(microbatch, held)
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

    def _run_again(self, microbatch: int, held: Held) -> None:
        assert held.arguments is not None
        assert held.random is not None
        present = RandomState(self.pipeline.device)
        held.random.restore()
        with self.pipeline.buffers.microbatch(microbatch, again=True):
            result = self.pipeline.module(*held.arguments)
            if self.pipeline.last:
                held.roots[None] = _edges([self.part_of_loss(result, microbatch)])
            else:
                roots = self.channels.roots(self._named(result))
                held.roots.update((target, _edges(tensors)) for target, tensors in roots.items())
        present.restore()

    def tracks(self, again: bool) -> bool:
        """Whether a forward runs with autograd; `again` tells whether the forward is recomputed for the backward.

        A compiled stage always runs with autograd: compiled without autograd it would be different code, which may draw
        other random numbers than the recomputation.
        """
        return self.pipeline.compiled or not again

    def overlaps(self, microbatch: int) -> bool:
        """Whether the replicas may sum their gradients during this rank's last backward, of the given microbatch.

        The replicas must not do so if they end one after the other: the last replica may need a message that the first
        replica sends after its last backward.
        """
        placement, stage = self.pipeline.placement, self.pipeline.place.stage
        runs, sizes = placement.runs[stage], self.batch.split.sizes
        later = [replica for replica, size in zip(runs[microbatch + 1 :], sizes[microbatch + 1 :], strict=True) if size]
        # Nor if another replica still has two microbatches: it sends gradients of the first before its last backward.
        return len(set(later)) == len(later) and not any(sizes[microbatch + placement.replicas[stage] :])

    def part_of_loss(self, outputs: Any, microbatch: int) -> Tensor:
        """Return the microbatch's contribution to the loss of the global batch, multiplied by the scale."""
        assert self.loss is not None
        with self.clocked("loss"):
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
        """Return a key that determines the shapes and types of a microbatch's values."""
        return self.batch.split.sizes[microbatch], *self._kind

    def _images(self, microbatch: int) -> Images | None:
        if self.batch.images is None:
            return None
        start, stop = self.batch.split.bounds[microbatch]
        microbatch_images: Images = tree_map(lambda images: images[start:stop], self.batch.images)
        return microbatch_images

    def _named(self, outputs: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip(self.channels.graph.outputs, outputs, strict=True))

    @contextmanager
    def clocked(self, kind: str) -> Iterator[None]:
        """Notify the clocks of the begin and the end of a span, or of a part of a span."""
        clocks = self.pipeline.clocks.get(kind, []) if self.loss is not None else []
        for clock in clocks:
            clock.begin()
        yield
        for clock in clocks:
            clock.end()

    @contextmanager
    def timed(self, kind: str, microbatch: int | None) -> Iterator[None]:
        """Notify the watchers and the clocks of a span of a training step. Without watchers nothing is timed."""
        pipeline = self.pipeline
        watchers = pipeline.watchers if self.loss is not None else []
        start = self._now() if watchers else 0.0
        with self.clocked(kind):
            yield
        if not watchers:
            return
        span = Span(pipeline.rank, kind, pipeline.place.stage, microbatch, start, self._now())
        for watcher in watchers:
            watcher(span)

    def _now(self) -> float:
        if self.pipeline.device.type == "cuda":
            torch.cuda.synchronize(self.pipeline.device)
        return time.time()  # All ranks of a machine share this clock.


def check_rows(outputs: Any, samples: int) -> None:
    """Refuse outputs of a microbatch without one row per sample.

    Raises:
        ConfigurationError: A tensor has another number of rows than the microbatch has samples.
    """
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, Tensor) and (leaf.ndim == 0 or len(leaf) != samples):
            raise ConfigurationError(
                f"the network returns a tensor of shape {tuple(leaf.shape)} for {samples} samples: a network that is "
                "cut into stages runs on parts of the batch, so all tensors that it returns must have one row per "
                "sample (compute means in the module's loss; for an ensemble that returns a row for each of its "
                "members use strategy ddp)"
            )


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _edges(tensors: Sequence[Tensor]) -> list[GradientEdge | None]:
    """Return the points at which gradients of tensors enter the graph; the tensors' memory is not held."""
    return [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in tensors]
