"""Chunks of an epoch's samples, given to whoever asks: faster workers take more.

A worker may take chunks ahead of what it has processed, so it says how far it is. What a worker that dies had taken
and not processed is given out again: every sample is processed exactly once, or at least once after a death.

At the end of an epoch all wait for who took the last chunk. A worker that would need longer for one more than the
others need for all that are left gets none: list scheduling by earliest finish, with measured speeds (Ibarra and Kim,
"Heuristic Algorithms for Scheduling Independent Tasks on Nonidentical Processors", JACM 1977).
"""

from collections import deque
from collections.abc import Collection, Iterable
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
    """What one worker has of an epoch: chunks in the order taken, and positions processed of those.

    Attributes:
        last: The newest answer; an empty one has told it that there are no more.
    """

    held: deque[Chunk] = field(default_factory=deque)
    finished: int = 0
    taken: int = 0
    asked: int = -1
    last: Chunk | None = None

    @property
    def ahead(self) -> int:
        """Positions taken and not known to be processed."""
        return self.taken - self.finished

    def advance(self, processed: int) -> None:
        """So many positions are processed."""
        while self.held and self.finished + len(self.held[0]) <= processed:
            self.finished += len(self.held.popleft())


@dataclass
class Epoch:
    """What is not given out, and what each worker has.

    Attributes:
        waiting: Chunks, in the order in which they come.
        samples: How many the epoch has.
        chunk: Samples of a chunk.
        shares: Of each worker.
    """

    waiting: deque[Chunk]
    samples: int
    chunk: int
    shares: dict[int, Share] = field(default_factory=dict)


