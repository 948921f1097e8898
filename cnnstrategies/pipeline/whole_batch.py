"""Run one call of a divided network with a whole batch: all forwards of a stage now, and all backwards later."""

from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from cnnstrategies._torch_private import without_tensor_hooks
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.channels import TensorHeader, TensorSpec, memory_format_of, pack
from cnnstrategies.pipeline.part_gradients import add_gradients, gradients_of
from cnnstrategies.pipeline.random_draws import Draws
from cnnstrategies.pipeline.stored_terms import CallTerms

if TYPE_CHECKING:
    from cnnstrategies.pipeline.stage_runner import StageRunner


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
        runner: "StageRunner",
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
        of_images: list[Tensor | None] = [None] * len(tensors_in(self._images)) if runner.stage == 0 else []

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
            inputs, images = [tensor for tensors in leaves.values() for tensor in tensors], tensors_in(part)
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

        watched = nullcontext() if self.terms is None else self.terms.backward()
        with torch.autocast(runner.transport.device.type, enabled=False), without_tensor_hooks(parameters), watched:
            runner.run_tasks("backward", self.sizes, self._key, run)
        return sums, of_images

    def image_gradients(self, local: Mapping[Any, Tensor | None], indices: Sequence[int]) -> list[Tensor]:
        """Return the gradients of tensors in the images, with all rows. All replicas of the first stage must call this.

        Args:
            local: By index, gradients as :meth:`backward` returns them on this rank.
            indices: Indices of the tensors that have a gradient on any replica.
        """
        present = {index: gradient for index, gradient in local.items() if gradient is not None}
        gradients = [present[index] if index in present else self._zeros_like_images(index) for index in indices]
        self._runner.replicas.share_rows(gradients, self.sizes)
        return gradients

    def _zeros_like_images(self, index: int) -> Tensor:
        like = tensors_in(self._images)[index]
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
        """Hold a microbatch's result until the results of the whole batch are joined. Return its tensors."""
        header, tensors = pack((result,), ask_for_all=False)
        size, samples = self.sizes[microbatch], sum(self.sizes)
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
        self._results[microbatch] = tensors
        return tensors

    def _need_whole(self, reason: str) -> list[Tensor]:
        """Note that the network needs the whole batch as one microbatch. The results are not used.

        Raises:
            ConfigurationError: The runner cannot run the batch again.
        """
        if self.terms is None:
            raise ConfigurationError(f"{reason}: run the whole batch as one microbatch")
        self.terms.reason = reason
        return []

    def _part(self, rows: Any, microbatch: int) -> Any:
        """Return the rows of a microbatch, as a leaf of a graph of its own."""
        if not isinstance(rows, Tensor):
            return rows
        part = self._rows(rows, microbatch).detach()
        return part.requires_grad_(self._needs_gradient and rows.requires_grad)

    def _rows(self, tensor: Tensor, microbatch: int) -> Tensor:
        """Return a microbatch's rows of a tensor. If the batch is one microbatch, results need not have rows."""
        if self.sizes[microbatch] == sum(self.sizes):
            return tensor
        start = sum(self.sizes[:microbatch])
        return tensor[start : start + self.sizes[microbatch]]


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
