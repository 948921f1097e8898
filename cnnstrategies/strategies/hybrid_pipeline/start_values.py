"""Start a run with the same values of parameters and buffers on all ranks, or on all replicas of a stage."""

from datetime import timedelta

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor

from cnnstrategies.placed import ForeignTensor
from cnnstrategies.runtime.groups import cpu_group
from cnnstrategies.strategies.hybrid_pipeline.network import tensors_of


def broadcast_weights(module: LightningModule, timeout: timedelta) -> None:
    """Start with rank 0's parameters and buffers on all ranks, which must all call this.

    Args:
        module: The module, which is the whole module on every rank.
        timeout: Longest wait for another rank.
    """
    if dist.get_world_size() == 1:
        return
    with cpu_group(timeout) as group:
        for _, tensor in tensors_of(module):
            _broadcast(tensor, tensor.detach().cpu(), group)


def share_among_replicas(module: LightningModule, group: dist.ProcessGroup | None) -> None:
    """Start with the values of a stage's first replica on all replicas of the stage, which must all call this.

    Args:
        module: The module, whose parameters and buffers have places.
        group: Group of the replicas; None if the stage has one replica.
    """
    if group is None:
        return
    for _, tensor in tensors_of(module):
        if not isinstance(tensor, ForeignTensor):
            _broadcast(tensor, tensor.detach(), group)


@torch.no_grad()
def _broadcast(tensor: Tensor, value: Tensor, group: dist.ProcessGroup | None) -> None:
    value = value.contiguous()
    dist.broadcast(value, group=group, group_src=0)
    tensor.copy_(value)
