"""Chunks of an epoch's samples, given to whoever asks: faster workers take more.

A chunk is taken by one worker, and is done when that worker asks for the next or says so. The chunks of a worker that
dies are given out again: every sample is processed exactly once, or at least once after a death.
"""

from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Chunk:
    """Positions ``start`` to ``stop`` (exclusive) in the epoch's order; empty when the epoch is done."""

    start: int
    stop: int


DONE = Chunk(0, 0)


@dataclass
class _Epoch:
    waiting: deque[Chunk]
    held: dict[int, Chunk] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)


class Dispatcher:
    """The chunks of the epochs of one run. No sockets, no clock."""

    def __init__(self) -> None:
        self._epochs: dict[int, _Epoch] = {}

    def begin(self, number: int, samples: int, chunk: int) -> None:
        """Cut an epoch into chunks; the first worker that gets there does it, the others find it done.

        Args:
            number: Of the epoch; it counts up.
            samples: How many there are.
            chunk: Samples of a chunk.
        """
        if number in self._epochs or chunk < 1:
            return
        for old in [other for other in self._epochs if other < number - 1]:
            del self._epochs[old]
        starts = range(0, samples, chunk)
        self._epochs[number] = _Epoch(deque(Chunk(start, min(start + chunk, samples)) for start in starts))

    def take(self, worker: int, number: int) -> Chunk | None:
        """The next chunk for a worker.

        Returns:
            The chunk; an empty one when every chunk of the epoch is done; None while others still work on the last
            ones, which the worker gets if they die.
        """
        epoch = self._epochs.get(number)
        if epoch is None:
            return DONE
        if epoch.waiting:
            chunk = epoch.waiting.popleft()
            epoch.held[worker] = chunk
            epoch.taken[worker] = epoch.taken.get(worker, 0) + chunk.stop - chunk.start
            return chunk
        return None if epoch.held else DONE

    def finish(self, worker: int, number: int) -> None:
        """A worker has processed what it held."""
        epoch = self._epochs.get(number)
        if epoch is not None:
            epoch.held.pop(worker, None)

    def lose(self, worker: int) -> None:
        """A worker has died: what it held is given out again, first."""
        for epoch in self._epochs.values():
            chunk = epoch.held.pop(worker, None)
            if chunk is not None:
                epoch.waiting.appendleft(chunk)

    def taken(self, number: int) -> dict[int, int]:
        """Samples that each worker has taken in an epoch."""
        epoch = self._epochs.get(number)
        return {} if epoch is None else dict(epoch.taken)
