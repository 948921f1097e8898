"""Chunks of an epoch, and who has which."""

from collections import deque
from collections.abc import Iterable
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
