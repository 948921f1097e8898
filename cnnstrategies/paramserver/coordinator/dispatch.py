"""Dynamic assignment of samples: workers request chunks of an epoch, so that faster workers process more chunks.

A worker may request a chunk before it has processed its earlier chunks. So each request also reports the number of
samples that the worker has processed. If a worker dies, its unprocessed chunks are assigned to other workers. Every
sample is processed exactly once in an epoch without deaths. After a death some samples may be processed twice, but none
is left out.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from cnnstrategies.paramserver.core.node import ControlError


@dataclass(frozen=True)
class Chunk:
    """A range of an epoch's samples. An empty chunk means that no samples are left.

    Attributes:
        epoch: Number of the epoch.
        start: Index of the chunk's first sample in the epoch's order of samples.
        stop: Index of the chunk's last sample plus 1.
    """

    epoch: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass
class Share:
    """The chunks of an epoch that were assigned to one worker.

    Attributes:
        held: Assigned chunks that are not processed yet, in the order of their assignment.
        finished: Number of samples in the chunks that the worker has processed.
        taken: Number of samples in all chunks that were assigned to the worker.
        last_ordinal: Number of the worker's last request for a chunk of this epoch; -1 before the first request.
        last_answer: The chunk in the reply to the worker's last request. The chunk is empty if no samples were left.
    """

    held: deque[Chunk] = field(default_factory=deque)
    finished: int = 0
    taken: int = 0
    last_ordinal: int = -1
    last_answer: Chunk | None = None

    def advance(self, processed: int) -> None:
        """Record how many samples of this epoch the worker has processed, and drop the chunks that are finished.

        Args:
            processed: Total number of samples that the worker has processed in this epoch.
        """
        while self.held and self.finished + len(self.held[0]) <= processed:
            self.finished += len(self.held.popleft())


@dataclass
class Epoch:
    """The chunks of one epoch, and the workers to which they were assigned.

    Attributes:
        waiting: Chunks that are not assigned to a worker. Some may belong to an earlier epoch, if a worker has died or
            left without processing them.
        samples: Number of samples in the epoch.
        chunk: Number of samples in a chunk; the epoch's last chunk may be smaller.
        shares: By worker: the chunks that were assigned to the worker.
    """

    waiting: deque[Chunk]
    samples: int
    chunk: int
    shares: dict[int, Share] = field(default_factory=dict)


def done_chunks(text: str) -> list[int]:
    """Return the numbers of the processed chunks in a text that :meth:`Dispatcher.progress` returned.

    Raises:
        ControlError: The text does not consist of hexadecimal digits.
    """
    try:
        bits = bin(int(text or "0", 16))
    except ValueError as error:
        raise ControlError(f"done={text[:20]!r} is not a number in hexadecimal digits") from error
    return [number for number, bit in enumerate(bits[:1:-1]) if bit == "1"]


MOST_CHUNKS = 1 << 21  # largest number of chunks in an epoch


class Dispatcher:
    """The assignment of chunks to workers in all epochs of a run. The class does not use sockets or clocks."""

    def __init__(self) -> None:
        self._epochs: dict[int, Epoch] = {}
        # Number of the epoch that began at the last boundary; None before the first boundary.
        self._boundary_epoch: int | None = None

    def begin(self, number: int, samples: int, chunk: int, done: str = "") -> int:
        """Begin an epoch: cut it into chunks. If another worker has already begun the epoch, nothing changes.

        Unprocessed chunks of earlier epochs, which a dead worker has left over, are assigned first.

        Args:
            number: Number of the epoch.
            samples: Number of samples in the epoch.
            chunk: Number of samples in a chunk.
            done: Chunks that were processed before the checkpoint from which the run continues, as the text that
                :meth:`progress` returned then; an empty text for no chunks. These chunks are left out.

        Returns:
            The number of samples in the epoch; 0 if the epoch is over or its size is invalid.
        """
        if number in self._epochs:
            return self._epochs[number].samples
        # A worker that was started again may begin an epoch that is over, because it does not know the epoch of the
        # other workers yet. The call then has no effect.
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
        """Assign the next chunk to a worker.

        The last chunks of an epoch are reserved for workers that have not received a chunk yet, because a worker
        without chunks could not take part in the collectives of the epoch.

        Args:
            worker: Id of the worker that requests a chunk.
            number: Number of the epoch.
            processed: Number of samples that the worker has processed in this epoch. The worker processes its chunks in
                the order of their assignment.
            workers: Ids of the original workers. A chunk is reserved for each original worker that has no chunk yet.
            ordinal: Number of the worker's request in this epoch. A repeated request gets the same reply.

        Returns:
            The assigned chunk; an empty chunk if no chunk is left for the worker.
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
            # The worker was admitted late, and another worker has begun the next epoch. The chunk that was reserved for
            # this worker was moved to that epoch.
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
        """Return the processed chunks of an epoch as a hexadecimal number: bit i is set if chunk i is processed.

        The text is empty if the epoch is unknown.
        """
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
        """Record how many samples of an epoch a worker has processed.

        Args:
            worker: Id of the worker.
            number: Number of the epoch.
            processed: Total number of samples that the worker has processed in this epoch.
        """
        epoch = self._epochs.get(number)
        if epoch is not None and worker in epoch.shares:
            epoch.shares[worker].advance(processed)

    def give_back(self, worker: int, before: int) -> None:
        """Take back a worker's unprocessed chunks of all epochs before epoch `before`.

        A worker that was started again may request chunks of an earlier epoch before it knows the epoch of the other
        workers. The worker does not process these chunks.
        """
        for number in [number for number in self._epochs if number < before]:
            self._take_back(self._epochs[number].shares.pop(worker, Share()))

    def mark_boundary(self) -> None:
        """Record that a boundary is complete, and that all workers of the group now begin the newest epoch.

        A boundary is a collective between two steps. At a boundary, waiting workers are admitted.
        """
        self._boundary_epoch = max(self._epochs, default=None)

    def may_join(self, worker: int) -> bool:
        """Return whether an original worker that was started again may be admitted at once.

        Return False in two cases: another worker has already begun the next epoch, or the worker has already received
        the reply that no samples of the current epoch are left. The worker must then wait for the next boundary, the
        collective between two steps that admits waiting workers.
        """
        if self._boundary_epoch is None or self._boundary_epoch != max(self._epochs):
            return False
        epoch = self._epochs[self._boundary_epoch]
        return worker not in epoch.shares or self._has_samples(epoch, worker)

    def can_spare(self, workers: Collection[int], others: bool) -> bool:
        """Return whether each worker that has no chunk of the newest epoch yet can still get a chunk.

        Args:
            workers: Ids of the workers that must each get at least one chunk.
            others: Whether one more chunk must be left, for a joiner.
        """
        if not self._epochs:
            return False
        epoch = self._epochs[max(self._epochs)]
        return len(epoch.waiting) >= others + sum(1 for worker in workers if not self._has_samples(epoch, worker))

    def lose(self, worker: int) -> None:
        """Take back the unprocessed chunks of a worker that has died or left.

        These chunks are assigned to other workers before all remaining chunks.
        """
        for epoch in reversed(self._epochs.values()):
            share = epoch.shares.pop(worker, None)
            if share is not None:
                self._take_back(share)

    def _take_back(self, share: Share) -> None:
        """Put a worker's unprocessed chunks at the front of the newest epoch's waiting chunks.

        Chunks of an earlier epoch are also moved to the newest epoch, because workers that have finished the earlier
        epoch request only chunks of the newest epoch.
        """
        self._epochs[max(self._epochs)].waiting.extendleft(reversed(share.held))

    @staticmethod
    def _has_samples(epoch: Epoch, worker: int) -> bool:
        return worker in epoch.shares and epoch.shares[worker].taken > 0
