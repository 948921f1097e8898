"""The wire format between workers and servers: a fixed binary header, then a payload.

A message is the header (little-endian, 72 bytes) followed by the payload. The payload may begin with a JSON object of
`Header.meta` bytes. One frame holds one or several messages in sequence; a payload larger than `SMALL_BYTES` travels
alone, in the frame after its header.

Nothing in a message is unpickled or evaluated. Every field is checked before it is used. A message that fails a check
raises an :class:`InvalidMessageError`, and the receiver drops the whole message.
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
LARGEST_JSON = 1 << 18  # bytes
# Payloads up to this size are copied into libzmq: for small payloads a copy costs less than libzmq's release callback
# into Python. They may also wait for each other and then leave together.
SMALL_BYTES = 1 << 18
SERVER = 1 << 31  # The sender field of a server is its id plus this number.
NO_STEP = (1 << 64) - 1
LARGEST_NUMBER = 1 << 63  # Steps and versions are below this number.
ALONE = 1.0  # Mark of pulled values on which no change builds, in a run that sends changes; see `Header`.

_compact_json = json.JSONEncoder(separators=(",", ":")).encode
_LAYOUT = struct.Struct("<4sBBBBIIIIIIQQQQd")
HEADER_BYTES = _LAYOUT.size
_LENGTH_FIELD, _RUN_FIELDS = struct.Struct("<20xI"), struct.Struct("<5s27xQ")


class Kind(IntEnum):
    """The kind of a message: what it requests or reports."""

    HELLO = 1  # worker to server: the worker's step, whether it joins or leaves, and the slices already answered
    WELCOME = 2  # server to worker: the answer to HELLO with the step to begin with, or a request to send again
    VALUE = 4  # worker to server: the optimizer's state of a slice, then the slice's first value
    BEGIN = 6  # worker to server: hyper-parameters and weight of the step whose pushes follow
    PUSH = 7  # worker to server: the gradient of a slice
    PULL = 8  # worker to server: a request for slices that are at least as new as a step
    PULLED = 9  # server to worker: the requested values, change or optimizer's state of a slice
    STATUS = 12  # server to leader: its decision and complete pushes, after a change of the view or lost messages
    VOTE = 13  # server to leader: workers whose pushes of a step have all arrived
    DECIDE = 14  # leader to server: the workers whose gradients make up the step
    NORM = 15  # server to leader: the squared norm of the server's part of the mean gradient
    RELAY = 18  # primary to backup: an applied update, with its hyper-parameters or the decision that it belongs to
    ACKNOWLEDGE = 19  # backup to primary: the version of a slice that the backup has
    COPY = 21  # primary to backup: a whole slice: its first values, or for a backup that is new or missed messages
    PING = 22  # server to server: the number of gaps in the receiver's messages; server to worker: a heartbeat


class Encoding(IntEnum):
    """Forms of payloads that the wire format itself uses; compressions use other numbers (:func:`add_encoding`)."""

    NOTHING = 0  # No numbers: JSON, or an optimizer's state. In a push: the parameter has no gradient.
    DENSE = 1  # the parameter's own dtype: no compression
    KEYS = 6  # uint32 keys of slices


# Looking a number up in a dictionary takes a third of the time of calling the enumeration.
_KIND_BY_NUMBER = {int(kind): kind for kind in Kind}
_encodings = {int(Encoding.NOTHING), int(Encoding.KEYS)}


def add_encoding(number: int) -> None:
    """Have receivers accept payloads in the encoding of a compression.

    Raises:
        ValueError: The number does not fit into a header, or already has a meaning.
    """
    if not 0 <= number <= 255 or number in _encodings:
        raise ValueError(f"encoding={number}: use a number from 0 to 255 other than {sorted(_encodings)}")
    _encodings.add(number)


def known_encodings() -> list[int]:
    """Return the encodings that receivers accept: those of the wire format and those of all compressions."""
    return sorted(_encodings)


class InvalidMessageError(ControlError):
    """A message that no member of this run sends.

    The text is a short reason that contains nothing of the payload: servers count dropped messages by reason.
    """


class Header(NamedTuple):
    """The fixed part of a message.

    The meaning of three fields depends on the kind. Kinds that the table leaves out do not use them.

    | kind        | step                  | base                                      | weight                       |
    | ----------- | --------------------- | ----------------------------------------- | ---------------------------- |
    | HELLO       | worker's step (1)     | number of the worker's view               |                              |
    | WELCOME     | step to begin with    |                                           |                              |
    | BEGIN       | step that begins      | encoding of the pull after the step       | samples of the gradient      |
    | PUSH        | step of the gradient  | parts of the slice without gradient (2)   |                              |
    | PULL        | step to work on next  | 2 x encoding, or 1 for present values (3) | mark of the worker's values  |
    | PULLED      | step of the PULL      | version of the values                     | mark of the values (4)       |
    | NORM        | step of the gradient  |                                           |                              |
    | RELAY       | step of the update    | 2^32 x incarnation + id of the worker     | version after the update     |
    | ACKNOWLEDGE |                       | version that the backup has               |                              |
    | COPY        |                       | version of the values                     |                              |
    | PING        |                       | gaps in the receiver's messages           |                              |

    1. `NO_STEP` from a worker that has not joined.
    2. Bit i is set if part i of the slice has no gradient.
    3. A pull for the present values takes them as they are; any other pull waits for the values of `step`.
    4. Where pulls may be answered with compressed changes, a mark identifies the values on which the changes build. A
       change applies only to values with the same mark. 0 means no mark; `ALONE` marks values on which no change
       builds.

    Attributes:
        kind: What the message requests or reports.
        sender: Id of the worker, or `SERVER` plus the id of the server.
        session: Number of the run.
        sequence: Number that grows with each message of the sender; a message with an old number is a replay. Between
            two servers it grows by one, so that a gap shows that messages were lost.
        encoding: Form of the numbers in the payload.
        incarnation: Incarnation of the sending worker; between servers the number of the view that the sender follows.
        key: Key of the slice, in messages about one slice.
        length: Bytes of the payload.
        meta: Bytes of the JSON object at the payload's start.
        step: See the table.
        base: See the table.
        weight: See the table.
        level: In BEGIN 1 + the index of the worker's encodings in the ladder, where workers choose encodings while they
            train; in PULLED the `level` of the common step's first member; in PULL 1 to request the optimizer's state.
        question: Number of a PULL for the present values. PULLED returns it, so that a late answer to an earlier pull
            is recognised. 0 in all other pulls.
    """

    kind: Kind
    sender: int
    session: int
    sequence: int
    encoding: int = Encoding.NOTHING
    incarnation: int = 0
    key: int = 0
    length: int = 0
    meta: int = 0
    step: int = 0
    base: int = 0
    weight: float = 0.0
    level: int = 0
    question: int = 0

    def pack(self) -> bytes:
        """Return the header as bytes."""
        return _LAYOUT.pack(
            MAGIC, VERSION, self.kind, self.encoding, self.level, self.sender, self.incarnation, self.key, self.length,
            self.meta, self.question, self.session, self.step, self.base, self.sequence, self.weight,
        )  # fmt: skip


@dataclass(frozen=True)
class Bounds:
    """Limits on what a receiver accepts, known before the first message.

    Attributes:
        payload: Largest payload, in bytes.
        slices: Number of slices; every key is below it.
    """

    payload: int
    slices: int


def length_in(data: bytes | memoryview) -> int:
    """Return the payload's length, in bytes, from the header at the start of a frame."""
    return int(_LENGTH_FIELD.unpack_from(data)[0])


