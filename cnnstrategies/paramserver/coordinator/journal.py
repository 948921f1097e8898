"""The journal of a coordinator. If the coordinator's process is killed, another process continues from the journal.

A coordinator is a state machine: its inputs, which are messages and timers with their times, determine its state and
the messages that it sends. The journal contains every input, written before the coordinator acts on it. A new process
that reads the journal repeats the inputs, and so reaches the same state. For the members, the death of the old process
is only a pause in which messages may be lost, and the protocol repeats lost messages. From time to time the state of
the coordinator replaces the inputs in the journal. Inputs and state are written as in :mod:`cnnstrategies.codec`: JSON
for the structure, then raw buffers. So reading a journal runs no code that the journal names. The codec itself is not
used, because it imports torch, which takes longer than everything else that a coordinator does at its start.

The journal is stored on the machine of rank 0, and is not synced to the disk. The journal need not survive a failure of
that machine, because the run ends then anyway. If a process is killed while it writes a record, the record is
incomplete and is ignored. This does no harm, because the process has not acted on the input in the record yet.
"""

import contextlib
import itertools
import json
import struct
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from types import MethodType
from typing import Any, Protocol

from cnnstrategies.paramserver.coordinator.coordinator import Coordinator
from cnnstrategies.paramserver.coordinator.status import WATCHER
from cnnstrategies.paramserver.core.node import Buffer, ControlError, Effects, Message, Peer

# Number of records after which the coordinator's state replaces them. A process needs about half a second to read that
# many records.
MOST_RECORDS = 10_000
MOST_BYTES = 1 << 26  # size of the records, in bytes, after which the coordinator's state replaces them
HEAD = struct.Struct("<II")  # header of a record: length in bytes and CRC-32 of the body, which follows the header
LENGTH = struct.Struct("<I")  # start of a body: length of its JSON in bytes
PACKAGE = "cnnstrategies.paramserver."  # Only classes of these modules are created.
SCALARS = frozenset({type(None), bool, int, float, str})
CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


class JournalStore(Protocol):
    """The file or other store that contains a journal."""

    def read(self) -> bytes:
        """Return the whole contents of the journal."""

    def append(self, record: bytes) -> None:
        """Add a record at the end of the journal."""

    def replace(self, contents: bytes) -> None:
        """Replace the contents of the journal atomically.

        If the process is killed meanwhile, the store has either the old or the new contents.
        """


class Journaled:
    """The role of a coordinator that writes its inputs to a journal.

    Args:
        coordinator: A coordinator that has not received any inputs.
        store: Store of the journal. No other process writes to it.
        follows: Whether this process continues from the journal, because the coordinator's last process was killed.
        most: Number of records after which the coordinator's state replaces them.

    Attributes:
        coordinator: The coordinator, in the state after all inputs of the journal.
    """

    def __init__(
        self, coordinator: Coordinator, store: JournalStore, follows: bool = False, most: int = MOST_RECORDS
    ) -> None:
        self.coordinator = coordinator
        self._store = store
        self._most = most
        self._records = self._bytes = 0
        contents, whole = store.read() if follows else b"", 0
        for record, frames, end in _records(contents):
            self._records, whole = self._records + 1, end
            self._read(record, frames)
        # Remove an incomplete last record, because records that are appended after it could not be read.
        store.replace(contents[:whole])

    def start(self, now: float) -> Effects:
        """Write the start time to the journal, and call :meth:`.Coordinator.start`."""
        self._write(["start", now])
        return self.coordinator.start(now)

    def on_message(self, now: float, sender: Peer, message: Message) -> Effects:
        """Write a message to the journal, and call :meth:`.Coordinator.on_message`."""
        if sender.role != WATCHER:  # A watcher's message does not change the coordinator's state, so it is not written.
            self._write(["message", now, sender, message.kind, message.request, message.fields], message.frames)
        return self.coordinator.on_message(now, sender, message)

    def on_timer(self, now: float, name: str) -> Effects:
        """Write the name and time of an expired timer to the journal, and call :meth:`.Coordinator.on_timer`."""
        self._write(["timer", now, name])
        return self.coordinator.on_timer(now, name)

    def _write(self, record: list[Any], frames: Sequence[Buffer] = ()) -> None:
        if self._records >= self._most or self._bytes > MOST_BYTES:
            table, buffers = to_table(self.coordinator)
            whole = _packed(["state", table], buffers)
            self._store.replace(whole)
            # Counting the bytes starts below 0, so the size limit allows more records after a large state. A large
            # state is then not written too often.
            self._records, self._bytes = 0, -len(whole)
        packed = _packed(record, frames)
        self._store.append(packed)
        self._records += 1
        self._bytes += len(packed)

    def _read(self, record: list[Any], frames: list[bytes]) -> None:
        match record:
            case "state", table:
                self.coordinator = from_table(table, frames)
            case "start", now:
                self.coordinator.start(now)
            case "timer", now, name:
                self.coordinator.on_timer(now, name)
            case "message", now, sender, kind, request, fields:
                with contextlib.suppress(ControlError):  # The earlier process raised the same error, and went on.
                    self.coordinator.on_message(now, Peer(*sender), Message(kind, fields, frames, request))


