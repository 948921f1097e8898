"""Gradients, buffers and metrics over the groups of ranks, which train on different batches."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from cnnstrategies.spatial import RowsTensor

BUCKET = 25 << 20  # Largest number of bytes of gradients in one message, as in DistributedDataParallel.


def average_gradients(
    parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, cpu_group: dist.ProcessGroup
) -> None:
    """Average gradients over the ranks of a group, which must all call this.

    A gradient that some ranks do not have counts as zero there. If all ranks do not have it, it stays None.

    Args:
        parameters: The trained parameters.
        group: The ranks that have the same part in all groups of ranks.
        cpu_group: The same ranks, for tensors on the CPU.
    """
    if group.size() == 1:
        return
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    # On the CPU, so that the ranks do not wait for their devices.
    present = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.uint8)
    dist.all_reduce(present, dist.ReduceOp.MAX, group=cpu_group)
    used = [parameter for parameter, is_present in zip(trained, present.tolist(), strict=True) if is_present]
    for parameter in used:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for tensors in _buckets([parameter.grad for parameter in used if parameter.grad is not None]):
        values = _joined(tensors)
        dist.all_reduce(values, group=group)
        _write(values.div_(group.size()), tensors)


@torch.no_grad()
def copy_first(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Copy the values of tensors of the group's first rank to all ranks of the group, which must all call this.

    Args:
        tensors: The tensors, which have the same shapes on all ranks.
        group: The group; None for all ranks.
    """
    if dist.get_world_size(group) == 1:
        return
    for bucket in _buckets([tensor.detach() for tensor in tensors]):
        values = _joined(bucket)
        dist.broadcast(values, group_src=0, group=group)
        _write(values, bucket)


@contextmanager
def metrics_of_replicas(group: dist.ProcessGroup) -> Iterator[None]:
    """Return a context in which metrics synchronise with each group of ranks once, because a group has one batch.

    The method of the class is replaced, because callbacks and steps may create metrics at any time.

    Args:
        group: The ranks that have the same part in all groups of ranks.
    """
    synchronise = Metric.sync

    def sync(metric: Metric, dist_sync_fn: Any = None, process_group: Any = None, *args: Any, **kwargs: Any) -> None:
        if group.size() > 1:
            synchronise(
                metric, dist_sync_fn or _gathered, process_group or metric.process_group or group, *args, **kwargs
            )

    Metric.sync = sync  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Metric.sync = synchronise  # type: ignore[method-assign]


def whole_tensor(tensor: Tensor, why: str) -> Tensor:
    """Return a tensor with all rows. All ranks of a group must call this."""
    return tensor.parts.gather(tensor, why) if isinstance(tensor, RowsTensor) else tensor


def _gathered(tensor: Tensor, group: Any = None) -> list[Tensor]:
    """Return the values of a metric's state on all ranks of a group."""
    return gather_all_tensors(whole_tensor(tensor, "the state of a metric"), group)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors of the same dtype and device that are sent in one message."""
    kinds: defaultdict[Any, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        kinds[tensor.dtype, tensor.device].append(tensor)
    for group in kinds.values():
        bucket: list[Tensor] = []
        for tensor in group:
            if bucket and sum(other.nbytes for other in bucket) + tensor.nbytes > BUCKET:
                yield bucket
                bucket = []
            bucket.append(tensor)
        yield bucket


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _write(values: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor, piece in zip(tensors, torch.split(values, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(piece.view(tensor.shape))
