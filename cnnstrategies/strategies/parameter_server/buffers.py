"""Keeps what the servers do not hold, the buffers, the same on all workers."""

import torch
from torch import nn
from torchmetrics import Metric

from cnnstrategies.strategies.parameter_server.group import WorkerGroup


def take_state_of_rank_zero(module: nn.Module, group: WorkerGroup) -> None:
    """Start from rank 0's parameters and buffers on every rank."""
    state = (*module.parameters(), *module.buffers())
    values = group.broadcast([tensor.detach() for tensor in state] if group.rank == 0 else [], 0)
    with torch.no_grad():
        for tensor, value in zip(state, values, strict=True):
            tensor.copy_(value)


def average_buffers(module: nn.Module, group: WorkerGroup) -> None:
    """Replace floating-point buffers by their mean over the workers, others by their maximum; not those of metrics."""
    metrics = {id(b) for m in module.modules() if isinstance(m, Metric) for b in m.buffers()}
    buffers = [buffer for buffer in module.buffers() if id(buffer) not in metrics]
    if not buffers or group.world_size == 1:
        return
    values = group.gather(buffers, "buffers")
    with torch.no_grad():
        for index, buffer in enumerate(buffers):
            stacked = torch.stack([values[rank][index] for rank in sorted(values)])
            buffer.copy_(stacked.mean(0) if buffer.is_floating_point() else stacked.amax(0))
