"""Process groups of torch.distributed, and values that are sent to all ranks of a group without pickle."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cnnstrategies.codec import from_bytes, to_bytes

# Type of a function that sends this rank's list of numbers to all ranks, and returns all ranks' lists in rank order.
GatherRows = Callable[[list[float]], list[list[float]]]
_CPU = torch.device("cpu")


class PeerError(RuntimeError):
    """A rank did not respond, or its connection broke. The error message names the ranks and the transfer."""


def new_group(ranks: Iterable[int], timeout: timedelta, backend: str | None = None) -> dist.ProcessGroup | None:
    """Create a process group of some ranks. All ranks of the default group must call this.

    Returns:
        The group; None on ranks that do not belong to the group.
    """
    group = dist.new_group(list(ranks), timeout=timeout, backend=backend)
    return group if isinstance(group, dist.ProcessGroup) else None


@contextmanager
def cpu_group(timeout: timedelta) -> Iterator[dist.ProcessGroup | None]:
    """Provide a process group of all ranks for tensors on the CPU. All ranks must call this.

    If the backend of the default group is gloo, the default group is used. Otherwise a group is created, and destroyed
    on exit.
    """
    if dist.get_backend() == "gloo":
        yield dist.group.WORLD
        return
    group = new_group(range(dist.get_world_size()), timeout, backend="gloo")
    yield group
    dist.destroy_process_group(group)


def broadcast_value(
    value: Any, source: int, device: torch.device = _CPU, group: dist.ProcessGroup | None = None
) -> Any:
    """Send a value from one rank to all ranks of a group, without pickle. All ranks of the group must call this.

    Args:
        value: On the source rank, a value that the codec can encode; ignored on other ranks.
        source: Rank that has the value.
        device: Device for the tensors that are sent.
        group: The group; by default all ranks.

    Returns:
        The value of the source rank.

    Raises:
        CodecError: The value cannot be encoded. Only the source rank raises this error.
    """
    is_source = dist.get_rank() == source
    message = bytes_as_tensor(to_bytes(value)) if is_source else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([len(message)], device=device)
    dist.broadcast(length, source, group=group)
    message = message.to(device) if is_source else torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(message, source, group=group)
    return from_bytes(message.cpu().numpy().tobytes())


def bytes_as_tensor(data: Any) -> Tensor:
    """Return bytes as a uint8 tensor. If the data is a writable buffer, the tensor shares the buffer's memory."""
    if isinstance(data, bytes):
        data = bytearray(data)
    return torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)


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
