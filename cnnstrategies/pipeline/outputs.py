"""The network's outputs for the global batch, on every rank."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from cnnstrategies.pipeline.microbatches import Split
from cnnstrategies.pipeline.transport import Transport, broadcast_value


@dataclass
class Gathering:
    """Outputs on their way to every rank.

    Attributes:
        leaves: The leaves of what the network returned.
        tree: How they are nested.
        pieces: For each part of a tensor the whole, its rows there, itself and the transfer.
    """

    leaves: list[Any]
    tree: TreeSpec
    pieces: list[tuple[Tensor, Tensor, Tensor, dist.Work | None]] = field(default_factory=list)

    def finish(self) -> Any:
        """What the network would have returned for the whole batch."""
        for whole, rows, piece, work in self.pieces:
            if work is not None:
                work.wait()
            whole[rows] = piece
        return tree_unflatten(self.leaves, self.tree)


class OutputGatherer:
    """Sends the last stage's outputs to every rank, in the order of the global batch.

    Args:
        transport: Its control group carries the structure of the outputs.
    """

    def __init__(self, transport: Transport) -> None:
        self.placement = transport.placement
        self.transport = transport
        self.device = transport.device
        self._structures: dict[Hashable, Any] = {}

    def knows(self, kind: Hashable) -> bool:
        """Whether outputs of a kind were gathered before, so that nothing has to be waited for to start."""
        return kind in self._structures

    def start(self, split: Split, outputs: Mapping[int, Any], kind: Hashable) -> "Gathering":
        """Begin to gather the outputs for the global batch; a collective.

        Args:
            split: The microbatches.
            outputs: In the last stage what the network returned for each of this rank's microbatches: a tensor with
                one row per sample, or nested containers of such tensors and plain data.
            kind: What structure and types of the outputs depend on; the same on every rank.
        """
        last = self.placement.stages - 1
        if kind not in self._structures:
            first = next(microbatch for microbatch, size in enumerate(split.sizes) if size)
            # Each tensor's row, by shape and type, and the plain leaves.
            rows = tree_map_only(Tensor, _row, outputs.get(first))
            source = self.placement.rank_of(last, first)
            known = broadcast_value(rows, source, group=self.transport.control)
            self._structures[kind] = tree_flatten(known)
        leaves, tree = self._structures[kind]
        parts = {microbatch: tree_flatten(result)[0] for microbatch, result in outputs.items()}
        gathering = Gathering(list(leaves), tree)
        for index, row in enumerate(leaves):
            if not isinstance(row, Tensor):
                continue
            whole = torch.empty((split.samples, *row.shape), dtype=row.dtype, device=self.device)
            gathering.leaves[index] = whole
            for replica, rank in enumerate(self.placement.ranks(last)):
                own = [m for m in range(replica, split.microbatches, self.placement.replicas[last]) if split.sizes[m]]
                if not own:
                    continue
                rows = split.global_rows(*own, device=self.device)
                if rank == self.transport.rank:
                    # In channels_last, which cat keeps, others would take the numbers for those of another layout.
                    piece = torch.cat([parts[m][index] for m in own]).contiguous()
                else:
                    piece = torch.empty((len(rows), *row.shape), dtype=row.dtype, device=self.device)
                work = dist.broadcast(piece, rank, async_op=True) if self.placement.world_size > 1 else None
                gathering.pieces.append((whole, rows, piece, work))
        return gathering


def _row(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape[1:], dtype=tensor.dtype, device="meta")