def begins(data: bytes | memoryview, session: int) -> bool:
    """Whether a frame begins with the header of a message of this run."""
    return len(data) >= HEADER_BYTES and _RUN_FIELDS.unpack_from(data) == (MAGIC + bytes([VERSION]), session)


def unpack(data: bytes | memoryview, length: int, session: int, bounds: Bounds) -> Header:
    """Return the header of a received message, after all checks that do not need the receiver's state.

    Raises:
        InvalidMessageError: The message does not belong to this run, or a field is out of range.
    """
    if len(data) != HEADER_BYTES:
        raise InvalidMessageError("the header has the wrong size")
    magic, version, kind_number, encoding, level, *numbers, weight = _LAYOUT.unpack(data)
    sender, incarnation, key, payload_length, meta, question, header_session, step, base, sequence = numbers
    if magic != MAGIC:
        raise InvalidMessageError("not a message of cnnstrategies")
    if version != VERSION:
        raise InvalidMessageError("another version of the wire format")
    if header_session != session:
        raise InvalidMessageError("a message of another run")
    kind = _KIND_BY_NUMBER.get(kind_number)
    if kind is None or encoding not in _encodings:
        raise InvalidMessageError("unknown kind or encoding")
    if payload_length != length or length > bounds.payload or meta > min(length, LARGEST_JSON):
        raise InvalidMessageError("the length is wrong or too large")
    if key >= bounds.slices or not math.isfinite(weight) or weight < 0:
        raise InvalidMessageError("the key or the weight is out of range")
    if step >= LARGEST_NUMBER and step != NO_STEP:  # The limit leaves room for the number of the next step.
        raise InvalidMessageError("the step is out of range")
    return Header(
        kind, sender, header_session, sequence, encoding, incarnation, key, payload_length, meta, step, base, weight,
        level, question,
    )  # fmt: skip


