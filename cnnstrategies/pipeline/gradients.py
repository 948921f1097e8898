"""Summation of gradients over a stage's replicas, in buckets, while the last microbatch's backward still runs."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

BUCKET_BYTES = 25 * 2**20  # the default of DistributedDataParallel


class Bucket:
    """Gradients that are reduced together, in one flat tensor.

    Attributes:
        flat: The gradients, one after the other, followed by ``reached``.
        views: For each parameter a view of its gradient, in the parameter's shape.
        reached: For each parameter 1 if it has a gradient, else 0. After the reduction, the number of replicas in which
            the parameter has a gradient.
        missing: Number of parameters that the last backward has not reached yet.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        first = parameters[0]
        size = sum(p.numel() for p in parameters) + len(parameters)
        self.flat = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.reached = self.flat[-len(parameters) :]
        self.views: list[Tensor] = []
        self.missing = len(parameters)
        offset = 0
        for parameter in parameters:
            part = self.flat[offset : offset + parameter.numel()]
            # The view has the parameter's memory format, which autograd would also choose.
            dense = parameter.is_contiguous() or parameter.is_contiguous(memory_format=torch.channels_last)
            strides = parameter.stride() if dense else parameter.contiguous().stride()
            self.views.append(part.as_strided(parameter.shape, strides))
            offset += parameter.numel()

    def without_gradient(self, reached: set[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters for which no replica has a gradient, not even a gradient of zeros.

        The counts are read, which waits for the device, only if a parameter is not in `reached`, the parameters with a
        gradient on this replica.
        """
        if reached.issuperset(self.parameters):
            return []
        counts = self.reached.tolist()
        return [parameter for parameter, count in zip(self.parameters, counts, strict=True) if not count]


class GradientReducer:
    """Accumulates the gradients of one or several batches, and sums them over the replicas.

    Call :meth:`begin`, then run the backwards of all microbatches, with a call of :meth:`overlap` before the last
    backward, then call :meth:`finish`. Buckets are reduced in a fixed order, last parameters first, so that all
    replicas agree. Buckets and hooks are created once, in the first step.

    Args:
        parameters: Parameters of the stage.
        group: Group of the stage's replicas; None for one replica.
        bucket_bytes: Size of a bucket in bytes.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.group = group
        self.bucket_bytes = bucket_bytes
        self._buckets: list[Bucket] = []
        self._handles: list[RemovableHandle] = []
        self._works: list[dist.Work] = []
        self._kept: list[Tensor | None] | None = None
        self._reached: set[nn.Parameter] = set()
        self._keeps = self._overlapping = False

    def begin(self) -> None:
        """Set ``grad`` aside, and start without gradients or from the gradients that :meth:`finish` has kept."""
        self._kept = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        if self.group is None:
            return
        if not self._buckets:
            self._make_buckets()
        if not self._keeps:
            self._reached.clear()
        for bucket in self._buckets:
            if not self._keeps:
                bucket.flat.zero_()
            bucket.missing = len(bucket.parameters)
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view
        self._keeps = False

    def overlap(self) -> None:
        """Reduce each bucket as soon as the next backward has filled it."""
        self._overlapping = True

    def finish(self, keep: bool = False) -> list[Tensor | None]:
        """Wait for the sums over the replicas, and restore ``grad`` as it was at :meth:`begin`.

        Args:
            keep: If there are several replicas, reduce nothing and keep the gradients: the next batch adds to them.

        Returns:
            For each of ``parameters`` its gradient, or None if it has no gradient or the gradient was kept. With
            several replicas the caller may change the returned gradients; the next step overwrites them.
        """
        if keep and self.group is not None:
            self.abandon()
            self._keeps = True
            return [None] * len(self.parameters)
        self._launch(all_of_them=True)
        for work in self._works:
            work.wait()
        unused = {parameter for bucket in self._buckets for parameter in bucket.without_gradient(self._reached)}
        gradients = [None if parameter in unused else parameter.grad for parameter in self.parameters]
        self.abandon()
        return gradients

    def abandon(self) -> None:
        """Restore ``grad`` as it was at :meth:`begin`, and discard kept gradients."""
        if self._kept is not None:
            for parameter, kept in zip(self.parameters, self._kept, strict=True):
                parameter.grad = kept
        self._kept, self._works = None, []
        self._keeps = self._overlapping = False

    def _make_buckets(self) -> None:
        self._buckets = [Bucket(parameters) for parameters in self._grouped()]
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self.ready, bucket=bucket))  # type: ignore[no-untyped-call]
            for bucket in self._buckets
            for parameter in bucket.parameters
        ]

    def close(self) -> None:
        """Remove the hooks, through which the parameters would keep this object alive."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._buckets = [], []

    def ready(self, parameter: nn.Parameter, bucket: Bucket) -> None:
        """Note that a backward has added to a parameter's gradient."""
        if self._kept is not None:
            self._reached.add(parameter)
            if self._overlapping:
                bucket.missing -= 1
                self._launch(all_of_them=False)

    def _launch(self, all_of_them: bool) -> None:
        while len(self._works) < len(self._buckets):
            bucket = self._buckets[len(self._works)]
            if bucket.missing and not all_of_them:
                return
            bucket.reached.fill_(1)
            for index, parameter in enumerate(bucket.parameters):
                if parameter not in self._reached:
                    bucket.reached[index] = 0
            work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)
            assert work is not None
            self._works.append(work)

    def _grouped(self) -> list[list[nn.Parameter]]:
        groups: list[list[nn.Parameter]] = []
        size = 0
        for parameter in reversed(self.parameters):
            bytes_ = parameter.nbytes
            if not groups or size + bytes_ > self.bucket_bytes or groups[-1][0].dtype != parameter.dtype:
                groups.append([])
                size = 0
            groups[-1].append(parameter)
            size += bytes_
        return groups
