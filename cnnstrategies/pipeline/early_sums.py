"""Sums of gradients over the replicas of a stage, bucket by bucket, while the last backward of a call still runs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cnnstrategies.pipeline.gradients import bucketed


class EarlySums:
    """The sums of a call's gradients, which are sent as soon as the call's last backward has made the gradients.

    All replicas of the stage create this object with the same parameters, and send the buckets in the same order. The
    buckets are those of `StageReplicas.sum_in_place`, so that the sums are equal in each bit.

    Args:
        parameters: Parameters that may have a gradient on any replica, in the order of the network.
        group: Group of the replicas.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._group = group
        self._works: list[dist.Work] = []
        self._flats: dict[int, Tensor] = {}  # Buckets are created when their first gradient is ready.
        self._missing: list[set[int]] = []  # For each bucket, ids of the parameters that are not in it yet.
        self._bucket_of: dict[int, int] = {}
        self._parts: dict[int, Tensor] = {}  # By a parameter's id, its part of the bucket.
        self._buckets = bucketed(parameters)
        for index, bucket in enumerate(self._buckets):
            self._missing.append(set(map(id, bucket)))
            self._bucket_of |= dict.fromkeys(map(id, bucket), index)

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._bucket_of

    @contextmanager
    def during(self, parameters: Sequence[nn.Parameter], sums: list[Tensor | None]) -> Iterator[None]:
        """Return a context for the last backward, in which complete buckets are sent.

        Args:
            parameters: The parameters of the stage.
            sums: For each parameter, the sum of the gradients of this replica's other microbatches. Autograd's gradient
                is added; the sum is then a part of a bucket.
        """
        handles = [
            parameter.register_hook(partial(self._add, parameter, index, sums))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(parameters)
            if parameter in self
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _part(self, parameter: nn.Parameter) -> Tensor:
        index = self._bucket_of[id(parameter)]
        if index not in self._flats:
            bucket = self._buckets[index]
            sizes = [parameter.numel() for parameter in bucket]
            self._flats[index] = flat = bucket[0].detach().new_empty(sum(sizes))
            for other, part in zip(bucket, torch.split(flat, sizes), strict=True):
                self._parts[id(other)] = part.view(other.shape)
        return self._parts[id(parameter)]

    def _add(self, parameter: nn.Parameter, index: int, sums: list[Tensor | None], gradient: Tensor) -> None:
        part, present = self._part(parameter), sums[index]
        dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
        if present is None:
            part.copy_(dense)
        else:
            torch.add(present, dense, out=part)
        sums[index] = part
        self._missing[self._bucket_of[id(parameter)]].discard(id(parameter))
        self._send()

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter's gradient of this replica is in its bucket."""
        return parameter in self and id(parameter) not in self._missing[self._bucket_of[id(parameter)]]

    def _send(self) -> None:
        while len(self._works) < len(self._buckets) and not self._missing[len(self._works)]:
            work = dist.all_reduce(self._flats[len(self._works)], group=self._group, async_op=True)
            assert work is not None
            self._works.append(work)

    def finish(self, parameters: Sequence[nn.Parameter], sums: list[Tensor | None]) -> None:
        """Send the remaining buckets. All replicas must call this after their last backward.

        Args:
            parameters: The parameters of the stage.
            sums: For each parameter, the sum of the gradients of this replica's microbatches, which becomes a part of a
                bucket; None if the parameter has no gradient here.
        """
        for index, parameter in enumerate(parameters):
            if parameter in self and not self.has(parameter):
                part, present = self._part(parameter), sums[index]
                part.zero_() if present is None else part.copy_(present)
                sums[index] = None if present is None else part
        for missing in self._missing:
            missing.clear()
        self._send()

    def wait(self) -> None:
        """Wait until all sums have arrived, in the parts that :meth:`during` and :meth:`finish` have returned."""
        for work in self._works:
            work.wait()

    def sum_of(self, parameter: nn.Parameter) -> Tensor:
        """Return the sum of a parameter's gradients over the replicas, after :meth:`wait`."""
        return self._parts[id(parameter)]
