"""Ranks of divided tensors as threads of one process, of which one runs at a time; see `turns.py`."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from cnnstrategies.spatial import SpatialParts
from tests.placed.turns import MemoryLink, Turns


class TensorLink:
    """A rank's messages to the other threads."""

    def __init__(self, link: Any, rank: int, count: int) -> None:
        self._link, self.rank, self.count = link, rank, count

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Callable[[], None]:
        for peer, tensor in sends.items():
            assert tensor.is_contiguous()
            self._link.send(peer, tensor.clone())

        def wait() -> None:
            for peer, tensor in receives.items():
                received = self._link.receive(peer)
                assert (received.shape, received.dtype) == (tensor.shape, tensor.dtype)
                tensor.copy_(received)

        return wait

    def reduce(self, tensor: Tensor, operation: str) -> Tensor:
        for peer in range(self.count):
            if peer != self.rank:
                self._link.send(peer, tensor.clone())
        tensors = [tensor if peer == self.rank else self._link.receive(peer) for peer in range(self.count)]
        stacked = torch.stack(tensors)
        return stacked.sum(0, dtype=tensor.dtype) if operation == "sum" else getattr(stacked, f"a{operation}")(0)

    def begin_sum(self, tensor: Tensor) -> Callable[[], None]:
        total = self.reduce(tensor, "sum")
        return lambda: tensor.copy_(total)


def on_parts(count: int, function: Callable[[SpatialParts], Any]) -> list[Any]:
    """Return the results of ``function(parts)`` on each rank. Raise a rank's error."""

    def main(rank: int, link: MemoryLink) -> Any:
        with SpatialParts(TensorLink(link, rank, count)) as parts:
            return function(parts)

    results, errors = Turns(count).run(main)
    for error in sorted(filter(None, errors), key=lambda error: type(error).__name__ == "DivergedError"):
        raise error
    return results
