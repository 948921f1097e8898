"""The wire format: a fixed binary header, then a payload; nothing of it is ever unpickled or evaluated.

A message is the header (little-endian, 72 bytes) and then the payload. A frame holds one or several, one after the
other; a payload that is not small is the whole next frame. A payload may begin with a JSON object of `Header.meta`
bytes. Everything is checked before it is used: what fails raises an :class:`InvalidMessageError`, and the message is
dropped as a whole.
"""

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from cnnstrategies.paramserver.core.node import ControlError, End, Message

MAGIC = b"CNPS"
VERSION = 4
LARGEST_JSON = 1 << 18
# Up to here libzmq gets a copy, which is cheaper than its telling Python when it has done without; and such payloads
# may wait for each other.
SMALL_BYTES = 1 << 18
SERVER = 1 << 31  # added to a server's id where a sender is named
NO_STEP = (1 << 64) - 1
LARGEST_NUMBER = 1 << 63  # is no step or version any more
ALONE = 1.0  # The weight of pulled values that no change is made from, where others are.

_compact = json.JSONEncoder(separators=(",", ":")).encode
_LAYOUT = struct.Struct("<4sBBBBIIIIIIQQQQd")
HEADER_BYTES = _LAYOUT.size
_LENGTH, _SESSION = struct.Struct("<20xI"), struct.Struct("<5s27xQ")


class Kind(IntEnum):
    """What a message asks or tells."""

    HELLO = 1  # worker: I am here, at this step (or new, or leave), and these slices are answered
    WELCOME = 2  # server: begin with this step
    VALUE = 4  # worker: a slice's first value, after its optimizer state
    BEGIN = 6  # worker: hyper-parameters and weight of the step whose pushes follow
    PUSH = 7
    PULL = 8  # worker: send these slices, at least this new
    PULLED = 9
    STATUS = 12  # server to leader: what it has, after a change of view
    VOTE = 13  # server to leader: it has all of a worker's pushes of a step
    DECIDE = 14  # leader: these workers make up the step
    NORM = 15  # server to leader: squared norm of its part of the mean gradient
    RELAY = 18  # primary to backup: an update that it has applied, with its hyper-parameters or who makes up the step
    ACKNOWLEDGE = 19  # backup: it has the slice up to this version
    COPY = 21  # primary to a new backup
    PING = 22  # server to server: how often it has missed messages of the other


class Encoding(IntEnum):
    """How a payload holds numbers."""

    NOTHING = 0  # no numbers: JSON, or a state; in a push: the parameter has no gradient
    DENSE = 1  # the parameter's own dtype
    FP16 = 2
    BF16 = 3
    TOPK = 4  # uint32 indices, then as many float32 values
    ONEBIT = 5  # two float32 means, then a bit for each element
    KEYS = 6  # uint32 numbers of slices


_KINDS = {int(kind): kind for kind in Kind}  # To look one up costs a third of calling an enumeration.
_ENCODINGS = {int(encoding): encoding for encoding in Encoding}


class InvalidMessageError(ControlError):
    """A message that no member of this run sends; its text is short and holds nothing of the payload."""


class Header(NamedTuple):
    """The fixed part of a message.

    Attributes:
        sender: Id of the worker, or `SERVER` plus that of the server.
        sequence: Grows with each message of the sender: an old one is a replay. From one server to another it grows by
            one, so that a gap shows what was lost.
        incarnation: Of the worker; from a server the number of the view that it follows.
        meta: Bytes of the JSON object at the payload's start.
        base: Depends on the kind: a view's number, a version, a count, the worker whose update is relayed, which values
            are pulled, or of a step that begins how they will be.
        weight: Samples, or a norm, or a factor, or the version that a relayed update leads to; of a pulled slice what
            changes can be added to.
        rung: Where workers choose encodings: 1 + the place in the ladder that one uses in a step that begins; of a
            pulled slice that of the common step's first member. Of a pull 1 if it is one of the optimizer's state.
        question: Of a pull of the present values its number, which comes back with them; 0 of any other.
    """

    kind: Kind
    sender: int
    session: int
    sequence: int
    encoding: Encoding = Encoding.NOTHING
    incarnation: int = 0
    key: int = 0
    length: int = 0
    meta: int = 0
    step: int = 0
    base: int = 0
    weight: float = 0.0
    rung: int = 0
    question: int = 0

    def pack(self) -> bytes:
        """The header as bytes."""
        return _LAYOUT.pack(
            MAGIC, VERSION, self.kind, self.encoding, self.rung, self.sender, self.incarnation, self.key, self.length,
            self.meta, self.question, self.session, self.step, self.base, self.sequence, self.weight,
        )  # fmt: skip


