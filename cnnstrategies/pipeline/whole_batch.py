"""Run one call of a divided network with a whole batch: all forwards of a stage now, and all backwards later."""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from cnnstrategies._torch_private import without_tensor_hooks
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.buffers import StageBuffers
from cnnstrategies.pipeline.channels import Channels, TensorHeader, TensorSpec, memory_format_of, pack
from cnnstrategies.pipeline.division import Division
from cnnstrategies.pipeline.part_gradients import add_gradients, gradients_of
from cnnstrategies.pipeline.random_draws import Draws
from cnnstrategies.pipeline.replicas import StageReplicas
from cnnstrategies.pipeline.stage import StageGraph, put_module_at
from cnnstrategies.pipeline.step import check_rows
from cnnstrategies.pipeline.stored_terms import CallTerms, StoredTerms
from cnnstrategies.pipeline.timetable import KINDS, Placement, tasks_of, turns
from cnnstrategies.pipeline.transport import Transport
from cnnstrategies.placed import Places

SCHEDULE = "gpipe"


class StageRunner:
    """Runs this rank's microbatches of a stage of a divided network, in GPipe's order.

    Args:
        division: Division of the network. Parameters and buffers of other stages are not used.
        transport: Connections of this rank. Its placement determines the replicas and the number of microbatches.
        ahead: Number of turns before a task at which the receive of the task's message begins; see
            :data:`~cnnstrategies.pipeline.engine.AHEAD`.

    Attributes:
        replicas: The replicas of the stage.
        microbatches: Number of microbatches into which batches are divided, at most the placement's number.
        unseen_draws: Number of calls in which this rank has drawn random numbers, but the generators have not advanced
            on all ranks. It enters the seeds, so that the next call does not draw the same numbers.
    """

    def __init__(self, division: Division, transport: Transport, ahead: int) -> None:
        self.division, self.transport, self.ahead = division, transport, ahead
        placement = transport.placement
        self.stage = transport.place.stage
        self.last = self.stage == placement.stages - 1
        self.microbatches = placement.microbatches
        self.unseen_draws = 0
        self.replicas = StageReplicas(transport)
        tasks = tasks_of(placement, transport.rank, SCHEDULE)
        self._tasks = {kind: [task for task in tasks if task.kind == kind] for kind in KINDS}
        graph = division.graphs()[self.stage]
        self._turn = turns(placement.replicas, placement.microbatches, SCHEDULE)
        self.channels = Channels(graph, self._turn, transport, ask_for_all=True)
        module, calls = _modules_of(division, graph)
        self.buffers = StageBuffers(module, self.replicas.group, calls)
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
            ranks: For each stage, the ranks of its replicas.
        """

        def run(*inputs: Any) -> Any:
            return self.division.run(self.stage, *inputs)

        def run_again(*inputs: Any) -> Any:
            with self.buffers.microbatch(0, again=True):
                return run(*inputs)

        network = self.division.network
        modules = {
            path: module
            for node in self.division.graphs()[self.stage].graph.nodes
            if node.op == "call_module"
            for path, module in network.get_submodule(str(node.target)).named_modules(prefix=str(node.target))
        }
        self.terms = StoredTerms(owner, network, modules, run, run_again, places, ranks)
        self.buffers.copies_others = False

    def begin(
        self,
        images: Any,
        samples: int,
        needs_gradient: bool,
        form: Hashable = None,
        in_order: bool = True,
        whole: bool = False,
    ) -> "WholeBatch":
        """Run all forwards of a batch. All ranks must call this, with equal arguments except the images.

        Args:
            images: In the first stage, the images (n, C, H, W), or nested containers of tensors with n rows. Ignored in
                other stages.
            samples: Number n of samples.
            needs_gradient: Whether the batch's backward follows, see :meth:`WholeBatch.backward`.
            form: Key that is equal for batches whose values in the network have equal shapes and dtypes.
            in_order: Whether the stages draw random numbers one after the other, as on one device, if the batch is one
                microbatch; see `Draws`.
            whole: Whether the batch is one microbatch.

        Raises:
            NeedsOneMicrobatchError: A stage needs the batch as one microbatch. All ranks raise this error.
        """
        graph = self.division.graphs()[self.stage]
        if graph is not self.channels.graph:
            # The state of an opened container has changed, on all ranks. Other values may cross the cuts now.
            self.channels.graph = graph
            self.channels.forget_headers()
        return WholeBatch(self, images, samples, needs_gradient, form, in_order, 1 if whole else self.microbatches)

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
        sizes: Number of samples of each microbatch.
        parameters: Trainable parameters of the stage.
        draws: Random draws of this rank's forwards.
        header: In the last stage, the header of the network's result for the whole batch. None in other stages, and if
            this rank has not run a microbatch.
        terms: What the forwards have stored on modules; None if the runner does not watch them.
    """

    def __init__(
        self,
        runner: StageRunner,
        images: Any,
        samples: int,
        needs_gradient: bool,
        form: Hashable,
        in_order: bool,
        parts: int,
    ) -> None:
        self._runner, self._images, self._needs_gradient, self._form = runner, images, needs_gradient, form
        kind = runner.transport.device.type
        self._autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        unused = [0] * (runner.placement.microbatches - parts)
        self.sizes = [samples // parts + (index < samples % parts) for index in range(parts)] + unused
        self.parameters = runner.parameters
        is_one_microbatch = sum(size > 0 for size in self.sizes) == 1
        self.draws = Draws(runner.transport, in_order and is_one_microbatch, runner.unseen_draws)
        self.header: TensorHeader | None = None
        self._parts: dict[int, Any] = {}
        self._leaves: dict[int, dict[int, list[Tensor]]] = {}
        self._roots: dict[int, list[Tensor]] = {}
        self._results: dict[int, list[Tensor]] = {}
        self._is_done = False
        runner.buffers.begin(len(self.sizes), form)
        self.terms: CallTerms | None = None
        if runner.terms is not None:
            self.terms = runner.terms.begin(self.sizes, needs_gradient, runner.transport.device, form)
        try:
            runner.run_tasks("forward", self.sizes, self._key, self._forward)
            if self.terms is not None:
                self.terms.finish()
            with runner.transport.collective("combining the buffers of the stage"):
                runner.buffers.finish()
        except BaseException:
            runner.buffers.abandon()
            raise
        finally:
            self.draws.finish()
        self.draws.wait()

    def outputs(self, header: TensorHeader) -> list[Tensor]:
        """Return the tensors of the network's result for the whole batch, without gradients.

        The replicas of the last stage must call this once. All of them get all rows.

        Args:
            header: Header of the result; see :attr:`header`.
        """
        tensors = [spec.empty(self._runner.transport.device) for spec in header.tensors]
        for microbatch, parts in self._results.items():
            for tensor, part in zip(tensors, parts, strict=True):
                self._rows(tensor, microbatch).copy_(part.detach())
        self._results.clear()
        self._runner.replicas.share_rows(tensors, self.sizes)
        return tensors

    def backward(
        self, gradients: Sequence[Tensor | None], keep: bool = False, of_stored: Sequence[Tensor | None] = ()
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Run the backwards of this rank's microbatches. All ranks must call this.

        If several batches wait for their backwards, all ranks must choose the same order.

        Args:
            gradients: In the last stage, the gradient of each tensor in the network's result for the whole batch;
                ignored in other stages.
            keep: Whether another backward of this batch may follow.
            of_stored: Gradients of what this stage has stored, see `CallTerms.own_gradients`.

        Returns:
            The gradients of ``parameters``, and in the first stage the gradients of the tensors in the images,
            in which the rows of microbatches that other replicas have run are 0. A gradient is None if no microbatch of
            this rank gives the tensor a gradient.

        Raises:
            RuntimeError: This method was called before without ``keep``.
        """
        if self._is_done:
            raise RuntimeError(
                "Trying to backward through the graph a second time: call backward(retain_graph=True) the first time"
            )
        self._is_done = not keep
        runner, parameters = self._runner, self.parameters
        sums: list[Tensor | None] = [None] * len(parameters)
        summed: set[int] = set()
        of_images: list[Tensor | None] = [None] * len(_tensors(self._images)) if runner.stage == 0 else []

        def run(microbatch: int) -> None:
            if runner.last:
                received = [None if whole is None else self._rows(whole, microbatch) for whole in gradients]
            else:
                parts = runner.channels.receive_backward(microbatch)
                received = [gradient for part in parts.values() for gradient in part]
            leaves, roots, part = self._leaves[microbatch], self._roots[microbatch], self._parts.get(microbatch)
            if not keep:
                for held in (self._leaves, self._roots, self._parts):
                    held.pop(microbatch, None)
            if self.terms is not None:
                stored, starts = self.terms.roots(microbatch, of_stored, keep)
                roots, received = [*roots, *stored], [*received, *starts]
            inputs, images = [tensor for tensors in leaves.values() for tensor in tensors], _tensors(part)
            results = gradients_of(roots, received, [*parameters, *inputs, *images], keep)
            add_gradients(sums, results[: len(parameters)], summed)
            for tensor, gradient in zip(inputs, results[len(parameters) :], strict=False):
                tensor.grad = gradient
            for index, gradient in enumerate(results[len(parameters) + len(inputs) :]):
                if gradient is not None:
                    whole = of_images[index]
                    if whole is None:
                        whole = of_images[index] = self._zeros_like_images(index)
                    self._rows(whole, microbatch).copy_(gradient)
            runner.channels.send_backward(microbatch, leaves)

        with torch.autocast(runner.transport.device.type, enabled=False), without_tensor_hooks(parameters):
            runner.run_tasks("backward", self.sizes, self._key, run)
        return sums, of_images

    def image_gradients(self, own: Mapping[Any, Tensor | None], indices: Sequence[int]) -> list[Tensor]:
        """Return the gradients of tensors in the images, with all rows. All replicas of the first stage must call this.

        Args:
            own: By index, gradients as :meth:`backward` returns them.
            indices: Indices of the tensors that have a gradient on any replica.
        """
        present = {index: gradient for index, gradient in own.items() if gradient is not None}
        gradients = [present[index] if index in present else self._zeros_like_images(index) for index in indices]
        self._runner.replicas.share_rows(gradients, self.sizes)
        return gradients

    def _zeros_like_images(self, index: int) -> Tensor:
        like = _tensors(self._images)[index]
        return TensorSpec(like.shape, like.dtype, False, memory_format_of(like)).empty(like.device).zero_()

    def _key(self, microbatch: int) -> Hashable:
        return self.sizes[microbatch], self._needs_gradient, self._autocast, self._form

    def _forward(self, microbatch: int) -> None:
        runner = self._runner
        channels, key = runner.channels, self._key(microbatch)
        with torch.set_grad_enabled(self._needs_gradient):
            values, leaves = channels.receive_forward(microbatch, key)
            images = None
            if runner.stage == 0:
                images = tree_map(lambda rows: self._part(rows, microbatch), self._images)
                self._parts[microbatch] = images
            with runner.buffers.microbatch(microbatch), self.draws.microbatch(microbatch):
                arguments = channels.inputs(values, images)
                if self.terms is None:
                    result = runner.division.run(runner.stage, *arguments)
                else:
                    result = self.terms.run(microbatch, arguments)
            if runner.last:
                roots = self._hold(microbatch, result)
            else:
                named = dict(zip(channels.graph.outputs, result, strict=True))
                sent = channels.send_forward(microbatch, key, named, training=self._needs_gradient)
                roots = [tensor for tensors in sent.values() for tensor in tensors]
        self.draws.pass_on(microbatch)
        if self._needs_gradient:
            self._leaves[microbatch], self._roots[microbatch] = leaves, roots

    def _hold(self, microbatch: int, result: Any) -> list[Tensor]:
        """Hold a microbatch's result until the results of the whole batch are joined. Return its tensors.

        Raises:
            ConfigurationError: The results of two microbatches have different shapes, dtypes or other values.
        """
        check_rows(result, self.sizes[microbatch])
        header, tensors = pack((result,), ask_for_all=False)
        samples = sum(self.sizes)
        leaves = tuple(
            replace(leaf, shape=torch.Size((samples, *leaf.shape[1:]))) if isinstance(leaf, TensorSpec) else leaf
            for leaf in header.leaves
        )
        whole = TensorHeader(leaves, header.tree)
        self.header = self.header or whole
        if whole != self.header:
            raise ConfigurationError(
                f"the network returns {whole.leaves} for microbatch {microbatch}, but {self.header.leaves} for an "
                "earlier microbatch: a network that is cut into stages must return tensors whose shapes do not depend "
                "on the values of the images"
            )
        self._results[microbatch] = tensors
        return tensors

    def _part(self, rows: Any, microbatch: int) -> Any:
        """Return the rows of a microbatch, as a leaf of a graph of its own."""
        if not isinstance(rows, Tensor):
            return rows
        part = self._rows(rows, microbatch).detach()
        return part.requires_grad_(self._needs_gradient and rows.requires_grad)

    def _rows(self, tensor: Tensor, microbatch: int) -> Tensor:
        start = sum(self.sizes[:microbatch])
        return tensor[start : start + self.sizes[microbatch]]


def _modules_of(division: Division, graph: StageGraph) -> tuple[nn.Module, Counter[str]]:
    """Return a module with the stage's modules, and the number of calls of each module in a forward of the stage."""
    module = nn.Module()
    calls = Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_module")
    for path in calls:
        put_module_at(module, path, division.network.get_submodule(path))
    return module, calls


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
