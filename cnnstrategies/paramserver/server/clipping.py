"""Clipping by the global norm of a gradient whose slices are spread over the servers."""

import math
from collections.abc import Collection, Iterable

import torch
from torch import Tensor


def squared_norm(tensors: Iterable[Tensor | None]) -> float:
    """The squared Euclidean norm of several tensors together, in float64; None counts as zeros."""
    norms: list[float] = [
        torch.linalg.vector_norm(one, dtype=torch.float64).item() for one in tensors if one is not None
    ]
    return sum(norm * norm for norm in norms)


class GlobalNorm:
    """The servers' squared norms of the present step, as the leader is told them.

    Args:
        limit: The largest norm; None if nothing is clipped.

    Attributes:
        sent: Whether this server has told its own.
    """

    def __init__(self, limit: float | None) -> None:
        self.sent = False
        self._limit = limit
        self._squares: dict[int, float] = {}

    def clear(self) -> None:
        """Begin anew: with another step, or because the slices have other servers."""
        self.sent = False
        self._squares.clear()

    def add(self, server: int, square: float, servers: Collection[int]) -> float | None:
        """Note a server's squared norm.

        Returns:
            The factor by which the gradient is multiplied, once all servers have told theirs.
        """
        self._squares[server] = square
        if not self._squares.keys() >= set(servers):
            return None
        assert self._limit is not None
        # As torch.nn.utils.clip_grad_norm_ does it; a norm that is not a number stays one.
        factor = self._limit / (math.sqrt(sum(self._squares.values())) + 1e-6)
        return 1.0 if factor > 1 else factor
