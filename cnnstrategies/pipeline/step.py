"""One batch on its way through a rank: the rank's tasks, and what is kept between them."""

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
    """The random numbers at some moment, for a stage that runs on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cpu = torch.get_rng_state()
        self.accelerator = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        """Go back to it."""
        torch.set_rng_state(self.cpu)
        if self.accelerator is not None:
            torch.cuda.set_rng_state(self.accelerator, self.device)


@dataclass
class Held:
    """What a rank keeps of a microbatch between its forward and its backward.

    Attributes:
        leaves: For each source stage the inputs whose gradients it wants.
        roots: For each target stage where the gradients that it sends enter the graph, None where they are not needed;
            in the last stage the loss's, under None. The outputs themselves are not held.
        arguments: The stage's, where the forward runs again, as are ``random``.
    """

    leaves: dict[int, list[Tensor]]
    roots: dict[int | None, list[GradientEdge | None]] = field(default_factory=dict)
    arguments: tuple[Any, ...] | None = None
    random: RandomState | None = None


class Step:
    """Runs a rank's part of a step or of an evaluation.

    Args:
        loss: The loss of the batch in parts; None where nothing is trained.

    Attributes:
        outputs: In the last stage what the network returned for each of the rank's microbatches.
        loss_sum: In the last stage the sum of the parts so far.
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
        self._last: int | None = None  # The microbatch of the last backward.

    def train(self, more: bool) -> list[Tensor | None]:
        """Run forwards and backwards; what :meth:`GradientReducer.finish` gives, of the scale times the mean loss."""
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
        """Run forwards alone."""
        own = [m for m in self.pipeline.own if self.batch.split.sizes[m]]
        self._run([Task("forward", self.pipeline.place.stage, m) for m in own], self._infer)
        self.channels.finish()

    def _run(self, tasks: Sequence[Task], run: Callable[[Task], None]) -> None:
        """Run tasks, and begin messages before and between them."""
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
        # Copies of the weights in a lower precision, made without autograd, must not serve the second run.
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
            arrived = [None] * len(edges) if target is None else gradients[target]
            for root, start in zip(edges, arrived, strict=True):
                if root is not None and (target is None or start is not None):
                    roots.append(root)
                    starts.append(start)
        if roots:
            with torch.autocast(self.pipeline.device.type, enabled=False):
                torch.autograd.backward(roots, starts)

    def _run_again(self, microbatch: int, held: Held) -> None:
        assert held.arguments is not None
        assert held.random is not None
        now = RandomState(self.pipeline.device)
        held.random.restore()
        with self.pipeline.buffers.microbatch(microbatch, again=True):
            result = self.pipeline.module(*held.arguments)
            if self.pipeline.last:
                held.roots[None] = _edges([self.part_of_loss(result, microbatch)])
            else:
                roots = self.channels.roots(self._named(result))
                held.roots.update((target, _edges(tensors)) for target, tensors in roots.items())
        now.restore()

    def tracks(self, again: bool) -> bool:
        """Whether a forward runs with autograd, if it runs again or not.

        Compiled without, a stage would be other code, which may draw other random numbers than the second.
        """
        return self.pipeline.compiled or not again

    def overlaps(self, microbatch: int) -> bool:
        """Whether the replicas may sum their gradients in this rank's last backward.

        Not where they end one after the other: the last may need what the first sends only after that backward.
        """
        placement, stage = self.pipeline.placement, self.pipeline.place.stage
        runs, sizes = placement.runs[stage], self.batch.split.sizes
        later = [replica for replica, size in zip(runs[microbatch + 1 :], sizes[microbatch + 1 :], strict=True) if size]
        # Nor where another has two to come: it sends what it has of the first before its own last backward.
        return len(set(later)) == len(later) and not any(sizes[microbatch + placement.replicas[stage] :])

    def part_of_loss(self, outputs: Any, microbatch: int) -> Tensor:
        """What the microbatch adds to the loss of the global batch, times the scale."""
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
        """What the shapes and types of a microbatch's values depend on."""
        return self.batch.split.sizes[microbatch], *self._kind

    def _images(self, microbatch: int) -> Images | None:
        if self.batch.images is None:
            return None
        start, stop = self.batch.split.bounds[microbatch]
        own: Images = tree_map(lambda images: images[start:stop], self.batch.images)
        return own

    def _named(self, outputs: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip(self.channels.graph.outputs, outputs, strict=True))

    @contextmanager
    def clocked(self, kind: str) -> Iterator[None]:
        """Tell the clocks of a span, or of a part of one."""
        clocks = self.pipeline.clocks.get(kind, []) if self.loss is not None else []
        for clock in clocks:
            clock.begin()
        yield
        for clock in clocks:
            clock.end()

    @contextmanager
    def timed(self, kind: str, microbatch: int | None) -> Iterator[None]:
        """Tell the watchers and clocks of a span of a training step; while there are none, nothing is timed."""
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
        return time.time()  # Ranks of one machine share it.


def check_rows(outputs: Any, samples: int) -> None:
    """Refuse outputs of a microbatch that cannot be put together with those of others."""
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, Tensor) and (leaf.ndim == 0 or len(leaf) != samples):
            raise ConfigurationError(
                f"the network returns a tensor of shape {tuple(leaf.shape)} for {samples} samples: cut into stages, it "
                "runs on parts of the batch, and what it returns must have one row per sample (compute means in the "
                "module's loss; for an ensemble that returns a row for each of its members use strategy ddp)"
            )


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _edges(tensors: Sequence[Tensor]) -> list[GradientEdge | None]:
    """Where gradients of tensors enter the graph; without the tensors, which may take memory until then."""
    return [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in tensors]
