"""Chunks of an epoch's samples, given to workers on request: faster workers take more chunks.

A worker may take chunks ahead of what it has processed, and therefore reports its progress. Chunks that a dead worker
had taken and not processed are given out again: every sample is processed exactly once, or at least once after a death.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from cnnstrategies.paramserver.core.node import ControlError


@dataclass(frozen=True)
class Chunk:
    """Positions ``start`` to ``stop`` (exclusive) in the order of ``epoch``; empty if no samples are left."""

    epoch: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass
class Share:
    """One worker's part of an epoch.

    Attributes:
        held: Chunks that are not processed, in the order in which they were taken.
        finished: Number of positions in the processed chunks.
        taken: Number of positions in all chunks taken.
        last_ordinal: Number of the last request; -1 before the first.
        last_answer: Answer to the last request; an empty chunk has told the worker that there are no more.
    """

    held: deque[Chunk] = field(default_factory=deque)
    finished: int = 0
    taken: int = 0
    last_ordinal: int = -1
    last_answer: Chunk | None = None

    def advance(self, processed: int) -> None:
        """Note that the worker has processed `processed` positions of the epoch in total."""
        while self.held and self.finished + len(self.held[0]) <= processed:
            self.finished += len(self.held.popleft())


@dataclass
class Epoch:
    """An epoch's chunks.

    Attributes:
        waiting: Chunks that are not given out.
        samples: Number of samples of the epoch.
        chunk: Number of samples of a chunk.
        shares: Each worker's part.
    """

    waiting: deque[Chunk]
    samples: int
    chunk: int
    shares: dict[int, Share] = field(default_factory=dict)


def done_chunks(text: str) -> list[int]:
    """Return the numbers of the chunks in a text of :meth:`Dispatcher.progress`; an empty text has none.

    Raises:
        ControlError: The text does not consist of hexadecimal digits.
    """
    try:
        bits = bin(int(text or "0", 16))
    except ValueError as error:
        raise ControlError(f"done={text[:20]!r} is not a number in hexadecimal digits") from error
    return [number for number, bit in enumerate(bits[:1:-1]) if bit == "1"]


MOST_CHUNKS = 1 << 21  # per epoch


class Dispatcher:
    """The chunks of the epochs of one run. It uses no sockets and no clock."""

    def __init__(self) -> None:
        self._epochs: dict[int, Epoch] = {}
        self._boundary_epoch: int | None = None  # the epoch at whose beginning the workers' last boundary was

    def begin(self, number: int, samples: int, chunk: int, done: str = "") -> int:
        """Cut an epoch into chunks, if no other worker has begun the epoch before.

        Chunks that a worker left at its death at the end of an earlier epoch come first.

        Args:
            number: Number of the epoch.
            samples: Number of samples of the epoch.
            chunk: Number of samples of a chunk.
            done: Chunks to leave out, as :meth:`progress` described them to the run that saved the checkpoint.

        Returns:
            The number of samples of the epoch; 0 for an epoch that is over.
        """
        if number in self._epochs:
            return self._epochs[number].samples
        # A worker that is started again begins to load before it knows the others' epoch.
        if chunk < 1 or samples > chunk * MOST_CHUNKS or number < max(self._epochs, default=number):
            return 0
        skipped = set(done_chunks(done))
        remaining: list[Chunk] = []
        for earlier in [other for other in self._epochs if other < number]:
            remaining += self._epochs[earlier].waiting
            self._epochs[earlier].waiting.clear()
            if earlier < number - 1:
                del self._epochs[earlier]
        starts = [start for start in range(0, samples, chunk) if start // chunk not in skipped]
        chunks = [Chunk(number, start, min(start + chunk, samples)) for start in starts]
        self._epochs[number] = Epoch(deque(remaining + chunks), samples, chunk)
        return samples

    def take(self, worker: int, number: int, processed: int, workers: Collection[int], ordinal: int) -> Chunk:
        """Return the next chunk for a worker.

        Every worker gets at least one chunk of an epoch, if there are enough chunks: a worker without any would not
        take part in the collectives of the epoch.

        Args:
            worker: Id of the worker that asks.
            number: Number of the epoch.
            processed: Positions of this epoch that the worker has processed, in the order in which it got them.
            workers: Ids of all workers that must get at least one chunk. Another worker gets a chunk only if enough
                chunks are left for these workers.
            ordinal: Number of the worker's request in this epoch. A repeated request gets the same answer.

        Returns:
            The chunk; an empty one when there are no more.
        """
        empty = Chunk(number, 0, 0)
        epoch = self._epochs.get(number)
        if epoch is None:
            return empty
        share = epoch.shares.setdefault(worker, Share())
        if share.last_answer is not None and ordinal <= share.last_ordinal:
            return share.last_answer
        share.last_ordinal, share.last_answer = ordinal, empty
        share.advance(processed)
        idle = {other for other in workers if other != worker and not self._has_samples(epoch, other)}
        needs_one = worker in workers and not share.taken
        if needs_one and not epoch.waiting:
            # The worker was admitted late. What was left for it waits in the next epoch, which another worker has
            # begun.
            epoch, needs_one = self._epochs[max(self._epochs)], False
            idle = {other for other in workers if not self._has_samples(epoch, other)}
        if not epoch.waiting or (not needs_one and len(epoch.waiting) <= len(idle)):
            return empty
        chunk = epoch.waiting.popleft()
        share.held.append(chunk)
        share.taken += len(chunk)
        share.last_answer = chunk
        return chunk

    def progress(self, number: int) -> str:
        """Return the chunks of an epoch that are known to be processed: one bit for each, in hexadecimal digits."""
        if number not in self._epochs:
            return ""
        epoch = self._epochs[number]
        remaining = {chunk for other in self._epochs.values() for chunk in other.waiting}
        remaining |= {
            chunk for other in self._epochs.values() for share in other.shares.values() for chunk in share.held
        }
        open_numbers = {chunk.start // epoch.chunk for chunk in remaining if chunk.epoch == number}
        chunk_numbers = range(-(-epoch.samples // epoch.chunk))
        bits = "".join("0" if index in open_numbers else "1" for index in reversed(chunk_numbers))
        return f"{int(bits or '0', 2):x}"

    def processed(self, worker: int, number: int, processed: int) -> None:
        """Note how many positions of an epoch a worker has processed in total."""
        epoch = self._epochs.get(number)
        if epoch is not None and worker in epoch.shares:
            epoch.shares[worker].advance(processed)

    def give_back(self, worker: int, before: int) -> None:
        """Take back a worker's chunks of the epochs before epoch `before`.

        A worker that was started again takes chunks before it knows the others' epoch, and does not process them.
        """
        for number in [number for number in self._epochs if number < before]:
            self._take_back(self._epochs[number].shares.pop(worker, Share()))

    def mark_boundary(self) -> None:
        """Note that all workers are at the beginning of the newest epoch."""
        self._boundary_epoch = max(self._epochs, default=None)

    def may_join(self, worker: int) -> bool:
        """Whether an original worker that was started again may join in the epoch that follows the last boundary.

        If the worker has begun to load that epoch, it must not have been told that no samples are left. Once a worker
        has begun the next epoch, no worker may join before the next boundary.
        """
        if self._boundary_epoch is None or self._boundary_epoch != max(self._epochs):
            return False
        epoch = self._epochs[self._boundary_epoch]
        return worker not in epoch.shares or self._has_samples(epoch, worker)

    def can_spare(self, workers: Collection[int], others: bool) -> bool:
        """Whether all given workers, and one more if `others` is true, would get samples of the newest epoch."""
        if not self._epochs:
            return False
        epoch = self._epochs[max(self._epochs)]
        return len(epoch.waiting) >= others + sum(1 for worker in workers if not self._has_samples(epoch, worker))

    def lose(self, worker: int) -> None:
        """Take back the chunks that a dead worker has not processed; they are given out first."""
        for epoch in reversed(self._epochs.values()):
            share = epoch.shares.pop(worker, None)
            if share is not None:
                self._take_back(share)

    def _take_back(self, share: Share) -> None:
        """Put unprocessed chunks first into the newest epoch: some workers may have finished the chunks' own epoch."""
        self._epochs[max(self._epochs)].waiting.extendleft(reversed(share.held))

    @staticmethod
    def _has_samples(epoch: Epoch, worker: int) -> bool:
        return worker in epoch.shares and epoch.shares[worker].taken > 0
