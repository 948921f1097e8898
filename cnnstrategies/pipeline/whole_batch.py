"""Run one call of a divided network with a whole batch: all forwards of a stage now, and all backwards later."""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from cnnstrategies._torch_private import without_tensor_hooks
from cnnstrategies.pipeline.buffers import StageBuffers
from cnnstrategies.pipeline.channels import Channels
from cnnstrategies.pipeline.division import Division
from cnnstrategies.pipeline.stage import StageGraph, put_module_at
from cnnstrategies.pipeline.step import check_rows
from cnnstrategies.pipeline.stored_terms import CallTerms, StoredTerms
from cnnstrategies.pipeline.timetable import KINDS, Placement, tasks_of, turns
from cnnstrategies.pipeline.transport import Transport
from cnnstrategies.placed import Places

SCHEDULE = "gpipe"


class StageRunner:
    """Runs this rank's stage of a divided network, in GPipe's order. Each stage has one replica.

    Args:
        division: Division of the network. Parameters and buffers of other stages are not used.
        transport: Connections of this rank. Its placement determines the number of microbatches.
        ahead: Number of turns before a task at which the receive of the task's message begins; see
            :data:`~cnnstrategies.pipeline.engine.AHEAD`.
    """

    def __init__(self, division: Division, transport: Transport, ahead: int) -> None:
        self.division, self.transport, self.ahead = division, transport, ahead
        placement = transport.placement
        self.stage = transport.place.stage
        self.last = self.stage == placement.stages - 1
        tasks = tasks_of(placement, transport.rank, SCHEDULE)
        self._tasks = {kind: [task for task in tasks if task.kind == kind] for kind in KINDS}
        graph = division.graphs()[self.stage]
        self._turn = turns(placement.replicas, placement.microbatches, SCHEDULE)
        self.channels = Channels(graph, self._turn, transport, ask_for_all=True)
        self.buffers = StageBuffers(*_modules_of(division, graph))
        self.terms: StoredTerms | None = None

    @property
    def placement(self) -> Placement:
        """Numbering of the ranks."""
        return self.transport.placement

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Trainable parameters of this stage that the network uses, in the order of the network."""
        return [
            tensor
            for name, stage, tensor in self.division.tensors()
            if stage == self.stage
            and isinstance(tensor, nn.Parameter)
            and tensor.requires_grad
            and name in self.division.used
        ]

    def watch(self, owner: nn.Module, places: Places, ranks: Sequence[tuple[int, ...]]) -> None:
        """Take care of what forwards store on modules from now on.

        Args:
            owner: The module in which forwards may store values: the network, or a module that contains it.
            places: The rules of this rank.
            ranks: Ranks of each stage.
        """

        def run(*inputs: Any) -> Any:
            return self.division.run(self.stage, *inputs)

        def run_again(*inputs: Any) -> Any:
            with self.buffers.microbatch(0, again=True):
                return run(*inputs)

        network, calls = self.division.network, self.division.graphs()[self.stage].graph.nodes
        modules = {
            path: module
            for node in calls
            if node.op == "call_module"
            for path, module in network.get_submodule(str(node.target)).named_modules(prefix=str(node.target))
        }
        self.terms = StoredTerms(owner, network, modules, run, run_again, places, ranks)

    def begin(self, images: Any, samples: int, needs_gradient: bool, whole: bool = False) -> "WholeBatch":
        """Run all forwards of a batch. All ranks must call this.

        Args:
            images: In the first stage, the images (n, C, H, W), or nested containers of tensors with n rows. Ignored in
                other stages.
            samples: Number n of samples.
            needs_gradient: Whether the batch's backward follows, see :meth:`WholeBatch.backward`.
            whole: Whether the batch is one microbatch.

        Raises:
            NeedsOneMicrobatchError: A stage needs the batch as one microbatch. All ranks raise this error.
        """
        graph = self.division.graphs()[self.stage]
        if graph is not self.channels.graph:
            # The state of an opened container has changed, on all ranks. Other values may cross the cuts now.
            self.channels.graph = graph
            self.channels.forget_headers()
        return WholeBatch(self, images, samples, needs_gradient, whole)

    def run_tasks(self, kind: Any, sizes: Sequence[int], key: Callable[[int], Hashable], run: Any) -> None:
        """Run all forwards or all backwards of the microbatches that have samples.

        Args:
            kind: ``forward`` or ``backward``.
            sizes: Number of samples of each microbatch.
            key: Function that returns the size key of a microbatch; see `Channels.plan`.
            run: Function that runs the task of a microbatch.
        """
        tasks = [task for task in self._tasks[kind] if sizes[task.microbatch]]
        self.channels.plan(tasks, key)
        times = [*map(self._turn, tasks), *[math.inf] * (self.ahead + 1)]
        self.channels.exchange(times[0], times[self.ahead])
        for index, task in enumerate(tasks):
            try:
                run(task.microbatch)
                self.channels.exchange(times[index + 1], times[index + 1 + self.ahead])
            except Exception as error:
                error.add_note(f"in {self.transport.me}: {kind} of microbatch {task.microbatch}")
                raise
        self.channels.finish()


class WholeBatch:
    """One call of a divided network with a whole batch.

    Attributes:
        outputs: In the last stage, the network's result for the whole batch, without a gradient; None in other stages.
    """

    def __init__(self, runner: StageRunner, images: Any, samples: int, needs_gradient: bool, whole: bool) -> None:
        self._runner, self._images, self._needs_gradient = runner, images, needs_gradient
        count = runner.placement.microbatches
        parts = 1 if whole else count
        self.sizes = [samples // parts + (index < samples % parts) if index < parts else 0 for index in range(count)]
        self._parts: dict[int, Any] = {}
        self._leaves: dict[int, dict[int, list[Tensor]]] = {}
        self._roots: dict[int, list[Tensor]] = {}
        self._results: dict[int, Any] = {}
        runner.buffers.begin(count)
        self.terms: CallTerms | None = None
        if runner.terms is not None:
            self.terms = runner.terms.begin(self.sizes, needs_gradient, runner.transport.device)
        try:
            runner.run_tasks("forward", self.sizes, self._key, self._forward)
            if self.terms is not None:
                self.terms.finish()
            runner.buffers.finish()
        except BaseException:
            runner.buffers.abandon()
            raise
        self.outputs: Any = None
        if runner.last:
            self.outputs = tree_map(_joined, *self._results.values())

    def backward(
        self, gradients: Sequence[Tensor | None], of_stored: Sequence[Tensor | None] = ()
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Run all backwards of the batch. All ranks must call this, in the same order if several batches wait.

        Args:
            gradients: In the last stage, the gradient of each tensor in ``outputs``; ignored in other stages.
            of_stored: Gradients of what this stage has stored, see `CallTerms.own_gradients`.

        Returns:
            The gradients of the runner's parameters, and in the first stage the gradients of the tensors in the images.
            A gradient is None if the loss does not depend on the tensor.
        """
        runner = self._runner
        parameters = runner.parameters
        sums: list[Tensor | None] = [None] * len(parameters)

        def run(microbatch: int) -> None:
            if runner.last:
                start = sum(self.sizes[:microbatch])
                received = [_rows(gradient, start, self.sizes[microbatch]) for gradient in gradients]
            else:
                parts = runner.channels.receive_backward(microbatch)
                received = [gradient for part in parts.values() for gradient in part]
            leaves = self._leaves.pop(microbatch)
            inputs = [tensor for tensors in leaves.values() for tensor in tensors]
            inputs += _tensors(self._parts.get(microbatch))
            roots = self._roots.pop(microbatch)
            if self.terms is not None:
                stored, starts = self.terms.roots(microbatch, of_stored)
                roots, received = [*roots, *stored], [*received, *starts]
            results = _gradients(roots, received, [*parameters, *inputs])
            for tensor, gradient in zip(inputs, results[len(parameters) :], strict=True):
                tensor.grad = gradient
            for index, gradient in enumerate(results[: len(parameters)]):
                present = sums[index]
                sums[index] = gradient if present is None else present if gradient is None else present + gradient
            runner.channels.send_backward(microbatch, leaves)

        with torch.autocast(runner.transport.device.type, enabled=False), without_tensor_hooks(parameters):
            runner.run_tasks("backward", self.sizes, self._key, run)
        columns = zip(*map(_tensors, self._parts.values()), strict=True)
        return sums, [_joined_gradients(column) for column in columns]

    def _key(self, microbatch: int) -> Hashable:
        kind = self._runner.transport.device.type
        autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        return self.sizes[microbatch], self._needs_gradient, autocast

    def _forward(self, microbatch: int) -> None:
        runner = self._runner
        channels, key = runner.channels, self._key(microbatch)
        with torch.set_grad_enabled(self._needs_gradient):
            values, leaves = channels.receive_forward(microbatch, key)
            images = None
            if runner.stage == 0:
                start = sum(self.sizes[:microbatch])
                images = tree_map(lambda rows: self._part(rows, start, microbatch), self._images)
                self._parts[microbatch] = images
            arguments = channels.inputs(values, images)
            with runner.buffers.microbatch(microbatch):
                if self.terms is None:
                    result = runner.division.run(runner.stage, *arguments)
                else:
                    result = self.terms.run(microbatch, arguments)
            if runner.last:
                check_rows(result, self.sizes[microbatch])
                self._results[microbatch] = result
                roots = _tensors(result)
            else:
                named = dict(zip(channels.graph.outputs, result, strict=True))
                sent = channels.send_forward(microbatch, key, named, training=self._needs_gradient)
                roots = [tensor for tensors in sent.values() for tensor in tensors]
        if self._needs_gradient:
            self._leaves[microbatch], self._roots[microbatch] = leaves, roots

    def _part(self, rows: Any, start: int, microbatch: int) -> Any:
        """Return the rows of a microbatch, as a leaf of a graph of its own."""
        if not isinstance(rows, Tensor):
            return rows
        part = rows[start : start + self.sizes[microbatch]].detach()
        return part.requires_grad_(self._needs_gradient and rows.requires_grad)