def digits(marked: Iterable[int]) -> str:
    """Numbers as bits, in hexadecimal digits."""
    bits = bytearray()
    for number in marked:
        bits.extend(bytes(max(0, number // 8 + 1 - len(bits))))
        bits[number // 8] |= 1 << number % 8
    return f"{int.from_bytes(bits, 'little'):x}"


def places(text: str) -> list[int]:
    """The numbers that :func:`digits` has made a text of; none of an empty one."""
    try:
        bits = bin(int(text or "0", 16))
    except ValueError as error:
        raise ControlError(f"what is done is told in hexadecimal digits, not as {text[:20]!r}") from error
    return [number for number, bit in enumerate(bits[:1:-1]) if bit == "1"]


WEIGHT = 0.75  # of what was measured before, against one interval
LATE = 3.0  # times as long as usual


@dataclass
class _Measured:
    epoch: int
    processed: int
    since: float
    positions: float = 0.0
    seconds: float = 0.0


class Speeds:
    """Positions per second of each worker, as a moving average over its last few intervals.

    What lies between two epochs is not counted: validation, checkpoints, and waiting for others.
    """

    def __init__(self) -> None:
        self._measured: dict[int, _Measured] = {}

    def heard(self, worker: int, epoch: int, processed: int, now: float) -> None:
        """A worker says how many positions of an epoch it has processed."""
        one = self._measured.setdefault(worker, _Measured(epoch, processed, now))
        if one.epoch != epoch or processed < one.processed:
            one.epoch, one.processed, one.since = epoch, processed, now
        elif processed > one.processed and now > one.since:
            one.positions = WEIGHT * one.positions + processed - one.processed
            one.seconds = WEIGHT * one.seconds + now - one.since
            one.processed, one.since = processed, now

    def of(self, worker: int) -> float | None:
        """Positions per second; None of one that has processed nothing yet."""
        one = self._measured.get(worker)
        return one.positions / one.seconds if one is not None and one.seconds else None

    def is_late(self, worker: int, size: int, now: float) -> bool:
        """Whether a worker should long have said that it has processed so many more: it may be stopped, or dead."""
        one, speed = self._measured.get(worker), self.of(worker)
        return one is None or speed is None or now - one.since > LATE * size / speed

    def forget(self, worker: int) -> None:
        """A worker is gone; one that comes in its place is another."""
        self._measured.pop(worker, None)


MOST_CHUNKS = 1 << 21  # of an epoch
LAST = 16  # chunks for each worker: only so near the end of an epoch is it worth to look who is fastest


class Dispatcher:
    """The chunks of the epochs of one run. No sockets, no clock."""

    def __init__(self) -> None:
        self._epochs: dict[int, Epoch] = {}
        self._speeds = Speeds()
        self._met: int | None = None  # the epoch at whose beginning the workers have met last

    def begin(self, number: int, samples: int, chunk: int, done: str = "") -> None:
        """Cut an epoch into chunks; the first worker that gets there does it, the others find it done.

        What a worker left behind that died at the end of an earlier epoch comes first.

        Args:
            number: Of the epoch; it counts up.
            samples: How many there are.
            chunk: Samples of a chunk.
            done: What the run that has saved the checkpoint had worked on, as :meth:`progress` tells it.
        """
        if number in self._epochs or chunk < 1 or samples > chunk * MOST_CHUNKS:
            return
        if number < max(self._epochs, default=number):
            return  # One that is started again begins to load before it has heard where the others are.
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

    def take(
        self, worker: int, number: int, processed: int, workers: Collection[int], ordinal: int, now: float
    ) -> Chunk:
        """The next chunk for a worker.

        Every worker gets at least one chunk of an epoch, if there are as many: one that got none would take no part
        in what the others do in an epoch.

        Args:
            worker: Who asks.
            number: The epoch.
            processed: Positions that it has processed in this epoch, in the order in which it got them.
            workers: All that must have some of it. Another that asks gets what these can spare.
            ordinal: How often it has asked in this epoch; it gets the same if it asks the same again.
            now: Seconds.

        Returns:
            The chunk; an empty one when there are no more, or the others will have done them sooner.
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
        self._speeds.heard(worker, number, processed, now)
        idle = {other for other in workers if other != worker and not self._has_some(epoch, other)}
        needs_one = worker in workers and not share.taken
        if needs_one and not epoch.waiting:
            # It was let in late, and what was left for it waits in the next epoch, which has begun for another.
            epoch, needs_one = self._epochs[max(self._epochs)], False
            idle = {other for other in workers if not self._has_some(epoch, other)}
        if not epoch.waiting or (not needs_one and len(epoch.waiting) <= len(idle)):
            return none
        if share.taken and self._others_end_sooner(epoch, worker, workers, now):
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
        return digits(place for place in range(-(-epoch.samples // epoch.chunk)) if place not in open_places)

    def samples(self, number: int) -> int:
        """How many an epoch has; 0 of one that is forgotten."""
        return self._epochs[number].samples if number in self._epochs else 0

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
        """Whether those that come now would get something of the newest epoch.

        Args:
            workers: The run's own, with those that come now.
            others: Whether one comes that is none of these.
        """
        if not self._epochs:
            return False
        epoch = self._epochs[max(self._epochs)]
        return len(epoch.waiting) >= others + sum(1 for one in workers if not self._has_some(epoch, one))

    def _others_end_sooner(self, epoch: Epoch, worker: int, workers: Collection[int], now: float) -> bool:
        """Whether the others, who still take chunks, have done all that wait before a worker has done one more.

        Nothing is left to who has joined: it may leave whenever it likes.
        """
        speed = self._speeds.of(worker)
        left = len(epoch.waiting)
        if speed is None or left > LAST * len(epoch.shares):
            return False
        size = len(epoch.waiting[0])
        until = (epoch.shares[worker].ahead + size) / speed
        for other, share in epoch.shares.items():
            theirs = self._speeds.of(other)
            takes = other != worker and other in workers and share.last
            if takes and theirs is not None and not self._speeds.is_late(other, size, now):
                left -= max(0, int((until * theirs - share.ahead) // size))
                if left <= 0:
                    return True
        return False

    def lose(self, worker: int) -> None:
        """A worker has died: what it had not processed is given out again, first."""
        self._speeds.forget(worker)
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
