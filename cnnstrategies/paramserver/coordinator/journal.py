"""The journal of a coordinator that may be killed: with it another process goes on where that one has stopped.

A coordinator is a state machine: what it has been told, and when, decides all that it has said. Each thing that it is
told is written down before it acts on it; whoever reads that again is in the same state, and has said the same. To the
members such a death is a pause in which messages are lost, and on these nobody relies. Now and then the state machine
itself takes the place of all that it was told.

Nothing is synced to a disk: what is written outlives the process that has written it, and no run outlives the machine
of rank 0, on which it lies. A process that is killed while it writes leaves half a record, of which nobody was told.
"""

import contextlib
import pickle
import struct
import zlib
from collections.abc import Iterator
from typing import Any, Protocol

from cnnstrategies.paramserver.coordinator.coordinator import Coordinator
from cnnstrategies.paramserver.coordinator.status import WATCHER
from cnnstrategies.paramserver.core.node import ControlError, Effects, Message, Peer

MOST_RECORDS = 10_000  # before they are replaced: to read them takes half a second
MOST_BYTES = 1 << 26
HEAD = struct.Struct("<II")  # bytes that follow, and their CRC-32


class JournalStore(Protocol):
    """Where a journal lies."""

    def read(self) -> bytes:
        """All of it."""

    def append(self, record: bytes) -> None:
        """Write at its end."""

    def replace(self, contents: bytes) -> None:
        """Write all of it anew; who is killed meanwhile leaves the old one, or the new one."""


class Journaled:
    """A coordinator that writes down what it is told: a role.

    Args:
        coordinator: One that has been told nothing; the attribute is what the journal has made of it.
        store: Where the journal lies, in which nobody else writes.
        follows: Whether the one before was killed, and this one goes on with its journal.
    """

    def __init__(
        self, coordinator: Coordinator, store: JournalStore, follows: bool = False, most: int = MOST_RECORDS
    ) -> None:
        self.coordinator = coordinator
        self._store = store
        self._most = most
        self._records = self._bytes = 0
        contents, whole = store.read() if follows else b"", 0
        for record, end in _records(contents):
            self._records, whole = self._records + 1, end
            self._read(record)
        store.replace(contents[:whole])  # What comes next must not follow half a record.

    def start(self, now: float) -> Effects:
        """Begin, or go on; see :class:`.Coordinator` for what the methods do."""
        self._write((now,))
        return self.coordinator.start(now)

    def on_message(self, now: float, sender: Peer, message: Message) -> Effects:
        """Act on a message."""
        if sender.role != WATCHER:  # Who only looks changes nothing.
            self._write((now, tuple(sender), tuple(message)))  # These take a tenth of the time that their classes take.
        return self.coordinator.on_message(now, sender, message)

    def on_timer(self, now: float, name: str) -> Effects:
        """Act on a timer whose time has come."""
        self._write((now, name))
        return self.coordinator.on_timer(now, name)

    def _write(self, record: tuple[object, ...]) -> None:
        if self._records >= self._most or self._bytes > MOST_BYTES:
            whole = _packed(self.coordinator)
            self._store.replace(whole)
            self._records, self._bytes = 0, -len(whole)  # What is large is not written anew for little.
        packed = _packed(record)
        self._store.append(packed)
        self._records += 1
        self._bytes += len(packed)

    def _read(self, record: Any) -> None:
        match record:
            case Coordinator():
                self.coordinator = record
            case (now,):
                self.coordinator.start(now)
            case (now, str(name)):
                self.coordinator.on_timer(now, name)
            case (now, sender, message):
                with contextlib.suppress(ControlError):  # As it was then.
                    self.coordinator.on_message(now, Peer(*sender), Message(*message))


def _packed(record: object) -> bytes:
    body = pickle.dumps(record)
    return HEAD.pack(len(body), zlib.crc32(body)) + body


def _records(contents: bytes) -> Iterator[tuple[Any, int]]:
    """The records up to the first that is not whole, each with the place of its end.

    Unpickling runs what it reads: the store is the user's own, as are the programs of the run.
    """
    start = 0
    while len(contents) - start >= HEAD.size:
        length, check = HEAD.unpack_from(contents, start)
        end = start + HEAD.size + length
        body = contents[start + HEAD.size : end]
        if len(body) < length or zlib.crc32(body) != check:
            return
        yield pickle.loads(body), end
        start = end
