"""Gather numbers of all ranks, such as measured times, which differ between ranks under every strategy."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

# Type of a function that sends this rank's list of numbers to all ranks, and returns all ranks' lists in rank order.
GatherRows = Callable[[list[float]], list[list[float]]]


def gather_tensors(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the tensors of all ranks of a group in rank order (ranks, ...), on the device of this rank's tensor.

    All ranks of the group must call this.

    Args:
        values: Tensor of this rank (...), of the same shape and dtype on all ranks.
        group: A process group with the backend gloo; None for the default group.
    """
    row = values.detach().cpu().contiguous()
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, row, group=group)
    return torch.stack(rows).to(values.device)


def gather_rows(row: list[float], gather: Callable[[Tensor], Tensor]) -> list[list[float]]:
    """Return the lists of numbers of all ranks in rank order.

    All ranks must call this, with lists of equal length.

    Args:
        row: The list of this rank.
        gather: Function that gathers tensors of all ranks, such as `gather_tensors`.
    """
    rows: list[list[float]] = gather(torch.tensor(row, dtype=torch.float64)).tolist()
    return rows