@dataclass(frozen=True)
class Bounds:
    """What a receiver accepts at most: bytes of a payload, and slices; known before the first message."""

    payload: int
    slices: int


def length_in(data: bytes | memoryview) -> int:
    """Bytes of the payload that the header at the start of a frame announces."""
    return int(_LENGTH.unpack_from(data)[0])


def begins(data: bytes | memoryview, session: int) -> bool:
    """Whether a frame begins with a message of a run."""
    return len(data) >= HEADER_BYTES and _SESSION.unpack_from(data) == (MAGIC + bytes([VERSION]), session)


def unpack(data: bytes | memoryview, length: int, session: int, bounds: Bounds) -> Header:
    """The header of a received message, checked against everything that does not depend on the receiver's state.

    Raises:
        InvalidMessageError: It is no message of this run.
    """
    if len(data) != HEADER_BYTES:
        raise InvalidMessageError("a header of another size")
    magic, version, kind, encoding, rung, *numbers, weight = _LAYOUT.unpack(data)
    sender, incarnation, key, size, meta, question, run, step, base, sequence = numbers
    if magic != MAGIC:
        raise InvalidMessageError("not a message of cnnstrategies")
    if version != VERSION:
        raise InvalidMessageError("another version of the format")
    if run != session:
        raise InvalidMessageError("of another run")
    known, coded = _KINDS.get(kind), _ENCODINGS.get(encoding)
    if known is None or coded is None:
        raise InvalidMessageError("unknown kind or encoding")
    if size != length or length > bounds.payload or meta > min(length, LARGEST_JSON):
        raise InvalidMessageError("a length that is wrong or too large")
    if key >= bounds.slices or not math.isfinite(weight) or weight < 0:
        raise InvalidMessageError("a key or weight out of range")
    if step >= LARGEST_NUMBER and step != NO_STEP:  # The next one must fit, too.
        raise InvalidMessageError("a step out of range")
    return Header(known, sender, run, sequence, coded, incarnation, key, size, meta, step, base, weight, rung, question)


def pack_json(values: dict[str, Any]) -> bytes:
    """A small dictionary as payload."""
    return _compact(values).encode()


def unpack_json(payload: memoryview, header: Header) -> dict[str, Any]:
    """The JSON object at the start of a payload."""
    try:
        values = json.loads(str(payload[: header.meta], "utf-8"))
    except (ValueError, RecursionError):
        raise InvalidMessageError("not JSON") from None
    if not isinstance(values, dict):
        raise InvalidMessageError("not a JSON object")
    return values


def compose(
    sender: int,
    session: int,
    kind: Kind,
    sequence: int,
    payload: Any = b"",
    json: dict[str, Any] | None = None,
    **fields: Any,
) -> tuple[Header, Any]:
    """A message's header and payload, which begins with a JSON object if there is one."""
    text = b"" if json is None else pack_json(json)
    if text:
        payload = b"".join((text, payload))
    header = Header(kind, sender, session, sequence, length=len(payload), meta=len(text), **fields)
    return header, payload


def fields_of(payload: memoryview, header: Header) -> Message:
    """The JSON object at the start of a payload, to be read field by field."""
    return Message(header.kind.name, unpack_json(payload, header))


def pack_keys(keys: Sequence[int]) -> bytes:
    """Numbers of slices as payload."""
    return np.array(keys, "<u4").tobytes()


def unpack_keys(payload: memoryview) -> list[int]:
    """The inverse of :func:`pack_keys`."""
    if len(payload) % 4:
        raise InvalidMessageError("keys of another size")
    keys: list[int] = np.frombuffer(payload, "<u4").tolist()
    return keys


class Parcel(NamedTuple):
    """Send a message, if the peer can be reached.

    Attributes:
        to: A server's id; or the route over which a worker was last heard.
        payload: Its memory is read later, when it leaves.
        wait: It may wait for the next ones to the same peer.
    """

    to: int | bytes
    header: Header
    payload: Any
    wait: bool


class Say(NamedTuple):
    """Tell whoever looks after the run; what is urgent nobody may miss."""

    text: str
    urgent: bool


Effects = list[Parcel | Say | End]
