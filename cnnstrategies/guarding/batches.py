"""Search for batches that come again within an epoch, or that two ranks have at the same time."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from cnnstrategies.guarding.digests import sample_digest
from cnnstrategies.recording.steps import StepReader

LEAVES = 4  # Number of a batch's tensors that are looked at.
COMPARED = 16  # Largest number of batches after a check that are looked at.
FEWEST = 4  # Smallest number of batches of which a statement is made.
REPEATED = 0.2  # Fraction of an epoch's batches that were looked at, which must have come before.


class BatchRecords(StepReader):
    """Checksums of the batches, which stay on their devices until they are read.

    Args:
        is_held: Function that tells whether this rank has the values of a tensor.
    """

    def __init__(self, is_held: Callable[[Tensor], bool]) -> None:
        self._is_held = is_held
        self._waiting: list[Tensor] = []
        self._epoch: list[int] = []
        self._start: list[Tensor] = []  # Of the first batches of the epoch.
        self._last_start: list[int] = []  # Of the first batches of the epoch before.

    @override
    def begin_batch(self, batch: Any, index: int) -> None:
        """Record one of the first batches after a check, or of an epoch.

        A batch of which this rank has only some tensors, such as the targets, is left out.
        """
        if len(self._waiting) >= COMPARED and index >= FEWEST:
            return
        leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.numel()][:LEAVES]
        if leaves and all(type(leaf) is Tensor and self._is_held(leaf) for leaf in leaves):
            sums = [sample_digest(leaf) for leaf in leaves if leaf.layout is torch.strided]
            self._waiting.append(torch.stack(sums).sum())
            if index < FEWEST:
                self._start.append(self._waiting[-1])

    def take(self) -> list[int]:
        """Return the checksums of the batches since the last call."""
        if not self._waiting:
            return []
        sums: list[int] = torch.stack([value.to(self._waiting[0].device) for value in self._waiting]).tolist()
        self._waiting = []
        self._epoch += sums
        return sums

    def end_epoch(self) -> int:
        """Return how many batches of the epoch have come before in the epoch, if they are many; otherwise 0.

        If all batches are equal, so are the samples of the data set, and nothing follows from it.
        """
        self.take()
        count, distinct, self._epoch = len(self._epoch), len(set(self._epoch)), []
        is_many = count >= FEWEST and distinct > 1 and count - distinct > REPEATED * count
        return count - distinct if is_many else 0

    def repeats_order(self) -> bool:
        """Return whether the epoch has begun as the epoch before. Call this once at the end of each epoch."""
        before, now = self._last_start, [int(value) for value in self._start]
        self._last_start, self._start = now, []
        return len(now) == len(set(now)) == FEWEST and now == before


def fixed_row(sums: Sequence[int]) -> list[int]:
    """Return the checksums of the last batches as a row of fixed length, filled with zeros."""
    return [*sums[-COMPARED:], *[0] * (COMPARED - len(sums))][:COMPARED]


def equal_ranks(rows: Sequence[Sequence[int]], ranks: Sequence[int]) -> tuple[int, int] | None:
    """Return the first two ranks that have had the same batches; None if there are none.

    Args:
        rows: Checksums of the last batches, see :func:`fixed_row`, in rank order.
        ranks: Ranks that load batches of their own.
    """
    for place, rank in enumerate(ranks):
        mine = [value for value in rows[rank] if value]
        if len(mine) < FEWEST or len(set(mine)) == 1:
            continue
        for other in ranks[:place]:
            if list(rows[other]) == list(rows[rank]):
                return other, rank
    return None
