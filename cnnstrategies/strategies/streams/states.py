"""States of the loaders of all processes, for a checkpoint."""

import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def gather_states(state: Any, gather: Callable[[list[int]], list[list[int]]]) -> list[Tensor]:
    """Return the states of the loaders of all processes, in rank order. All processes must call this.

    Args:
        state: State of this process's loader; None if the loader has not begun.
        gather: Function that sends a row of numbers to all processes, and returns the rows of all processes.

    Returns:
        The bytes of each state, uint8 (bytes,). The list is empty if a loader has not begun.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = list(buffer.getvalue())
    sizes = [size if has_state else 0 for size, has_state in gather([len(data), state is not None])]
    if not all(sizes):
        return []
    rows = gather(data + [0] * (max(sizes) - len(data)))
    return [torch.tensor(row[:size], dtype=torch.uint8) for row, size in zip(rows, sizes, strict=True)]


def state_of_rank(states: Sequence[Tensor], rank: int) -> Any:
    """Return the state of one process's loader from the result of :func:`gather_states`."""
    return torch.load(io.BytesIO(states[rank].numpy().tobytes()), weights_only=True)
