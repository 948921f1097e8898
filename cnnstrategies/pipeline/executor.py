"""Run one rank's tasks of a step."""

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.batch import Batch
from cnnstrategies.pipeline.batchnorm import RunningStatistics
from cnnstrategies.pipeline.buffers import OtherBuffers
from cnnstrategies.pipeline.channels import Channels
from cnnstrategies.pipeline.gradients import GradientReducer
from cnnstrategies.pipeline.losses import PartialLoss
from cnnstrategies.pipeline.recompute import Checkpointing, RandomState, is_recomputed
from cnnstrategies.pipeline.stage import StageModule
from cnnstrategies.pipeline.timeline import Span
from cnnstrategies.pipeline.timetable import Place, Task
from cnnstrategies.pipeline.transport import Transport

AHEAD = 2  # tasks whose receives are posted early: under 1f1b one forward and one backward


@dataclass
class Held:
    """What a rank keeps of a microbatch between its forward and its backward.

    Attributes:
        leaves: For each source stage the inputs whose gradients it wants.
        roots: For each target stage the outputs whose gradients it sends; in the last stage the loss, under None.
        arguments: The stage's arguments, where the forward runs again.
        random: The random numbers, where the forward runs again.
    """

    leaves: dict[int, list[Tensor]]
    roots: dict[int | None, list[Tensor]] = field(default_factory=dict)
    arguments: tuple[Any, ...] | None = None
    random: RandomState | None = None


