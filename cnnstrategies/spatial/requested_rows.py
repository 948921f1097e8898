"""Rows that other ranks are sending, while this rank computes."""

from collections.abc import Callable

import torch
from torch import Tensor

from cnnstrategies.spatial.rows_tensor import memory_format_of


class RequestedRows:
    """This rank's rows, and rows that other ranks are sending.

    Args:
        rows: This rank's rows.
        axis: Dimension of the rows.
        held: First row of this rank, and the row after its last one.
        received: For each message, its first row, and the tensor into which it is received.
        wait: Function that waits for the messages.
        note_copy: Function that is called with each copy of rows.
    """

    def __init__(
        self,
        rows: Tensor,
        axis: int,
        held: tuple[int, int],
        received: list[tuple[int, Tensor]],
        wait: Callable[[], None],
        note_copy: Callable[[Tensor], None],
    ) -> None:
        self._rows, self._axis, self._held, self._wait = rows, axis, held, wait
        self._received, self._note_copy = received, note_copy
        self._is_complete = False

    def wait(self) -> None:
        """Wait for the messages."""
        if not self._is_complete:
            self._wait()
            self._is_complete = True

    def rows(self, low: int, high: int, fill: float = 0, has_own: bool = True) -> Tensor:
        """Return a range of rows.

        Args:
            low: First row.
            high: Row after the last one.
            fill: Value of rows that no rank has.
            has_own: Whether the result contains this rank's rows; otherwise their place is filled, too.
        """
        self.wait()
        axis, rows = self._axis, self._rows
        first, last = overlap(self._held, (low, high))
        start, end = self._held
        if has_own and first < last and (first, last) == (low, high):
            return rows.narrow(axis, low - start, high - low) if (low, high) != (start, end) else rows
        pieces = [(start, rows), *self._received] if has_own else self._received
        blocks, reached = [], low
        # Messages have the order of the dimensions, so blocks may differ from the rows in their order in memory.
        memory_format = memory_format_of(rows)
        for position, piece in sorted(pieces, key=lambda pair: pair[0]):
            first, last = overlap((position, position + piece.shape[axis]), (low, high))
            if first >= last:
                continue
            if first > reached:
                blocks.append(rows.new_full(with_length(rows, axis, first - reached), fill))
            blocks.append(piece.narrow(axis, first - position, last - first))
            reached = last
        if high > reached:
            blocks.append(rows.new_full(with_length(rows, axis, high - reached), fill))
        blocks = [block.contiguous(memory_format=memory_format) for block in blocks]
        if not blocks:
            return rows.narrow(axis, 0, 0)
        copied = torch.cat(blocks, axis)
        self._note_copy(copied)
        return copied


def overlap(range_: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    """Return the rows that are in both ranges."""
    return max(range_[0], other[0]), min(range_[1], other[1])


def with_length(tensor: Tensor, axis: int, length: int) -> list[int]:
    """Return the shape of a tensor with another length of a dimension."""
    shape = list(tensor.shape)
    shape[axis] = length
    return shape