def _modules_of(division: Division, graph: StageGraph) -> tuple[nn.Module, None, Counter[str]]:
    """Return the arguments of `StageBuffers` for a stage: a module with the stage's modules, and the calls of each."""
    module = nn.Module()
    calls = Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_module")
    for path in calls:
        put_module_at(module, path, division.network.get_submodule(path))
    return module, None, calls


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _joined(*leaves: Any) -> Any:
    """Return the rows of all microbatches as one tensor without a gradient. Other values are those of the first one."""
    return torch.cat([leaf.detach() for leaf in leaves]) if isinstance(leaves[0], Tensor) else leaves[0]


def _joined_gradients(leaves: Sequence[Tensor]) -> Tensor | None:
    """Return the gradients of the microbatches' tensors as one tensor; None if no tensor has a gradient."""
    if all(leaf.grad is None for leaf in leaves):
        return None
    return torch.cat([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves])


def _rows(gradient: Tensor | None, start: int, count: int) -> Tensor | None:
    return None if gradient is None else gradient[start : start + count]


def _gradients(
    roots: Sequence[Tensor], starts: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return the gradient of each input, from the gradients of results; None if there is no gradient."""
    pairs = [
        (root, start) for root, start in zip(roots, starts, strict=True) if root.requires_grad and start is not None
    ]
    wanted = [index for index, tensor in enumerate(inputs) if tensor.requires_grad]
    gradients: list[Tensor | None] = [None] * len(inputs)
    if pairs and wanted:
        ends, begins = zip(*pairs, strict=True)
        computed = torch.autograd.grad(ends, [inputs[index] for index in wanted], begins, allow_unused=True)
        for index, gradient in zip(wanted, computed, strict=True):
            gradients[index] = gradient
    return gradients