class Executor:
    """Runs a rank's part of steps and evaluations.

    Args:
        module: The stage.
        place: Stage and replica of the rank.
        last: Whether the stage is the last.
        channels: Its traffic in training and in evaluation.
        reducer: Sums its gradients over the replicas.
        statistics: Keeps its BatchNorm's running statistics.
        buffers: Keeps its other buffers.
        checkpointing: When to recompute activations.
        transport: Names the ranks in errors.
        device: Where the stage runs.

    Attributes:
        loss_sum: In the last stage what this rank's microbatches have added to the last step's loss.
        peak_held: Most microbatches whose activations were held at once in the last step.
        watchers: Called with each span of a step; while there are none, nothing is timed. On a GPU timing synchronises
            at each task.
    """

    def __init__(
        self,
        module: StageModule,
        place: Place,
        last: bool,
        channels: dict[bool, Channels],
        reducer: GradientReducer,
        statistics: RunningStatistics,
        buffers: OtherBuffers,
        checkpointing: Checkpointing,
        transport: Transport,
        device: torch.device,
    ) -> None:
        self.module = module
        self.place = place
        self.last = last
        self.channels = channels
        self.reducer = reducer
        self.statistics = statistics
        self.buffers = buffers
        self.checkpointing = checkpointing
        self.transport = transport
        self.device = device
        self.peak_held = 0
        self.watchers: list[Callable[[Span], None]] = []
        self.loss_sum = torch.zeros((), device=device)
        self._held: dict[int, Held] = {}
        self._outputs: dict[int, Any] = {}

    def train(
        self, tasks: Sequence[Task], batch: Batch, loss: PartialLoss, scale: float
    ) -> tuple[list[Tensor | None], dict[int, Any]]:
        """Run forwards and backwards of one batch.

        Args:
            tasks: This rank's part of the timetable; tasks of empty microbatches are left out here.
            batch: The global batch.
            loss: The loss of the batch in parts; runs in the last stage.
            scale: Factor on the loss, for gradients in half precision.

        Returns:
            The gradient of each parameter of the reducer, of ``scale`` times the mean loss over the global batch; and
            in the last stage the outputs of each of this rank's microbatches.
        """
        tasks = [task for task in tasks if batch.split.sizes[task.microbatch]]
        last_backward = max((task.microbatch for task in tasks), default=None)
        channels = self.channels[self.module.training]
        self.peak_held = 0
        self.loss_sum = torch.zeros((), device=self.device)
        self._held, self._outputs = {}, {}
        self.reducer.begin()
        self.statistics.begin(batch.split.microbatches)
        self.buffers.begin()
        try:
            for index, task in enumerate(tasks):
                with self._timed("receive", None):
                    self._expect(channels, tasks[index : index + 1 + AHEAD], batch)
                with self._described(task):
                    if task.kind == "forward":
                        again = is_recomputed(self.checkpointing, task.microbatch == last_backward)
                        self._forward(channels, task.microbatch, batch, loss, scale, again)
                    else:
                        if task.microbatch == last_backward:
                            self.reducer.overlap()
                        self._backward(channels, task.microbatch, batch, loss, scale)
            with self._timed("reduce", None), self.transport.collective("summing the gradients of the stage"):
                gradients = self.reducer.finish()
                self.statistics.finish()
                self.buffers.finish()
        except BaseException:
            self.reducer.abandon()
            self.statistics.abandon()
            raise
        with self._timed("send", None):
            channels.finish()
        outputs, self._outputs = self._outputs, {}
        return gradients, outputs

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[int], batch: Batch) -> dict[int, Any]:
        """Run forwards alone.

        Args:
            microbatches: Those of this rank, in order.
            batch: The global batch.

        Returns:
            In the last stage the outputs of each of this rank's microbatches.
        """
        tasks = [Task("forward", self.place.stage, m) for m in microbatches if batch.split.sizes[m]]
        channels = self.channels[self.module.training]
        outputs = {}
        for index, task in enumerate(tasks):
            self._expect(channels, tasks[index : index + 1 + AHEAD], batch)
            with self._described(task):
                size = self._size(batch, task.microbatch)
                values, _ = channels.receive_forward(task.microbatch, size)
                result = self.module(*channels.inputs(values, self._images(batch, task.microbatch)))
                if self.last:
                    check_rows(result, batch.split.sizes[task.microbatch])
                    outputs[task.microbatch] = result
                else:
                    channels.send_forward(task.microbatch, size, self._named(channels, result), training=False)
        channels.finish()
        return outputs

    def _forward(
        self, channels: Channels, microbatch: int, batch: Batch, loss: PartialLoss, scale: float, again: bool
    ) -> None:
        size = self._size(batch, microbatch)
        with self._timed("receive", microbatch):
            values, leaves = channels.receive_forward(microbatch, size)
        held = Held(leaves)
        arguments = channels.inputs(values, self._images(batch, microbatch))
        if again:
            held.arguments, held.random = arguments, RandomState(self.device)
        self._held[microbatch] = held
        self.peak_held = max(self.peak_held, len(self._held))
        # Copies of the weights in a lower precision, made without autograd, must not serve the second run.
        enabled, dtype = self._autocast()
        with (
            torch.set_grad_enabled(not again),
            torch.autocast(self.device.type, dtype, enabled=enabled, cache_enabled=not again),
            self.statistics.microbatch(microbatch),
            self._timed("forward", microbatch),
        ):
            result = self.module(*arguments)
            if not self.last:
                roots = channels.send_forward(microbatch, size, self._named(channels, result), training=True)
                if not again:
                    held.roots.update(roots.items())
                return
            check_rows(result, batch.split.sizes[microbatch])
            self._outputs[microbatch] = tree_map(_detached, result)
            if not again:
                held.roots[None] = [self._part_of_loss(result, microbatch, loss, scale)]

    def _backward(self, channels: Channels, microbatch: int, batch: Batch, loss: PartialLoss, scale: float) -> None:
        size = self._size(batch, microbatch)
        with self._timed("receive", microbatch):
            gradients = channels.receive_backward(microbatch, size)
        with self._timed("backward", microbatch):
            held = self._backpropagate(channels, microbatch, batch, loss, scale, gradients)
        with self._timed("send", microbatch):
            channels.send_backward(microbatch, held.leaves)
        del self._held[microbatch]

    def _backpropagate(
        self,
        channels: Channels,
        microbatch: int,
        batch: Batch,
        loss: PartialLoss,
        scale: float,
        gradients: dict[int, list[Tensor]],
    ) -> Held:
        held = self._held[microbatch]
        if held.arguments is not None:
            self._run_again(channels, microbatch, held, batch, loss, scale)
        roots: list[Tensor] = []
        starts: list[Tensor | None] = []
        for target, tensors in held.roots.items():
            arrived = [None] * len(tensors) if target is None else gradients[target]
            for root, start in zip(tensors, arrived, strict=True):
                if root.requires_grad:
                    roots.append(root)
                    starts.append(start)
        if roots:
            with torch.autocast(self.device.type, enabled=False):
                torch.autograd.backward(roots, starts)
        return held

    def _run_again(
        self, channels: Channels, microbatch: int, held: Held, batch: Batch, loss: PartialLoss, scale: float
    ) -> None:
        assert held.arguments is not None
        assert held.random is not None
        now = RandomState(self.device)
        held.random.restore()
        enabled, dtype = self._autocast()
        with (
            torch.autocast(self.device.type, dtype, enabled=enabled, cache_enabled=False),
            self.statistics.microbatch(microbatch, again=True),
        ):
            result = self.module(*held.arguments)
            if self.last:
                held.roots = {None: [self._part_of_loss(result, microbatch, loss, scale)]}
            else:
                held.roots.update(channels.roots(self._named(channels, result)).items())
        now.restore()

    def _part_of_loss(self, outputs: Any, microbatch: int, loss: PartialLoss, scale: float) -> Tensor:
        """What the microbatch adds to the loss of the global batch, times the scale."""
        part = loss.part(outputs, microbatch)
        self.loss_sum = self.loss_sum + part.detach()
        return part * scale

    def _expect(self, channels: Channels, tasks: Sequence[Task], batch: Batch) -> None:
        """Post receives early, up to the first task for which that is not possible: messages come in order."""
        for task in tasks:
            size = self._size(batch, task.microbatch)
            if task.kind == "forward":
                if not channels.expect_forward(task.microbatch, size, headers_known_only=True):
                    return
            elif task.microbatch not in self._held:
                return
            else:
                channels.expect_backward(task.microbatch, size)

    def _images(self, batch: Batch, microbatch: int) -> Any:
        if batch.images is None:
            return None
        start, stop = batch.split.bounds[microbatch]
        return tree_map(lambda images: images[start:stop], batch.images)

    def _named(self, channels: Channels, outputs: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip(channels.division.stages[self.place.stage].outputs, outputs, strict=True))

    def _size(self, batch: Batch, microbatch: int) -> Hashable:
        """What the shapes and types of a microbatch's values depend on."""
        count = batch.split.sizes[microbatch]
        return (count, batch.image_shape, batch.image_dtype, self._autocast(), torch.is_grad_enabled())

    def _autocast(self) -> tuple[bool, torch.dtype]:
        kind = self.device.type
        return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    @contextmanager
    def _described(self, task: Task) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            error.add_note(f"in {self.transport.me}: {task.kind} of microbatch {task.microbatch}")
            raise

    @contextmanager
    def _timed(self, kind: str, microbatch: int | None) -> Iterator[None]:
        if not self.watchers:
            yield
            return
        start = self._now()
        yield
        span = Span(self.transport.rank, kind, self.place.stage, microbatch, start, self._now())
        for watcher in self.watchers:
            watcher(span)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.time()  # Ranks of one machine share it.


def check_rows(outputs: Any, samples: int) -> None:
    """Refuse outputs that cannot be put together from those of microbatches.

    Args:
        outputs: What the network returned for a microbatch.
        samples: Its size.

    Raises:
        ConfigurationError: A tensor has not one row per sample.
    """
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, Tensor) and (leaf.ndim == 0 or len(leaf) != samples):
            raise ConfigurationError(
                f"the network returns a tensor of shape {tuple(leaf.shape)} for {samples} samples: cut into stages, it "
                "runs on parts of the batch, and what it returns must have one row per sample (compute means in the "
                "module's loss)"
            )


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
