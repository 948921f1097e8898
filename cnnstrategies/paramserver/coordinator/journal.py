"""The journal of a coordinator that may be killed: another process continues from it where the coordinator stopped.

A coordinator is a state machine: the messages and timers that it receives, with their times, determine everything that
it sends. Each of these inputs is written down before the coordinator acts on it; a process that reads the inputs again
reaches the same state and has sent the same messages. To the members such a death is a pause in which messages are
lost, and no member relies on single messages. From time to time the pickled state machine replaces all inputs before
it.

Nothing is synced to a disk: a written record outlives the process that has written it, and no run outlives the machine
of rank 0, on which the journal lies. A process that is killed while it writes leaves half a record, and no member has
received a message that depends on that record.
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

MOST_RECORDS = 10_000  # before the state replaces them: reading so many records takes half a second
MOST_BYTES = 1 << 26
HEAD = struct.Struct("<II")  # bytes that follow, and their CRC-32


class JournalStore(Protocol):
    """The place of a journal."""

    def read(self) -> bytes:
        """Return the whole contents."""

    def append(self, record: bytes) -> None:
        """Write a record at the end."""

    def replace(self, contents: bytes) -> None:
        """Replace the contents. A process that is killed meanwhile leaves either the old contents or the new ones."""


class Journaled:
    """A coordinator that writes down its inputs: a role.

    Args:
        coordinator: A coordinator without any inputs; the attribute is the coordinator after the journal's inputs.
        store: The place of the journal, which no other process writes.
        follows: Whether the coordinator's last process was killed, and this one continues from the journal.
        most: Number of records after which the coordinator's state replaces them.
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
        store.replace(contents[:whole])  # The next record must not follow half a record.

    def start(self, now: float) -> Effects:
        """Begin, or continue; see :class:`.Coordinator` for what the methods do."""
        self._write((now,))
        return self.coordinator.start(now)

    def on_message(self, now: float, sender: Peer, message: Message) -> Effects:
        """Act on a message."""
        if sender.role != WATCHER:  # A watcher changes nothing.
            # Pickling tuples takes a tenth of the time of pickling the classes.
            self._write((now, tuple(sender), tuple(message)))
        return self.coordinator.on_message(now, sender, message)

    def on_timer(self, now: float, name: str) -> Effects:
        """Act on a timer whose time has come."""
        self._write((now, name))
        return self.coordinator.on_timer(now, name)

    def _write(self, record: tuple[object, ...]) -> None:
        if self._records >= self._most or self._bytes > MOST_BYTES:
            whole = _packed(self.coordinator)
            self._store.replace(whole)
            # A large state is not written again before as many bytes of records have followed.
            self._records, self._bytes = 0, -len(whole)
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
                with contextlib.suppress(ControlError):  # The coordinator raised the same error then.
                    self.coordinator.on_message(now, Peer(*sender), Message(*message))


def _packed(record: object) -> bytes:
    body = pickle.dumps(record)
    return HEAD.pack(len(body), zlib.crc32(body)) + body


def _records(contents: bytes) -> Iterator[tuple[Any, int]]:
    """Yield each record up to the first incomplete one, with the position of its end.

    Unpickling runs code from the contents. The store belongs to the user, as do the programs of the run.
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
