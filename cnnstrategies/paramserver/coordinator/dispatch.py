"""Chunks of an epoch's samples, given to whoever asks: faster workers take more.

A worker may take chunks ahead of what it has processed, so it says how far it is. What a worker that dies had taken
and not processed is given out again: every sample is processed exactly once, or at least once after a death.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from cnnstrategies.paramserver.core.node import ControlError


@dataclass(frozen=True)
class Chunk:
    """Positions ``start`` to ``stop`` (exclusive) in the order of ``epoch``; empty when the epoch has no more."""

    epoch: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass
class Share:
    """What one worker has of an epoch: chunks in the order taken, and positions processed of those."""

    held: deque[Chunk] = field(default_factory=deque)
    finished: int = 0
    taken: int = 0
    asked: int = -1
    last: Chunk | None = None  # the newest answer; an empty one has told it that there are no more

    def advance(self, processed: int) -> None:
        """So many positions are processed."""
        while self.held and self.finished + len(self.held[0]) <= processed:
            self.finished += len(self.held.popleft())


@dataclass
class Epoch:
    """What is not given out, and what each worker has; `chunk` is the samples of a chunk."""

    waiting: deque[Chunk]
    samples: int
    chunk: int
    shares: dict[int, Share] = field(default_factory=dict)


def places(text: str) -> list[int]:
    """The chunks that :meth:`Dispatcher.progress` has made a text of; none of an empty one."""
    try:
        bits = bin(int(text or "0", 16))
    except ValueError as error:
        raise ControlError(f"what is done is told in hexadecimal digits, not as {text[:20]!r}") from error
    return [number for number, bit in enumerate(bits[:1:-1]) if bit == "1"]


MOST_CHUNKS = 1 << 21  # of an epoch


class Dispatcher:
    """The chunks of the epochs of one run. No sockets, no clock."""

    def __init__(self) -> None:
        self._epochs: dict[int, Epoch] = {}
        self._met: int | None = None  # the epoch at whose beginning the workers have met last

    def begin(self, number: int, samples: int, chunk: int, done: str = "") -> int:
        """Cut an epoch into chunks; the first worker that gets there does it, the others find it done.

        What a worker left behind that died at the end of an earlier epoch comes first; what is `done`, as
        :meth:`progress` has told the run that has saved the checkpoint, does not come.

        Returns:
            How many samples it has; 0 for one that is forgotten.
        """
        if number in self._epochs:
            return self._epochs[number].samples
        # One that is started again begins to load before it has heard where the others are.
        if chunk < 1 or samples > chunk * MOST_CHUNKS or number < max(self._epochs, default=number):
            return 0
        before = set(places(done))
        left: list[Chunk] = []
        for old in [other for other in self._epochs if other < number]:
            left += self._epochs[old].waiting
            self._epochs[old].waiting.clear()
            if old < number - 1:
                del self._epochs[old]
        starts = [start for start in range(0, samples, chunk) if start // chunk not in before]
        cut = [Chunk(number, start, min(start + chunk, samples)) for start in starts]
        self._epochs[number] = Epoch(deque(left + cut), samples, chunk)
        return samples

    def take(self, worker: int, number: int, processed: int, workers: Collection[int], ordinal: int) -> Chunk:
        """The next chunk for a worker.

        Every worker gets at least one chunk of an epoch, if there are as many: one that got none would take no part
        in what the others do in an epoch.

        Args:
            worker: Who asks.
            number: The epoch.
            processed: Positions that it has processed in this epoch, in the order in which it got them.
            workers: All that must have some of it. Another that asks gets what these can spare.
            ordinal: How often it has asked in this epoch; it gets the same if it asks the same again.

        Returns:
            An empty chunk when there are no more.
        """
        none = Chunk(number, 0, 0)
        epoch = self._epochs.get(number)
        if epoch is None:
            return none
        share = epoch.shares.setdefault(worker, Share())
        if share.last is not None and ordinal <= share.asked:
            return share.last
        share.asked, share.last = ordinal, none
        share.advance(processed)
        idle = {other for other in workers if other != worker and not self._has_some(epoch, other)}
        needs_one = worker in workers and not share.taken
        if needs_one and not epoch.waiting:
            # It was let in late, and what was left for it waits in the next epoch, which has begun for another.
            epoch, needs_one = self._epochs[max(self._epochs)], False
            idle = {other for other in workers if not self._has_some(epoch, other)}
        if not epoch.waiting or (not needs_one and len(epoch.waiting) <= len(idle)):
            return none
        chunk = epoch.waiting.popleft()
        share.held.append(chunk)
        share.taken += len(chunk)
        share.last = chunk
        return chunk

    def progress(self, number: int) -> str:
        """The chunks of an epoch that were worked on, as far as is known: a bit for each, in hexadecimal digits."""
        if number not in self._epochs:
            return ""
        epoch = self._epochs[number]
        left = {one for other in self._epochs.values() for one in other.waiting}
        left |= {one for other in self._epochs.values() for share in other.shares.values() for one in share.held}
        open_places = {one.start // epoch.chunk for one in left if one.epoch == number}
        chunks = range(-(-epoch.samples // epoch.chunk))
        bits = "".join("0" if place in open_places else "1" for place in reversed(chunks))
        return f"{int(bits or '0', 2):x}"

    def processed(self, worker: int, number: int, processed: int) -> None:
        """A worker that leaves says how far it has come in an epoch: the rest of what it holds is another's."""
        epoch = self._epochs.get(number)
        if epoch is not None and worker in epoch.shares:
            epoch.shares[worker].advance(processed)

    def give_back(self, worker: int, before: int) -> None:
        """A worker that was started again has taken chunks before it knew in which epoch the others are.

        It works on none of them.
        """
        for number in [one for one in self._epochs if one < before]:
            self._take_back(self._epochs[number].shares.pop(worker, Share()))

    def meet(self) -> None:
        """All workers are at the beginning of the newest epoch: it has begun for each of them."""
        self._met = max(self._epochs, default=None)

    def may_come(self, worker: int) -> bool:
        """Whether a worker of the run that was started again may begin with the epoch at whose beginning all have met.

        Who has begun to load that very epoch must not have been told that nothing is left of it. Once the next has
        begun for anybody, nobody comes before all have met there.
        """
        if self._met is None or self._met != max(self._epochs):
            return False
        epoch = self._epochs[self._met]
        return worker not in epoch.shares or self._has_some(epoch, worker)

    def can_spare(self, workers: Collection[int], others: bool) -> bool:
        """Whether all the run's own workers, and others if any come, would get something of the newest epoch."""
        if not self._epochs:
            return False
        epoch = self._epochs[max(self._epochs)]
        return len(epoch.waiting) >= others + sum(1 for one in workers if not self._has_some(epoch, one))

    def lose(self, worker: int) -> None:
        """A worker has died: what it had not processed is given out again, first."""
        for epoch in reversed(self._epochs.values()):
            share = epoch.shares.pop(worker, None)
            if share is not None:
                self._take_back(share)

    def _take_back(self, share: Share) -> None:
        """Give out next what is not processed, in the newest epoch: the others may have come to an older one's end."""
        self._epochs[max(self._epochs)].waiting.extendleft(reversed(share.held))

    @staticmethod
    def _has_some(epoch: Epoch, worker: int) -> bool:
        return worker in epoch.shares and epoch.shares[worker].taken > 0
