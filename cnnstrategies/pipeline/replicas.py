"""Sums of gradients, and exchanges of rows, among the replicas of a stage."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cnnstrategies._torch_private import copy_all
from cnnstrategies.pipeline.gradients import bucketed
from cnnstrategies.pipeline.tensor_headers import memory_format_of, on_the_wire
from cnnstrategies.pipeline.transport import Transport
from cnnstrategies.runtime.groups import new_group


class StageReplicas:
    """The replicas of this rank's stage. All ranks must create this object at the same time.

    Args:
        transport: Connections of this rank.

    Attributes:
        group: Process group of the replicas; None if the stage has one replica.
    """

    def __init__(self, transport: Transport) -> None:
        placement = transport.placement
        groups = [
            new_group(placement.ranks(stage), transport.timeout) if count > 1 else None
            for stage, count in enumerate(placement.replicas)
        ]
        self.group = groups[transport.place.stage]
        self._transport = transport

    def close(self) -> None:
        """Destroy the process group. All replicas must call this, after the last step."""
        if self.group is not None:
            dist.destroy_process_group(self.group)
        self.group = None

    def share_rows(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> None:
        """Copy the rows of each microbatch from the replica that runs the microbatch to the other replicas.

        All replicas must call this.

        Args:
            tensors: Tensors with the rows of the whole batch, contiguous or in the memory format ``channels_last``. The
                rows of microbatches that other replicas run are overwritten. If the batch is one microbatch, the
                tensors may have any shape.
            sizes: Number of rows of each microbatch.
        """
        if self.group is None:
            return
        transport = self._transport
        runs = transport.placement.runs[transport.place.stage]
        with transport.collective("sharing the rows of microbatches"):
            works = []
            for tensor in tensors:
                # gloo cannot send tensors of all dtypes, but it can send bytes.
                data = on_the_wire(tensor, memory_format_of(tensor)).flatten().view(torch.uint8)
                parts = torch.split(data, [len(data) * size // sum(sizes) for size in sizes])
                works += [
                    dist.broadcast(part, group=self.group, group_src=replica, async_op=True)
                    for part, replica in zip(parts, runs, strict=True)
                    if part.numel()
                ]
            for work in works:
                assert work is not None
                work.wait()

    def sum_in_place(self, gradients: Sequence[Tensor]) -> None:
        """Replace gradients by their sums over the replicas, which are equal on all replicas.

        All replicas must call this, with tensors of equal shapes and dtypes.
        """
        self._through_buckets(gradients, partial(dist.all_reduce, group=self.group, async_op=True), "summing")

    def copy_from_first(self, gradients: Sequence[Tensor]) -> None:
        """Replace gradients by those of the first replica, as :meth:`sum_in_place` replaces them by sums."""
        broadcast = partial(dist.broadcast, group=self.group, group_src=0, async_op=True)
        self._through_buckets(gradients, broadcast, "sharing")

    def _through_buckets(self, tensors: Sequence[Tensor], collective: Callable[[Tensor], Any], action: str) -> None:
        """Run a collective on buckets that contain the tensors, and write the results back."""
        if self.group is None or not tensors:
            return
        with self._transport.collective(f"{action} the gradients of the stage"):
            buckets = [(part, torch.cat([tensor.reshape(-1) for tensor in part])) for part in bucketed(tensors)]
            works = [collective(flat) for _, flat in buckets]
            for (part, flat), work in zip(buckets, works, strict=True):
                work.wait()
                sections = torch.split(flat, [tensor.numel() for tensor in part])
                pairs = zip(sections, part, strict=True)
                copy_all(part, [section.view(tensor.shape) for section, tensor in pairs])
