"""Messages between the ranks that have parts of the same images."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from cnnstrategies.placed.messages import LinkError

OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# Backends do not reduce these dtypes, or reduce them with large errors.
_REDUCED_AS = {torch.bool: torch.uint8, torch.float16: torch.float32, torch.bfloat16: torch.float32}


class PartsLink(Protocol):
    """Connection of a rank to all ranks. All ranks call the methods in the same order.

    Attributes:
        rank: This rank.
        count: Number of ranks.
    """

    rank: int
    count: int

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Callable[[], None]:
        """Begin to send contiguous tensors to ranks, and to receive into contiguous tensors from ranks.

        Return a function that waits for the end of both. It must be called before the next message of the ranks, apart
        from sums that have begun.

        Raises:
            LinkError: The connection is broken, or the time-out is over. The function that waits raises it as well.
        """

    def reduce(self, tensor: Tensor, operation: str) -> Tensor:
        """Return the sum, maximum or minimum of a tensor over the ranks.

        Raises:
            LinkError: The connection is broken, or the time-out is over.
        """

    def begin_sum(self, tensor: Tensor) -> Callable[[], None]:
        """Begin to sum a contiguous tensor over the ranks in place.

        Return a function that waits for the sum. Other messages may be sent before it is called.

        Raises:
            LinkError: The connection is broken, or the time-out is over. The function that waits raises it as well.
        """


class GroupLink:
    """Connection over a process group of torch, such as gloo or NCCL.

    Nothing is posted before all ranks post it, because NCCL would let a GPU wait for it. Rows of other ranks are on
    their way while an operation computes its inner rows, and sums of gradients while the backward goes on. All messages
    of an exchange are posted as one, and have arrived before the next message is posted, apart from sums of gradients.
    All ranks post sums and exchanges in the same order. So GPUs cannot wait for each other without end, even if each of
    them does one thing at a time. With NCCL, all ranks must have taken part in a message before the first exchange.

    Args:
        group: The process group of the ranks.
        cpu_group: Process group of the same ranks for tensors on the CPU; by default `group`.
    """

    def __init__(self, group: dist.ProcessGroup, cpu_group: dist.ProcessGroup | None = None) -> None:
        self._group, self._cpu_group = group, group if cpu_group is None else cpu_group
        self.rank, self.count = group.rank(), group.size()

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Callable[[], None]:
        """Begin to send contiguous tensors to ranks, and to receive into contiguous tensors from ranks."""
        posted = [
            dist.P2POp(function, tensor.reshape(-1).view(torch.uint8), group=self._group_for(tensor), group_peer=peer)
            for function, tensors in ((dist.isend, sends), (dist.irecv, receives))
            for peer, tensor in tensors.items()
        ]
        peers: list[int | None] = [*sends, *receives]
        only = peers[0] if len(set(peers)) == 1 else None
        with link_errors(only):
            works = dist.batch_isend_irecv(posted) if posted else []
        if len(works) < len(posted):  # With NCCL, all messages of a batch are one work.
            peers = [only] * len(works)

        def wait() -> None:
            for peer, work in zip(peers, works, strict=True):
                with link_errors(peer):
                    work.wait()
            posted.clear()

        return wait

    def reduce(self, tensor: Tensor, operation: str) -> Tensor:
        """Return the sum, maximum or minimum of a tensor over the ranks."""
        total = tensor.to(_REDUCED_AS.get(tensor.dtype, tensor.dtype), copy=True).contiguous()
        with link_errors():
            dist.all_reduce(total, OPERATIONS[operation], group=self._group_for(total))
        return total.to(tensor.dtype)

    def begin_sum(self, tensor: Tensor) -> Callable[[], None]:
        """Begin to sum a contiguous tensor over the ranks in place."""
        total = tensor.to(_REDUCED_AS.get(tensor.dtype, tensor.dtype))
        with link_errors():
            work = dist.all_reduce(total, group=self._group_for(total), async_op=True)

        def wait() -> None:
            with link_errors():
                work.wait()
            if total is not tensor:
                tensor.copy_(total)

        return wait

    def _group_for(self, tensor: Tensor) -> dist.ProcessGroup:
        return self._cpu_group if tensor.device.type == "cpu" else self._group


@contextmanager
def link_errors(peer: int | None = None) -> Iterator[None]:
    """Turn errors of the backend inside the context into a `LinkError`.

    Args:
        peer: The rank to which the message goes or from which it comes; None for a message of several ranks.
    """
    try:
        yield
    except RuntimeError as error:
        text = re.sub(r"^\[\S+\] ", "", str(error))  # Gloo's file and line.
        broken = LinkError(text.splitlines()[0].partition(". This is typically")[0])  # Gloo's guess and greeting.
        broken.peer = peer
        raise broken from error