def pack_json(values: dict[str, Any]) -> bytes:
    """Return a small dictionary as the bytes of a JSON object."""
    return _compact_json(values).encode()


def unpack_json(payload: memoryview, header: Header) -> dict[str, Any]:
    """Return the JSON object at the start of a payload.

    Raises:
        InvalidMessageError: The payload does not begin with a JSON object.
    """
    try:
        values = json.loads(str(payload[: header.meta], "utf-8"))
    except (ValueError, RecursionError):
        raise InvalidMessageError("the payload does not begin with JSON") from None
    if not isinstance(values, dict):
        raise InvalidMessageError("the JSON in the payload is not an object")
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
    """Return a message's header and payload; the JSON object, if any, is put before the payload."""
    json_bytes = b"" if json is None else pack_json(json)
    if json_bytes:
        payload = b"".join((json_bytes, payload))
    header = Header(kind, sender, session, sequence, length=len(payload), meta=len(json_bytes), **fields)
    return header, payload


def fields_of(payload: memoryview, header: Header) -> Message:
    """Return the JSON object at the start of a payload as a :class:`Message`, which checks each field as it is read."""
    return Message(header.kind.name, unpack_json(payload, header))


def pack_keys(keys: Sequence[int]) -> bytes:
    """Return the keys of slices as a payload."""
    return np.array(keys, "<u4").tobytes()


def unpack_keys(payload: memoryview) -> list[int]:
    """Return the keys of slices from a payload of :func:`pack_keys`.

    Raises:
        InvalidMessageError: The payload's length is not a multiple of 4 bytes.
    """
    if len(payload) % 4:
        raise InvalidMessageError("the length of the keys is not a multiple of 4 bytes")
    keys: list[int] = np.frombuffer(payload, "<u4").tolist()
    return keys


class Parcel(NamedTuple):
    """Effect: send a message, if the peer can be reached.

    Attributes:
        to: Id of a server, or the route over which a worker was last heard.
        payload: Payload of the message. Its memory is read when the message leaves, which may be later.
        wait: Whether the message may wait, to leave together with later messages to the same peer.
    """

    to: int | bytes
    header: Header
    payload: Any
    wait: bool


class Say(NamedTuple):
    """Effect: report something to the person who runs the training.

    Attributes:
        text: One line.
        urgent: Whether the line must reach the person: it is printed to stderr instead of logged as a warning.
    """

    text: str
    urgent: bool


Effects = list[Parcel | Say | End]
