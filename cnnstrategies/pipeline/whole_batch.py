"""Run one call of a divided network with a whole batch: all forwards of a stage now, and all backwards later."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_structure

from cnnstrategies._torch_private import without_tensor_hooks
from cnnstrategies.pipeline.batch_rows import BatchRows
from cnnstrategies.pipeline.buffers import calls_several_times
from cnnstrategies.pipeline.combining import StoredValues
from cnnstrategies.pipeline.early_sums import EarlySums
from cnnstrategies.pipeline.part_gradients import add_gradients, gradients_of, without_autocast, without_gradients
from cnnstrategies.pipeline.random_draws import BackwardDraws, Draws
from cnnstrategies.pipeline.ready_order import ready_order
from cnnstrategies.pipeline.second_forward import KeptInputs, SecondForwards
from cnnstrategies.pipeline.stored_terms import CallTerms
from cnnstrategies.pipeline.tensor_headers import TensorHeader, TensorSpec, memory_format_of, pack
from cnnstrategies.pipeline.timetable import Checkpointing, Task
from cnnstrategies.placed.partial import PartialTensor

if TYPE_CHECKING:
    from cnnstrategies.pipeline.stage_runner import StageRunner


class CallArguments(NamedTuple):
    """Arguments of a call of a divided network. They are equal on all ranks, except for the images.

    Attributes:
        images: In the first stage, the images (n, C, H, W), or nested containers of tensors with n rows. Ignored in
            other stages.
        samples: Number n of samples.
        needs_gradient: Whether the batch's backward follows, see :meth:`WholeBatch.backward`.
        form: Key that is equal for batches whose values in the network have equal shapes and dtypes.
        in_order: Whether the stages draw random numbers one after the other, as on one device, if the batch is one
            microbatch; see `Draws`.
        checkpointing: Which forwards run again for the backward; by default `StageRunner.activation_checkpointing`.
    """

    images: Any
    samples: int
    needs_gradient: bool
    form: Hashable = None
    in_order: bool = True
    checkpointing: Checkpointing | None = None


class WholeBatch:
    """One call of a divided network with a whole batch.

    Args:
        runner: The runner of the stage.
        call: The arguments of the call.
        parts: Largest number of microbatches.

    Attributes:
        rows: The rows of the batch that each microbatch contains.
        sizes: Number of samples of each microbatch.
        microbatches: This rank's microbatches that have samples.
        parameters: Trainable parameters of the stage.
        draws: Random draws of this rank's forwards.
        backward_draws: Random draws of this rank's last backwards that did not run between forwards.
        header: In the last stage, the header of the network's result for the whole batch. None in other stages, and if
            this rank has not run a microbatch.
        terms: What the forwards have stored on modules.
        started: The gradients of the declared loss from which the backwards of this rank's microbatches start, by
            microbatch. Empty in all stages except the last, and if no loss is declared.
        early: The sums over the replicas that the last backward has begun; None if there are none.
        adds_to_grad: Whether the stage's own code has added to ``grad`` of parameters in backwards.
    """

    # Whether backwards run between forwards. If not, the receivers of activations do not wait for gradients from here.
    interleaves = False
    # Whether the call counts for running statistics.
    updates_buffers = True
    early: EarlySums | None = None
    adds_to_grad = False

    def __init__(self, runner: "StageRunner", call: CallArguments, parts: int) -> None:
        self._runner, self._call, self._images = runner, call, call.images
        kind = runner.transport.device.type
        self._autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self._placement = runner.placement
        usual = runner.usual if call.needs_gradient else 0
        self.rows = BatchRows.of(call.samples, runner.placement, parts, usual)
        self.sizes = self.rows.sizes
        if runner.stage == 0:
            self._images = tree_map(self._available, call.images)
        self.microbatches = [m for m in runner.placement.microbatches_of(runner.transport.rank) if self.sizes[m]]
        self.parameters = runner.parameters
        in_order = call.in_order and self.rows.is_one_microbatch
        self.draws = Draws(runner.transport, in_order, runner.unseen_draws, frozenset(runner.drawn))
        self.backward_draws: BackwardDraws | None = None
        self.header: TensorHeader | None = None
        self._parts: dict[int, Any] = {}
        self._leaves: dict[int, dict[int, list[Tensor]]] = {}
        self._roots: dict[int, list[Tensor]] = {}
        self._results: dict[int, list[Tensor]] = {}
        self._kept: dict[int, KeptInputs] = {}
        self._is_done = False
        self.started: dict[int, Sequence[Tensor | None]] = {}
        runner.buffers.begin(call.form)
        self.terms: CallTerms = runner.terms.begin(self.rows, call.needs_gradient, call.form)
        checkpointing = call.checkpointing or runner.activation_checkpointing if call.needs_gradient else "never"
        again = {"never": 0, "except_last": -1, "always": len(self.microbatches)}[checkpointing]
        self._runs_again = frozenset(self.microbatches[:again])
        self._second: SecondForwards | None = None
        if self._runs_again:
            self._second = SecondForwards(runner, self.draws, self.terms, self._autocast, call.form)
        try:
            self._run_forwards()
            if names := runner.buffers.called_often:
                self._need_whole(calls_several_times(names))
            if self.updates_buffers:
                runner.buffers.send()
            self._finish_early()
            self.terms.finish(self._has_changed())
            self._finish_buffers()
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
                self._slot(tensor, microbatch).copy_(part)
        self._results.clear()
        self._runner.replicas.share_rows(tensors, self.sizes)
        return [self.rows.in_order(tensor) for tensor in tensors]

    def backward(
        self,
        gradients: Sequence[Tensor | None],
        keep: bool = False,
        of_stored: Sequence[Tensor | None] = (),
        has_drawn: bool | None = None,
        uses_loss: bool = False,
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Run the backwards of this rank's microbatches. All ranks must call this.

        If several batches wait for their backwards, all ranks must choose the same order.

        Args:
            gradients: In the last stage, the gradient of each tensor in the network's result for the whole batch;
                ignored in other stages.
            keep: Whether another backward of this batch may follow.
            of_stored: Gradients of what this stage has stored, see `CallTerms.own_gradients`.
            has_drawn: Whether backwards of this form have drawn random numbers; None before the first one.
            uses_loss: Whether the backwards start from :attr:`started`, which is equal to ``gradients`` up to a factor
                and rounding, so that the results are those of the order 1F1B in each bit.

        Returns:
            The gradients of ``parameters``, and in the first stage the gradients of the tensors in the images,
            with the rows of one microbatch after the other, see `BatchRows.in_order`. The rows of microbatches that
            other replicas have run are 0. A gradient is None if no microbatch of this rank gives the tensor a gradient.
            The gradients in :attr:`early` must be waited for.

        Raises:
            RuntimeError: This method was called before without ``keep``.
        """
        self._use_graph(keep)
        self._begin_backward()
        self.early, self._runner.early = self._runner.early, None
        of_results = gradients if self._runner.last else ()

        def run(task: Task) -> None:
            rows_of = self.rows.of_microbatch
            rows = [None if whole is None else rows_of(whole, task.microbatch) for whole in of_results]
            start = self.started.pop(task.microbatch, ()) if uses_loss else rows
            self._backward(task.microbatch, start, keep, of_stored)

        watched = nullcontext() if self._second is not None else self.terms.backward()
        draws = self.backward_draws = BackwardDraws(self._runner.transport, self.rows.is_one_microbatch, has_drawn)
        with self._runner.under(self._placement), watched, self._accumulated():
            self._runner.run_tasks(("backward",), "gpipe", self.sizes, self._key, run)
        self._finish_early()
        draws.finish()
        return self._taken_gradients()

    @contextmanager
    def _accumulated(self) -> Iterator[None]:
        """Return a context for backwards, after which the sums contain what the stage's code has added to ``grad``.

        The backward of an autograd function, as of a reversible block, may call ``backward`` itself.
        """
        with without_gradients(self.parameters):
            yield
            added = [parameter.grad for parameter in self.parameters]
            self.adds_to_grad = any(gradient is not None for gradient in added)
            if self.adds_to_grad and self.early is not None:
                raise RuntimeError(
                    "the network's own code has called backward() in this backward, but not in the first one. The sums "
                    "over the stage's replicas have begun without its gradients: call it in each backward"
                )
            add_gradients(self._sums, added, self._summed)

    def _has_changed(self) -> bool:
        """Return whether backwards that have run give gradients to other tensors than in earlier calls."""
        return False

    @property
    def computed(self) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """The gradients of the parameters and of the images that backwards have computed, see :meth:`backward`."""
        return self._sums, self._of_images

    def _finish_early(self) -> None:
        if self.early is not None:
            self.early.finish(self.parameters, self._sums)

    def _taken_gradients(self) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Return the gradients, and forget them: autograd copies gradients to which there are other references."""
        results = self._sums, self._of_images
        self._begin_backward()
        return results

    def _use_graph(self, keep: bool) -> None:
        if self._is_done:
            raise RuntimeError(
                "Trying to backward through the graph a second time: call backward(retain_graph=True) the first time"
            )
        self._is_done = not keep

    def _run_forwards(self) -> None:
        def run(task: Task) -> None:
            self._forward(task.microbatch)

        self._runner.run_tasks(("forward",), "gpipe", self.sizes, self._key, run)

    def _finish_buffers(self) -> None:
        runner = self._runner
        if not self.updates_buffers:
            runner.buffers.abandon()
            return
        with runner.times.timed("reduce"), runner.transport.collective("combining the buffers of the stage"):
            runner.buffers.finish()

    def _begin_backward(self) -> None:
        self._sums: list[Tensor | None] = [None] * len(self.parameters)
        self._summed: set[int] = set()
        images = tensors_in(self._images) if self._runner.stage == 0 else []
        self._of_images: list[Tensor | None] = [None] * len(images)

    def _backward(
        self,
        microbatch: int,
        received: Sequence[Tensor | None],
        keep: bool,
        of_stored: Sequence[Tensor | None] | None,
    ) -> None:
        """Run a microbatch's backward, and add the gradients to the sums.

        Args:
            microbatch: The microbatch.
            received: In the last stage, the gradients of the microbatch's results; ignored in other stages.
            keep: See :meth:`backward`.
            of_stored: See :meth:`backward`; None if what the stage stores has no gradients.
        """
        runner, parameters = self._runner, self.parameters
        if not runner.last:
            with runner.times.timed("receive", microbatch):
                parts = runner.channels.receive_backward(microbatch)
            received = [gradient for part in parts.values() for gradient in part]
        part, kept = self._parts.get(microbatch), self._kept.get(microbatch)
        leaves = self._leaves[microbatch] if kept is None else kept.leaves
        inputs, images = [tensor for tensors in leaves.values() for tensor in tensors], tensors_in(part)
        second: StoredValues | None = None
        draws = self.backward_draws
        with (
            runner.times.timed("backward", microbatch, "backward"),
            without_autocast(runner.transport.device.type),
            without_tensor_hooks(parameters),
        ):
            if kept is None:
                roots = self._roots[microbatch]
            else:
                roots, second = self.run_again(microbatch, kept.checked_arguments())
            if not keep:
                for held in (self._leaves, self._roots, self._parts, self._kept):
                    held.pop(microbatch, None)
            if of_stored is not None:
                stored, starts = self.terms.roots(microbatch, of_stored, keep, second)
                roots, received = [*roots, *stored], [*received, *starts]
            begins_sums = microbatch == self.microbatches[-1] and self._ends_together()
            # A second forward returns to the state of the first one, so the watch begins after it.
            is_watched = self._second is not None and self.rows.is_one_microbatch
            with (
                self.terms.backward() if is_watched else nullcontext(),
                nullcontext() if draws is None else draws.microbatch(microbatch),
                self.early.during(parameters, self._sums) if self.early is not None and begins_sums else nullcontext(),
            ):
                results = gradients_of(roots, received, [*parameters, *inputs, *images], keep and kept is None)
        of_parameters = results[: len(parameters)]
        if self.early is not None:
            for index, parameter in enumerate(parameters):
                if self.early.has(parameter):
                    of_parameters[index] = None
        add_gradients(self._sums, of_parameters, self._summed)
        for tensor, gradient in zip(inputs, results[len(parameters) :], strict=False):
            tensor.grad = gradient
        for index, gradient in enumerate(results[len(parameters) + len(inputs) :]):
            if gradient is not None:
                whole = self._of_images[index]
                if whole is None:
                    whole = self._of_images[index] = self._zeros_like_images(index)
                self._slot(whole, microbatch).copy_(gradient)
        runner.channels.send_backward(microbatch, leaves)
        if draws is not None:
            draws.pass_on(microbatch)

    def _ends_together(self) -> bool:
        """Whether this rank's replicas may begin collectives in their last backwards."""
        return self._placement.end_together(self._runner.stage, self.sizes, self.microbatches[-1])

    def run_again(self, microbatch: int, arguments: tuple[Any, ...]) -> tuple[list[Tensor], StoredValues]:
        """Run a microbatch's forward again, as in :class:`SecondForwards`. Nothing is sent.

        Args:
            microbatch: The microbatch.
            arguments: The arguments of the microbatch's first forward. Tensors whose gradients are needed must be
                leaves of the graph.

        Returns:
            The tensors in the stage's result, in the order of the gradients that the microbatch's backward gets, and
            what the forward has stored, see `CallTerms.roots`.
        """
        assert self._second is not None
        result, stored = self._second.run(microbatch, arguments)
        roots = self._roots_of(result)
        self._second.check(microbatch, roots)
        return roots, stored

    def _roots_of(self, result: Any) -> list[Tensor]:
        """Return the tensors in a stage's result whose gradients the backward gets."""
        channels = self._runner.channels
        if self._runner.last:
            return pack((result,), ask_for_all=False)[1]
        roots = channels.roots(dict(zip(channels.graph.outputs, result, strict=True)))
        return [tensor for tensors in roots.values() for tensor in tensors]

    def under_autocast(self) -> AbstractContextManager[Any]:
        """Return a context with the autocast of the call."""
        enabled, dtype = self._autocast
        return torch.autocast(self._runner.transport.device.type, dtype, enabled=enabled)

    def image_gradients(self, local: Mapping[Any, Tensor | None], indices: Sequence[int]) -> list[Tensor]:
        """Return the gradients of tensors in the images, with all rows in the order of the batch.

        All replicas of the first stage must call this.

        Args:
            local: By index, gradients as :meth:`backward` returns them on this rank.
            indices: Indices of the tensors that have a gradient on any replica.
        """
        present = {index: gradient for index, gradient in local.items() if gradient is not None}
        gradients = [present[index] if index in present else self._zeros_like_images(index) for index in indices]
        with self._runner.under(self._placement):
            self._runner.replicas.share_rows(gradients, self.sizes)
        return [self.rows.in_order(gradient) for gradient in gradients]

    def _zeros_like_images(self, index: int) -> Tensor:
        like = tensors_in(self._images)[index]
        return TensorSpec(like.shape, like.dtype, False, memory_format_of(like)).empty(like.device).zero_()

    def _key(self, microbatch: int) -> Hashable:
        return self.sizes[microbatch], self._call.needs_gradient, self._autocast, self._call.form

    def _forward(self, microbatch: int) -> None:
        runner = self._runner
        channels, key = runner.channels, self._key(microbatch)
        runs_again = microbatch in self._runs_again
        with torch.set_grad_enabled(self._call.needs_gradient):
            with runner.times.timed("receive", microbatch):
                values, leaves = channels.receive_forward(microbatch, key)
            images = None
            if runner.stage == 0:
                part = partial(self._part, microbatch=microbatch)
                images = part(self._images) if isinstance(self._images, Tensor) else tree_map(part, self._images)
                self._parts[microbatch] = images
            timed = runner.times.timed("forward", microbatch, "forward" if self._call.needs_gradient else None)
            with timed, runner.buffers.microbatch(), self.draws.microbatch(microbatch):
                arguments = channels.inputs(values, images)
                kept = KeptInputs.of(arguments, leaves, runner.changes_inputs) if runs_again else None
                result = self._run_stage(microbatch, arguments)
            if images is not None:
                self.rows.warn_of_changes(tensors_in(self._images), tensors_in(images))
            if runner.last:
                roots = self._hold(microbatch, result)
            else:
                named = dict(zip(channels.graph.outputs, result, strict=True))
                sent = channels.send_forward(microbatch, key, named, training=self.interleaves)
                roots = [tensor for tensors in sent.values() for tensor in tensors]
        self.draws.pass_on(microbatch)
        if self._call.needs_gradient and self._call.form not in runner.ready_orders:
            runner.ready_orders[self._call.form] = ready_order(roots, self.parameters)
        if kept is not None and kept.have_changed:
            # This forward cannot run again, so its graph is kept. For the next forwards, copies are kept.
            kept, runner.changes_inputs = None, True
        if kept is not None:
            assert self._second is not None
            self._second.note(microbatch, roots)
            self._kept[microbatch] = kept
            self.terms.drop_graph(microbatch)
        elif self._call.needs_gradient:
            self._leaves[microbatch], self._roots[microbatch] = leaves, roots

    def _run_stage(self, microbatch: int, arguments: tuple[Any, ...]) -> Any:
        try:
            return self.terms.run(microbatch, arguments)
        except Exception as error:
            if not self.rows.is_one_microbatch:
                error.add_note(
                    f"this forward has {self.sizes[microbatch]} of the batch's {sum(self.sizes)} samples: if the "
                    "network's code, or a hook, needs the whole batch, set the strategy's microbatches to 1"
                )
            raise

    def _hold(self, microbatch: int, result: Any) -> list[Tensor]:
        """Hold a microbatch's result until the results of the whole batch are joined. Return its tensors."""
        size, samples = self.sizes[microbatch], sum(self.sizes)
        if self.header is not None and _is_part(result, size, self.header):
            self._results[microbatch] = [result.detach()]
            return [result]
        header, tensors = pack((result,), ask_for_all=False)
        if size < samples:
            for tensor in tensors:
                if tensor.ndim == 0 or len(tensor) != size:
                    return self._need_whole(
                        f"the network returns a tensor of shape {tuple(tensor.shape)} for {size} samples"
                    )
            leaves = tuple(
                replace(leaf, shape=torch.Size((samples, *leaf.shape[1:]))) if isinstance(leaf, TensorSpec) else leaf
                for leaf in header.leaves
            )
            header = TensorHeader(leaves, header.tree)
        self.header = self.header or header
        if header != self.header:
            return self._need_whole(
                f"the network returns {header.leaves} for one part of the batch, and {self.header.leaves} for another"
            )
        self._results[microbatch] = [tensor.detach() for tensor in tensors]
        return tensors

    def _need_whole(self, reason: str) -> list[Tensor]:
        """Note that the network needs the whole batch as one microbatch. The results are not used."""
        self.terms.reason = reason
        return []

    def _available(self, image: Any) -> Any:
        """Return a tensor in the images with the rows of this rank's microbatches; other values as they are."""
        if not isinstance(image, PartialTensor) or self.rows.has_all(image):
            return image
        return image.made_whole().detach().requires_grad_(image.requires_grad)

    def _part(self, image: Any, microbatch: int) -> Any:
        """Return the rows of a microbatch, as a leaf of a graph of its own."""
        if not isinstance(image, Tensor):
            return image
        part = self.rows.of_image(image, microbatch).detach()
        return part.requires_grad_(self._call.needs_gradient and image.requires_grad)

    def _slot(self, tensor: Tensor, microbatch: int) -> Tensor:
        """Return the part of a tensor for a microbatch, if the microbatches' rows are one after the other in it.

        If the batch is one microbatch, results need not have rows.
        """
        if self.sizes[microbatch] == sum(self.sizes):
            return tensor
        start = sum(self.sizes[:microbatch])
        return tensor[start : start + self.sizes[microbatch]]


_ONE_TENSOR = tree_structure((0,))  # Structure of the header of a result that is one tensor.


def _is_part(result: Any, size: int, header: TensorHeader) -> bool:
    """Whether a microbatch's result is one tensor with the rows of a whole batch of the given form."""
    spec = header.leaves[0]
    return (
        type(result) is Tensor
        and len(header.leaves) == 1
        and isinstance(spec, TensorSpec)
        and header.tree == _ONE_TENSOR
        and result.shape == (size, *spec.shape[1:])
        and (result.dtype, result.requires_grad) == (spec.dtype, spec.needs_gradient)
    )


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers."""
    if isinstance(value, Tensor):  # The usual images, which are asked for several times in each step.
        return [value]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
