"""Keeps what the servers do not hold, the buffers, the same on all workers."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from cnnstrategies.strategies.parameter_server.group import WorkerGroup

PIECE_BYTES = 1 << 20  # 0.8 s over 10 Mbit/s: signs of life go the same way, and stand behind what was sent before


def take_state_of_rank_zero(module: nn.Module, group: WorkerGroup) -> None:
    """Start from rank 0's parameters and buffers on every rank; they come in pieces."""
    state = (*module.parameters(), *module.buffers())
    parts: list[list[Tensor]] = [[] for _ in state]
    for piece in _pieces(state):
        own = [state[index].detach().reshape(-1)[start:stop] for index, start, stop in piece] if group.rank == 0 else []
        for (index, _, _), part in zip(piece, group.broadcast(own, 0), strict=True):
            parts[index].append(part)
    with torch.no_grad():
        for tensor, own in zip(state, parts, strict=True):
            tensor.copy_(torch.cat(own).reshape(tensor.shape))


def _pieces(state: Sequence[Tensor]) -> Iterator[list[tuple[int, int, int]]]:
    """Parts of tensors that are sent together: the index of each, and its first element and the one after its last."""
    piece: list[tuple[int, int, int]] = []
    size = 0
    for index, tensor in enumerate(state):
        most = PIECE_BYTES // tensor.element_size()
        for start in range(0, max(1, tensor.numel()), most):
            stop = min(tensor.numel(), start + most)
            nbytes = (stop - start) * tensor.element_size()
            if piece and size + nbytes > PIECE_BYTES:
                yield piece
                piece, size = [], 0
            piece.append((index, start, stop))
            size += nbytes
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
