"""Run one rank's tasks of a step."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
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
from cnnstrategies.pipeline.step import Held, Step
from cnnstrategies.pipeline.timeline import Span
from cnnstrategies.pipeline.timetable import Place, Task
from cnnstrategies.pipeline.transport import Transport

# Tasks whose messages are received early under gloo, all that a stage that runs ahead may send before. A message that
# has to wait for its receive is expensive there: it arrives while the receive holds the connection's lock, for which
# gloo's own thread then waits in a loop, for milliseconds where cores are short. Under NCCL a receive that is begun
# early would keep the device from getting idle.
AHEAD = 4


class Executor:
    """Runs a rank's part of steps and evaluations.

    Args:
        module: The stage.
        compiled: Whether it is compiled.
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
        compiled: bool,
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
        self.compiled = compiled
        self.checkpointing = checkpointing
        self.transport = transport
        self.device = device
        self.replicas = transport.placement.replicas[place.stage]
        self.ahead = AHEAD if transport.has_tags else 0
        self.peak_held = 0
        self.watchers: list[Callable[[Span], None]] = []
        self.loss_sum = torch.zeros((), device=device)

    def train(
        self,
        tasks: Sequence[Task],
        batch: Batch,
        loss: PartialLoss,
        scale: float | Tensor,
        more: bool,
        computed: Callable[[Step], None],
    ) -> tuple[list[Tensor | None], dict[int, Any]]:
        """Run forwards and backwards of one batch.

        Args:
            tasks: This rank's part of the timetable; tasks of empty microbatches are left out here.
            batch: The global batch.
            loss: The loss of the batch in parts; runs in the last stage.
            scale: Factor on the loss, for gradients in half precision.
            more: Replicas add up their gradients in a later step.
            computed: Called once when the rank has run all its forwards and losses; under gloo before its last
                backward, so that what it starts to send is under way while this and other ranks end the step.

        Returns:
            The gradient of each parameter of the reducer, of ``scale`` times the mean loss over the global batch; and
            in the last stage the outputs of each of this rank's microbatches.
        """
        tasks = [task for task in tasks if batch.split.sizes[task.microbatch]]
        last_backward = max((task.microbatch for task in tasks), default=None)
        step = Step(batch, self.channels[self.module.training], self.device, loss, scale)
        early, late = self.early_or_late(computed)
        self.peak_held = 0
        self.reducer.begin()
        self.statistics.begin(batch.split.microbatches)
        self.buffers.begin()
        try:
            times = self._plan(step, tasks)
            for index, task in enumerate(tasks):
                with self._described(task):
                    is_last = task.microbatch == last_backward
                    if task.kind == "forward":
                        self._forward(step, task.microbatch, is_last)
                    else:
                        if is_last and not more and self.overlaps(step, task.microbatch):
                            self.reducer.overlap()
                        self._backward(step, task.microbatch, early if is_last else _nothing)
                    with self.timed("send", task.microbatch):
                        step.channels.exchange(times[index + 1], times[index + 1 + self.ahead])
            if not tasks:
                early(step)
            with self.timed("reduce", None), self.transport.collective("summing the gradients of the stage"):
                gradients = self.reducer.finish(keep=more)
                self.statistics.finish()
                self.buffers.finish()
                late(step)
        except BaseException:
            self.reducer.abandon()
            self.statistics.abandon()
            raise
        with self.timed("send", None):
            step.channels.finish()
        self.loss_sum = step.loss_sum
        return gradients, step.outputs

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
        step = Step(batch, self.channels[self.module.training], self.device)
        channels = step.channels
        times = self._plan(step, tasks)
        for index, task in enumerate(tasks):
            with self._described(task):
                size = step.size(task.microbatch)
                values, _ = channels.receive_forward(task.microbatch, size)
                result = self.module(*channels.inputs(values, step.images(task.microbatch)))
                if self.last:
                    check_rows(result, batch.split.sizes[task.microbatch])
                    step.outputs[task.microbatch] = result
                else:
                    channels.send_forward(task.microbatch, size, self._named(step, result), training=False)
                channels.exchange(times[index + 1], times[index + 1 + self.ahead])
        channels.finish()
        return step.outputs

    def _forward(self, step: Step, microbatch: int, is_last: bool) -> None:
        again = is_recomputed(self.checkpointing, is_last)
        size = step.size(microbatch)
        with self.timed("receive", microbatch):
            values, leaves = step.channels.receive_forward(microbatch, size)
        held = Held(leaves)
        arguments = step.channels.inputs(values, step.images(microbatch))
        if again:
            held.arguments, held.random = arguments, RandomState(self.device)
        step.held[microbatch] = held
        self.peak_held = max(self.peak_held, len(step.held))
        # Compiled without autograd, a stage would be other code, which may draw other random numbers than the second.
        tracked = self.compiled or not again
        # Copies of the weights in a lower precision, made without autograd, must not serve the second run.
        enabled, dtype = step.autocast
        with (
            torch.set_grad_enabled(tracked),
            torch.autocast(self.device.type, dtype, enabled=enabled, cache_enabled=tracked),
            self.statistics.microbatch(microbatch),
            self.timed("forward", microbatch),
        ):
            result = self.module(*arguments)
            if not self.last:
                roots = step.channels.send_forward(microbatch, size, self._named(step, result), training=True)
                if not again:
                    held.roots.update((target, _edges(tensors)) for target, tensors in roots.items())
                return
            check_rows(result, step.batch.split.sizes[microbatch])
            step.outputs[microbatch] = tree_map(_detached, result)
            if not again:
                held.roots[None] = _edges([step.part_of_loss(result, microbatch)])

    def _backward(self, step: Step, microbatch: int, computed: Callable[[Step], None]) -> None:
        if not self.last:
            computed(step)
        with self.timed("receive", microbatch):
            gradients = step.channels.receive_backward(microbatch)
        held = step.held[microbatch]
        with self.timed("backward", microbatch):
            if held.arguments is not None:
                self._run_again(step, microbatch, held)
            if self.last:
                computed(step)
            self._backpropagate(held, gradients)
        step.channels.send_backward(microbatch, held.leaves)
        del step.held[microbatch]

    def early_or_late(self, computed: Callable[[Step], None]) -> tuple[Callable[[Step], None], Callable[[Step], None]]:
        """What to call before the last backward, and what after it.

        NCCL's collectives of all ranks would keep a device from getting idle until the last rank has come to them.
        """
        return (computed, _nothing) if self.transport.has_tags else (_nothing, computed)

    def overlaps(self, step: Step, microbatch: int) -> bool:
        """Whether the replicas may sum their gradients in this rank's last backward.

        Not where they end one after the other: the last may need what the first sends only after that backward.
        """
        return not any(step.batch.split.sizes[microbatch + self.replicas :])

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
            with torch.autocast(self.device.type, enabled=False):
                torch.autograd.backward(roots, starts)

    def _run_again(self, step: Step, microbatch: int, held: Held) -> None:
        assert held.arguments is not None
        assert held.random is not None
        now = RandomState(self.device)
        held.random.restore()
        with self.statistics.microbatch(microbatch, again=True):
            result = self.module(*held.arguments)
            if self.last:
                held.roots[None] = _edges([step.part_of_loss(result, microbatch)])
            else:
                roots = step.channels.roots(self._named(step, result))
                held.roots.update((target, _edges(tensors)) for target, tensors in roots.items())
        now.restore()

    def _plan(self, step: Step, tasks: Sequence[Task]) -> list[float]:
        """Begin the messages before the first task, and tell the turns of all, and of what follows the last."""
        step.channels.plan(tasks, step.size)
        times = [*map(step.channels.turn, tasks), *[math.inf] * (self.ahead + 1)]
        step.channels.exchange(times[0], times[self.ahead])
        return times

    def _named(self, step: Step, outputs: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip(step.channels.division.stages[self.place.stage].outputs, outputs, strict=True))

    @contextmanager
    def _described(self, task: Task) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            error.add_note(f"in {self.transport.me}: {task.kind} of microbatch {task.microbatch}")
            raise

    @contextmanager
    def timed(self, kind: str, microbatch: int | None) -> Iterator[None]:
        """Tell the watchers of a span."""
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
                "module's loss; for an ensemble that returns a row for each of its members use strategy ddp)"
            )


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _edges(tensors: Sequence[Tensor]) -> list[GradientEdge | None]:
    """Where gradients of tensors enter the graph; without the tensors, which may take memory until then."""
    return [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in tensors]


def _nothing(_: Step) -> None:
    pass
