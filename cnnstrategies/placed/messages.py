"""Messages between ranks that say what they are for, so that ranks that have diverged notice it."""

import hashlib
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch

from cnnstrategies.codec import Buffer, from_bytes, to_buffers, to_bytes
from cnnstrategies.placed.call_site import call_site

# Number of the message between sender and receiver, digest of the subject, and length of the subject in bytes.
_HEADER = struct.Struct("<Q8sI")
_COMPLEX = "complex"  # Marks a complex number, which the codec cannot encode.


class RefusedError(RuntimeError):
    """The program needs a value that this rank cannot get. The message says which value, and what to do."""


class DivergedError(RuntimeError):
    """The ranks no longer run the same program, or a rank has ended. The message names the lines of code."""


class LinkError(RuntimeError):
    """A link to another rank is broken, or the other rank has not sent anything within the time-out.

    Attributes:
        peer: The other rank, if it is known.
    """

    peer: int | None = None


class MessageLink(Protocol):
    """A rank's connections to all other ranks. Messages between two ranks arrive in order."""

    def send(self, target: int, message: bytearray) -> None:
        """Begin to send a message, and return at once. Nobody may change the message afterwards.

        Raises:
            LinkError: The connection is broken.
        """

    def receive(self, source: int) -> bytes | bytearray:
        """Wait for the next message from a rank.

        Raises:
            LinkError: The connection is broken, or the time-out is over.
        """

    def close(self) -> None:
        """End the connections. All ranks call this."""


class Messages:
    """Numbered messages of one rank, each with a subject.

    The subject names the operation, the tensors, and the user's line of code. Since all ranks run the same program, the
    receiver expects a subject. Another subject means that the ranks have diverged.

    Attributes:
        rank: This rank.
        counts: Number of messages that this rank has sent, by the first word of the subject.
        note_wait: Function that is called after each wait for a message, with the message's subject and the times at
            which the wait began and ended; None if nothing measures the waits.
        describe: Function that returns a text that names a rank, for error messages.
    """

    def __init__(self, rank: int, world_size: int, link: MessageLink) -> None:
        self.rank = rank
        self.counts: Counter[str] = Counter()
        self.note_wait: Callable[[str, float, float], None] | None = None
        self.describe: Callable[[int], str] = "rank {}".format
        self._link = link
        self._sent, self._received = [0] * world_size, [0] * world_size

    def subject(self, why: str, details: str = "") -> str:
        """Return a message's subject, with the user's line of code."""
        return f"{why}{f' of {details}' if details else ''} at {call_site()}"

    def send(self, target: int, subject: str, value: Any) -> None:
        """Send a value that the codec can encode, or a complex number."""
        if isinstance(value, complex):
            value = (_COMPLEX, value.real, value.imag)
        text = subject.encode()
        header = _HEADER.pack(self._sent[target], digest(subject), len(text))
        self._sent[target] += 1
        self.counts[subject.split(" ", 1)[0]] += 1
        try:
            # Large tensors are copied once, and the link sends a bytearray without a copy.
            self._link.send(target, bytearray().join((header, text, *_encoded(value))))
        except LinkError as error:
            raise DivergedError(f"{self._me} sends {subject} to {self.describe(target)}: {error}") from error

    def receive(self, source: int, subject: str) -> Any:
        """Wait for a rank's next message, and return its value.

        Raises:
            DivergedError: The message has another subject, or does not arrive.
        """
        start = time.time()
        try:
            message = self._link.receive(source)
        except LinkError as error:
            raise DivergedError(
                f"{self._me} waits for {self.describe(source)}, which should send {subject}: {error}. All ranks must "
                "run this line, and none of them may have ended"
            ) from error
        if self.note_wait is not None:
            self.note_wait(subject, start, time.time())
        number, sent_digest, length = _HEADER.unpack_from(message)
        text = bytes(message[_HEADER.size : _HEADER.size + length])
        if number != self._received[source] or sent_digest != digest(subject):
            raise DivergedError(
                f"the ranks run different code: {self._me} waits for {subject} (message {self._received[source]}) "
                f"from {self.describe(source)}, which sends {text.decode(errors='replace')} (message "
                f"{number}); all ranks must read the values of other ranks in the same order"
            )
        self._received[source] += 1
        value = _decoded(memoryview(message)[_HEADER.size + length :])
        if isinstance(value, tuple) and len(value) == 3 and value[0] == _COMPLEX:
            return complex(value[1], value[2])
        return value

    def close(self) -> None:
        """Close the link. All ranks call this."""
        self._link.close()

    @property
    def _me(self) -> str:
        return self.describe(self.rank)


@lru_cache(maxsize=1024)
def digest(text: str) -> bytes:
    """Return eight bytes that differ for different texts."""
    return hashlib.sha1(text.encode(), usedforsecurity=False).digest()[:8]


# Tuples of truth values by their encoded bytes. Each step has several messages that consist of such a tuple, mostly of
# the same one.
_flags: dict[bytes, tuple[bool, ...]] = {}
_LARGEST_FLAGS = 64  # Bytes of the longest message that is looked up.


@lru_cache(maxsize=256)
def _encoded_flags(flags: tuple[bool, ...]) -> bytes:
    encoded = to_bytes(flags)
    if len(encoded) <= _LARGEST_FLAGS:
        _flags[encoded] = flags
    return encoded


def _encoded(value: Any) -> Sequence[Buffer]:
    """Return buffers whose concatenation is the encoded value."""
    if type(value) is tuple and all(item is True or item is False for item in value):
        return (_encoded_flags(value),)
    return to_buffers(value)


def _decoded(message: memoryview) -> Any:
    flags = _flags.get(bytes(message)) if len(message) <= _LARGEST_FLAGS else None
    return from_bytes(message) if flags is None else flags


def as_plain(value: Any) -> Any:
    """Return a tensor as a new contiguous CPU tensor outside autograd; other values as they are."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return value
