"""Keeps what the servers do not hold, the buffers, the same on all workers."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from cnnstrategies.strategies.parameter_server.group import WorkerGroup

PIECE_BYTES = 1 << 20  # 0.8 s over 10 Mbit/s: signs of life go the same way, and stand behind what was sent before


def take_state_of_rank_zero(module: nn.Module, group: WorkerGroup) -> None:
    """Start from rank 0's parameters and buffers on every rank; they come in pieces."""
    state = (*module.parameters(), *module.buffers())
    flat = [tensor.detach().reshape(-1) for tensor in state]
    for piece in _pieces(part for one in flat for part in torch.split(one, PIECE_BYTES // one.element_size())):
        for part, value in zip(piece, group.broadcast(piece if group.rank == 0 else [], 0), strict=True):
            part.copy_(value)
    with torch.no_grad():
        for tensor, one in zip(state, flat, strict=True):  # Of what is not contiguous the flat one is a copy.
            tensor.copy_(one.reshape(tensor.shape))


def _pieces(parts: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Those that are sent together."""
    piece: list[Tensor] = []
    size = 0
    for part in parts:
        if piece and size + part.nbytes > PIECE_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(part)
        size += part.nbytes
    if piece:
        yield piece


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
