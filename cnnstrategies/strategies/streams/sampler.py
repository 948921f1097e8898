"""Numbers of samples of the processes in the batches of a stream."""

from collections.abc import Sequence
from typing import Any

from torch.utils.data import DistributedSampler
from typing_extensions import override

from cnnstrategies.shares.history import ShareHistory
from cnnstrategies.shares.samplers import EquallyAccumulated

KEPT = 64  # Number of batches whose counts are known at the same time. A loader prefetches fewer batches.


class StreamedBatches(EquallyAccumulated):
    """Numbers of samples of the processes in each batch of a stream. They are known when the batch is loaded.

    The class does not draw samples. It tells the strategies how the samples of a batch are weighted.

    Args:
        batch_size: Number of samples in a batch of a process; None if the stream yields batches of any size.
        processes: Number of processes.
        process: Number of this process.
        accumulated: Number of batches whose gradients are accumulated for a step.
        drop_last: Whether a last global batch with fewer samples is left out.
    """

    follows_shares = False

    def __init__(self, batch_size: int | None, processes: int, process: int, accumulated: int, drop_last: bool) -> None:
        nothing: Any = range(0)
        DistributedSampler.__init__(self, nothing, processes, process, shuffle=False, drop_last=drop_last)
        self.size, self.accumulated = 0, accumulated
        self.samples = (batch_size or 0) * processes * accumulated
        self.history = ShareHistory([1] * processes)
        self.drawn = 0
        self._usual = (batch_size or 1,) * processes
        self._counts: dict[int, tuple[int, ...]] = {}

    def note(self, batch: int, counts: Sequence[int]) -> None:
        """Note the number of samples of each process in a batch of the current epoch."""
        if len(counts) < self.num_replicas:  # Only this process's number is known.
            counts = [*self._usual[: self.rank], counts[0], *self._usual[self.rank + 1 :]]
        self._counts[batch] = tuple(counts)
        self._counts.pop(batch - KEPT, None)

    def own_count(self, batch: int) -> int:
        """Return the number of this process's samples in a batch of the current epoch; 0 if it was not loaded here."""
        counts = self._counts.get(batch)
        return 0 if counts is None else counts[self.rank]

    def begin(self) -> None:
        """Forget the batches of the epoch before."""
        self._counts.clear()

    @override
    def __len__(self) -> int:
        raise TypeError("the number of batches of a stream is not known")

    @override
    def counts(self, batch: int) -> tuple[int, ...]:
        return self._counts.get(batch, self._usual)

    @override
    def step_of(self, batch: int) -> range:
        first = batch // self.accumulated * self.accumulated
        return range(first, first + self.accumulated)
