"""Sum gradients over the replicas of a stage, bucket by bucket, while the last microbatch's backward still runs."""

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

T = TypeVar("T", bound=Tensor)
BUCKET_BYTES = 25 * 2**20  # Default size of a bucket in bytes. It is also the default of DistributedDataParallel.


class Bucket:
    """Gradients that are summed over the replicas together, in one flat tensor.

    Attributes:
        parameters: The parameters whose gradients the bucket contains.
        flat: The gradients, one after the other, followed by ``reached``.
        views: For each parameter, its gradient as a view of ``flat`` that has the parameter's shape.
        reached: One number for each parameter. Before the sum, 1 if the parameter has a gradient, otherwise 0. After
            the sum, the number of replicas on which the parameter has a gradient.
        missing: Number of parameters whose gradient the batch's last backward has not computed yet.
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
            # Autograd allocates a gradient in the memory format of its parameter, so the view has this format as well.
            dense = parameter.is_contiguous() or parameter.is_contiguous(memory_format=torch.channels_last)
            strides = parameter.stride() if dense else parameter.contiguous().stride()
            self.views.append(part.as_strided(parameter.shape, strides))
            offset += parameter.numel()

    def without_gradient(self, reached: set[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters that have no gradient on any replica. A gradient of zeros counts as a gradient.

        Args:
            reached: Parameters that have a gradient on this replica. If the set contains all parameters of the bucket,
                this method does not have to wait for numbers from the device.
        """
        if reached.issuperset(self.parameters):
            return []
        counts = self.reached.tolist()
        return [parameter for parameter, count in zip(self.parameters, counts, strict=True) if not count]


class GradientReducer:
    """An accumulator for the gradients of one or several batches, which also sums the gradients over the replicas.

    First call :meth:`begin`. Then run the backward passes of all microbatches, and call :meth:`overlap` before the last
    pass. At the end call :meth:`finish`. All replicas reduce the buckets in the same order, last parameters first.
    Buckets and hooks are created in the first step and then kept.

    Args:
        parameters: Parameters of the stage.
        group: Group of the stage's replicas; None if the stage has one replica.
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
        """Save ``grad`` of all parameters, and prepare ``grad`` for the backward passes of a batch.

        If :meth:`finish` has kept gradients, the backward passes add to these gradients.
        """
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
        """Overlap the reductions with the next backward.

        The reduction of a bucket then starts as soon as all gradients of the bucket are ready. Call this before the
        last backward of a batch.
        """
        self._overlapping = True

    def finish(self, keep: bool = False) -> list[Tensor | None]:
        """Reduce the remaining buckets, wait for all sums, and restore ``grad`` as it was before :meth:`begin`.

        Args:
            keep: Whether to keep the gradients without reducing them, so that the next batch adds its gradients to
                them. Ignored if the stage has one replica.

        Returns:
            For each of ``parameters``, the parameter's gradient; None if the parameter has no gradient or if gradients
            are kept. If the stage has several replicas, the caller may change the returned gradients, but the next step
            overwrites them.
        """
        if keep and self.group is not None:
            self.abandon()
            self._keeps = True
            return [None] * len(self.parameters)
        self._launch(incomplete=True)
        for work in self._works:
            work.wait()
        unused = {parameter for bucket in self._buckets for parameter in bucket.without_gradient(self._reached)}
        gradients = [None if parameter in unused else parameter.grad for parameter in self.parameters]
        self.abandon()
        return gradients

    def abandon(self) -> None:
        """Restore ``grad`` as it was before :meth:`begin`.

        Discard the gradients of the current batch, and all gradients that :meth:`finish` kept from earlier batches.
        """
        if self._kept is not None:
            for parameter, kept in zip(self.parameters, self._kept, strict=True):
                parameter.grad = kept
        self._kept, self._works = None, []
        self._keeps = self._overlapping = False

    def _make_buckets(self) -> None:
        self._buckets = [Bucket(parameters) for parameters in bucketed(self.parameters, self.bucket_bytes)]
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self.ready, bucket=bucket))  # type: ignore[no-untyped-call]
            for bucket in self._buckets
            for parameter in bucket.parameters
        ]

    def close(self) -> None:
        """Remove the hooks from the parameters. Each hook keeps this object alive as long as the parameter exists."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._buckets = [], []

    def ready(self, parameter: nn.Parameter, bucket: Bucket) -> None:
        """Record that a parameter has a gradient, and start the reductions of buckets that are complete.

        Autograd calls this hook when a backward has added to the parameter's gradient.
        """
        if self._kept is not None:
            self._reached.add(parameter)
            if self._overlapping:
                bucket.missing -= 1
                self._launch(incomplete=False)

    def _launch(self, incomplete: bool) -> None:
        """Start the reductions that have not started yet, bucket by bucket, in the same order on all replicas.

        Args:
            incomplete: Whether to also reduce buckets that still lack gradients. Otherwise the reductions stop before
                the first incomplete bucket, and a later call starts the remaining reductions.
        """
        while len(self._works) < len(self._buckets):
            bucket = self._buckets[len(self._works)]
            if bucket.missing and not incomplete:
                return
            bucket.reached.fill_(1)
            for index, parameter in enumerate(bucket.parameters):
                if parameter not in self._reached:
                    bucket.reached[index] = 0
            work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)
            assert work is not None
            self._works.append(work)


def bucketed(parameters: Sequence[T], bucket_bytes: int = BUCKET_BYTES) -> list[list[T]]:
    """Divide parameters, or their gradients, into buckets, last ones first. All tensors of a bucket have one dtype."""
    groups: list[list[T]] = []
    size = 0
    for parameter in reversed(parameters):
        bytes_ = parameter.nbytes
        if not groups or size + bytes_ > bucket_bytes or groups[-1][0].dtype != parameter.dtype:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += bytes_
    return groups