def _packed(record: list[Any], frames: Sequence[Buffer]) -> bytes:
    text = json.dumps([list(map(len, frames)), record], separators=(",", ":")).encode()
    body = b"".join([LENGTH.pack(len(text)), text, *frames])
    return HEAD.pack(len(body), zlib.crc32(body)) + body


def _records(contents: bytes) -> Iterator[tuple[list[Any], list[bytes], int]]:
    """Yield the complete records, their frames, and the numbers of bytes from the start to the ends of the records."""
    start = 0
    while len(contents) - start >= HEAD.size:
        length, check = HEAD.unpack_from(contents, start)
        end = start + HEAD.size + length
        body = contents[start + HEAD.size : end]
        if len(body) < length or zlib.crc32(body) != check:
            return
        (size,) = LENGTH.unpack_from(body)
        sizes, record = json.loads(body[LENGTH.size : LENGTH.size + size])
        ends = list(itertools.accumulate(sizes, initial=LENGTH.size + size))
        yield record, [body[first:last] for first, last in itertools.pairwise(ends)], end
        start = end


# Conversion of a coordinator's state to values that JSON can represent, and back.
#
# A state is a graph: several objects may refer to the same object, and an object may refer back to the object that
# contains it. So the values are a table with one entry for each object. In an entry, a scalar stands for itself, and
# any other object is a list with the number of its entry. To read a table creates only builtin containers, and
# instances of this package's own classes, without a call of their methods.


class StateError(ValueError):
    """Error for a state that cannot be converted."""


def to_table(root: object) -> tuple[list[Any], list[Buffer]]:
    """Return the table of an object and of everything to which it refers, and the contents of all bytes in it.

    Raises:
        StateError: The state contains an object of an unsupported type.
    """
    writer = _Writer()
    writer.place(root)
    return writer.table, writer.buffers


def from_table(table: Sequence[Any], buffers: Sequence[bytes]) -> Any:
    """Return the object that :func:`to_table` has converted.

    Raises:
        StateError: The table names a class outside of this package.
    """
    return _Reader(table, buffers).object_at([0])


class _Writer:
    def __init__(self) -> None:
        self.table: list[Any] = []
        self.buffers: list[Buffer] = []
        self._places: dict[int, list[int]] = {}  # by id of an object: a list with the number of its entry

    def place(self, value: Any) -> Any:
        """Return what stands for a value in an entry."""
        if type(value) in SCALARS:
            return value
        place = self._places.get(id(value))
        if place is None:
            place = self._places[id(value)] = [len(self.table)]
            self.table.append(None)
            self.table[place[0]] = self._entry(value)
        return place

    def _entry(self, value: Any) -> list[Any]:
        kind = type(value)
        if kind in (bytes, bytearray, memoryview):
            self.buffers.append(value)
            return ["bytes", len(self.buffers) - 1]
        if kind in (list, tuple, set, frozenset):
            return [kind.__name__, self._list(value)]
        if kind is dict:
            return ["dict", self._list(value), self._list(value.values())]
        if kind is deque:
            return ["deque", self._list(value), value.maxlen]
        if kind is MethodType:
            return ["method", self.place(value.__self__), value.__name__]
        name = f"{kind.__module__}:{kind.__qualname__}"
        _class_named(name)
        if isinstance(value, Enum):
            return ["enum", name, value.value]
        if isinstance(value, tuple):
            return ["named tuple", name, self._list(value)]
        return ["object", name, {attribute: self.place(part) for attribute, part in vars(value).items()}]

    def _list(self, values: Iterable[Any]) -> list[Any]:
        return [self.place(value) for value in values]


class _Reader:
    def __init__(self, table: Sequence[Any], buffers: Sequence[bytes]) -> None:
        self._table = table
        self._buffers = buffers
        self._objects: dict[int, Any] = {}

    def object_at(self, place: Any) -> Any:
        """Return the value for which something in an entry stands."""
        if not isinstance(place, list):
            return place
        (number,) = place
        if number not in self._objects:
            self._objects[number] = self._created(number, *self._table[number])
        return self._objects[number]

    def _created(self, number: int, kind: str, *rest: Any) -> Any:
        if kind == "bytes":
            return self._buffers[rest[0]]
        if kind in CONTAINERS:
            return CONTAINERS[kind](self._list(rest[0]))
        if kind == "dict":
            return dict(zip(self._list(rest[0]), self._list(rest[1]), strict=True))
        if kind == "deque":
            return deque(self._list(rest[0]), rest[1])
        if kind == "method":
            return getattr(self.object_at(rest[0]), rest[1])
        cls = _class_named(rest[0])
        if kind == "enum":
            return cls(rest[1])
        if kind == "named tuple":
            return tuple.__new__(cls, self._list(rest[1]))
        # The object's parts may refer back to the object.
        self._objects[number] = instance = object.__new__(cls)
        vars(instance).update({attribute: self.object_at(part) for attribute, part in rest[1].items()})
        return instance

    def _list(self, places: list[Any]) -> list[Any]:
        return [self.object_at(place) for place in places]


def _class_named(name: str) -> Any:
    """Return the class of this package with a module and a qualified name, such as ``module:Class``."""
    module, _, path = name.partition(":")
    cls = vars(sys.modules[module]).get(path) if module.startswith(PACKAGE) and module in sys.modules else None
    if not isinstance(cls, type):
        raise StateError(f"the coordinator's state cannot contain an object of the class {name}")
    return cls
