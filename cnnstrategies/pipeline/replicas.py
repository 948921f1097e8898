"""Sums of gradients, and exchanges of rows, among the replicas of a stage."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cnnstrategies._torch_private import copy_all
from cnnstrategies.pipeline.channels import memory_format_of, on_the_wire
from cnnstrategies.pipeline.gradients import Bucket, bucketed
from cnnstrategies.pipeline.transport import Transport, new_group


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

    def sum_gradients(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the gradients' sums over the replicas, which are equal on all replicas. All replicas must call this.

        Args:
            parameters: Parameters of the stage, the same on all replicas.
            gradients: For each parameter, the sum over the microbatches that this replica runs; None if no microbatch
                gives the parameter a gradient. If the stage has one replica, there must be no None.
        """
        if self.group is None:
            return [gradient for gradient in gradients if gradient is not None]
        by_parameter = dict(zip(parameters, gradients, strict=True))
        sums: dict[nn.Parameter, Tensor] = {}
        with self._transport.collective("summing the gradients of the stage"):
            works = []
            for bucket in map(Bucket, bucketed(parameters)):
                pairs = [(view, by_parameter[p]) for p, view in zip(bucket.parameters, bucket.views, strict=True)]
                filled = [(view, gradient) for view, gradient in pairs if gradient is not None]
                if filled:
                    copy_all([view for view, _ in filled], [gradient for _, gradient in filled])
                works.append(dist.all_reduce(bucket.flat, group=self.group, async_op=True))
                sums |= zip(bucket.parameters, bucket.views, strict=True)
            for work in works:
                assert work is not None
                work.wait()
        return [sums[parameter] for parameter in parameters]
