"""The wire format between workers and servers: a fixed binary header, then a payload.

A message is the header (little-endian, 72 bytes) followed by the payload. The payload may begin with a JSON object of
`Header.meta` bytes. A frame contains one or more messages, one after the other. A payload larger than `SMALL_BYTES` is
sent in a frame of its own, directly after the frame that ends with its header.

Nothing in a message is unpickled or evaluated. Every field is checked before it is used. A failed check raises an
:class:`InvalidMessageError`, and the receiver drops the whole message.
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
LARGEST_JSON = 1 << 18  # largest size, in bytes, of the JSON object in a message
# Largest size, in bytes, of a payload that is copied into libzmq. For small payloads, a copy costs less than libzmq's
# release callback into Python. Several messages with small payloads may also be sent together in one frame.
SMALL_BYTES = 1 << 18
SERVER = 1 << 31  # The sender field of a server's message is the server's id plus this number.
NO_STEP = (1 << 64) - 1  # step of a worker that has not joined
LARGEST_NUMBER = 1 << 63  # Steps and versions are below this number.
ALONE = 1.0  # mark of pulled values to which no difference will be added; see `Header`

_compact_json = json.JSONEncoder(separators=(",", ":")).encode
_LAYOUT = struct.Struct("<4sBBBBIIIIIIQQQQd")
HEADER_BYTES = _LAYOUT.size
_LENGTH_FIELD, _RUN_FIELDS = struct.Struct("<20xI"), struct.Struct("<5s27xQ")


class Kind(IntEnum):
    """The kind of a message: what the message requests or reports."""

    HELLO = (
        1  # worker to server: the worker's step, whether it joins or leaves, and keys of slices that it has received
    )
    WELCOME = 2  # server to worker: reply to HELLO with the first step, or a request to repeat pushes and pulls
    VALUE = 4  # worker to server: a slice's optimizer state, followed by the slice's initial values
    BEGIN = 6  # worker to server: hyperparameters of the step whose pushes follow, and weight of the worker's gradient
    PUSH = 7  # worker to server: the gradient of a slice
    PULL = 8  # worker to server: a request for slices, with the step whose values the worker needs
    PULLED = 9  # server to worker: reply to PULL with a slice's values, difference or optimizer state
    STATUS = 12  # server to leader, after a new view or lost messages: the server's last decision and complete pushes
    VOTE = 13  # server to leader: the workers whose pushes for a step have all arrived
    DECIDE = 14  # leader to server: the workers whose gradients form the step
    NORM = 15  # server to leader: squared norm of the mean gradient in the slices whose primary is the server
    RELAY = 18  # primary to backup: an applied update, with its hyperparameters or with the decision about its step
    ACKNOWLEDGE = 19  # backup to primary: the version of a slice that the backup has
    COPY = 21  # primary to backup: a whole slice, for a backup that has no values yet or has missed messages
    # server to server: number of gaps that the PING's sender has found in the messages from the PING's receiver; server
    # to worker: a heartbeat
    PING = 22


class Encoding(IntEnum):
    """Encodings of payloads that are not compressed.

    Compressions register their own encodings with :func:`add_encoding`.
    """

    NOTHING = 0  # no tensor: only JSON or an optimizer state; in a push: the slice has no gradient
    DENSE = 1  # not compressed, in the parameter's own dtype
    KEYS = 6  # uint32 keys of slices


# By number: the kind. A lookup in this dictionary takes a third of the time of `Kind(number)`.
_KIND_BY_NUMBER = {int(kind): kind for kind in Kind}
# Keys: numbers of encodings. Values: names for error messages, such as the name of the compression's class.
_encodings = {int(Encoding.NOTHING): "messages without a tensor", int(Encoding.KEYS): "messages with keys of slices"}


def add_encoding(number: int, owner: str) -> None:
    """Register the number of a compression's encoding, so that :func:`unpack` accepts it.

    Args:
        number: The number, which must fit into one byte of the header.
        owner: Name of the compression's class, for error messages.

    Raises:
        ValueError: The number does not fit into a header, or is in use already.
    """
    if not 0 <= number <= 255:
        raise ValueError(f"{owner}: encoding={int(number)} does not fit into a header: use a number from 0 to 255")
    if number in _encodings:
        taken = ", ".join(str(other) for other in sorted(_encodings))
        raise ValueError(
            f"{owner}: encoding={int(number)} is already in use for {_encodings[number]}: use a different number from "
            f"0 to 255; the numbers in use are {taken}"
        )
    _encodings[int(number)] = owner


def known_encodings() -> list[int]:
    """Return the numbers of all encodings that :func:`unpack` accepts, in rising order."""
    return sorted(_encodings)


class InvalidMessageError(ControlError):
    """An error for an invalid message. No correct member of this run sends such a message.

    The error's text is a short reason. It does not contain any bytes of the message, because servers count dropped
    messages by reason.
    """


class OutdatedMessageError(InvalidMessageError):
    """An error for a message that was sent before its sender learned of a change, or that has arrived too early.

    For example, the membership has changed since the message was sent, or an earlier message of the sender is still on
    its way. The sender repeats such messages if necessary, so servers only count them, and do not report them.
    """


class Header(NamedTuple):
    """The fixed part of a message.

    The meaning of the fields `step`, `base` and `weight` depends on the kind of the message. Kinds that are not in the
    table do not use these fields.

    | kind        | step                  | base                                      | weight                       |
    | ----------- | --------------------- | ----------------------------------------- | ---------------------------- |
    | HELLO       | worker's step (1)     | number of the worker's view               |                              |
    | WELCOME     | worker's first step   |                                           |                              |
    | BEGIN       | step that begins      | encoding of the pull after the step       | number of samples            |
    | PUSH        | step of the gradient  | parts of the slice without gradient (2)   |                              |
    | PULL        | step to work on next  | 2 x encoding, or 1 for current values (3) | mark of the worker's values  |
    | PULLED      | step of the PULL      | version of the values                     | mark of the values (4)       |
    | NORM        | step of the gradient  |                                           |                              |
    | RELAY       | step of the update    | 2^32 x incarnation + id of the worker     | version after the update     |
    | ACKNOWLEDGE |                       | version that the backup has               |                              |
    | COPY        |                       | version of the values                     |                              |
    | PING        |                       | number of gaps (5)                        |                              |

    1. `NO_STEP` if the worker has not joined.
    2. Bit i is set if part i of the slice has no gradient.
    3. The reply to a pull waits until the values for `step` are ready. Only one kind of pull gets its reply at once: a
       pull of the current values in a mode in which workers make steps independently.
    4. A server may reply to a pull with a compressed difference from earlier values. The mark identifies these earlier
       values: the worker may add a difference only to values with the same mark. 0 means that the worker has no such
       values. `ALONE` is the mark of values to which no difference will be added.
    5. Number of gaps that the PING's sender has found in the messages from the PING's receiver.

    Attributes:
        kind: What the message requests or reports.
        sender: Id of the worker, or `SERVER` plus the id of the server.
        session: Number of the run.
        sequence: Number that grows with each message of the sender. A receiver drops a message whose number is not
            larger than the number of the sender's last message. Between two servers, the number grows by one with each
            message, so a gap shows that messages were lost.
        encoding: Encoding of the payload.
        incarnation: Incarnation of the sending worker; between servers the number of the sender's current view.
        key: Key of the slice, in messages about one slice.
        length: Number of bytes of the payload.
        meta: Number of bytes of the JSON object at the payload's start.
        step: See the table.
        base: See the table.
        weight: See the table.
        level: In BEGIN with ``compression: auto``: level of the worker's encodings in the ladder of encodings. Level 1
            is the most exact, and the highest level has the smallest payloads. In PULLED: the `level` in the BEGIN
            message of the first worker in the common step's decision. In PULL: 1 to request the optimizer's state.
        question: In a PULL for the current values: id of the pull. The PULLED reply contains the same id, so that the
            worker can recognise a late reply to an earlier PULL. 0 in all other pulls.
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
    """Limits of the messages that a receiver accepts. The limits follow from the run's specification.

    Attributes:
        payload: Largest payload, in bytes.
        slices: Number of slices; every valid key is below this number.
    """

    payload: int
    slices: int


def length_in(data: bytes | memoryview) -> int:
    """Return the length of the payload, in bytes, according to the header at the start of a frame."""
    return int(_LENGTH_FIELD.unpack_from(data)[0])


def begins(data: bytes | memoryview, session: int) -> bool:
    """Return whether a frame begins with the header of a message of this run.

    Only the magic bytes, the version and the number of the run are checked.
    """
    return len(data) >= HEADER_BYTES and _RUN_FIELDS.unpack_from(data) == (MAGIC + bytes([VERSION]), session)


def unpack(data: bytes | memoryview, length: int, session: int, bounds: Bounds) -> Header:
    """Decode the header of a received message, and make the checks that do not depend on the receiver's state.

    Args:
        data: Bytes of the header.
        length: Number of bytes of the payload that was received.
        session: Number of this run.
        bounds: Limits of the receiver.

    Raises:
        InvalidMessageError: The message does not belong to this run, or a field is out of range.
    """
    if len(data) != HEADER_BYTES:
        raise InvalidMessageError("the header has the wrong size")
    magic, version, kind_number, encoding, level, *numbers, weight = _LAYOUT.unpack(data)
    sender, incarnation, key, payload_length, meta, question, header_session, step, base, sequence = numbers
    if magic != MAGIC:
        raise InvalidMessageError("the frame is not a message of cnnstrategies")
    if version != VERSION:
        raise InvalidMessageError("the message's version of the wire format is not the version of this process")
    if header_session != session:
        raise InvalidMessageError("the message belongs to a different run")
    kind = _KIND_BY_NUMBER.get(kind_number)
    if kind is None or encoding not in _encodings:
        raise InvalidMessageError("the kind or the encoding is unknown")
    if payload_length != length or length > bounds.payload or meta > min(length, LARGEST_JSON):
        raise InvalidMessageError("the length is wrong or too large")
    if key >= bounds.slices or not math.isfinite(weight) or weight < 0:
        raise InvalidMessageError("the key or the weight is out of range")
    if step >= LARGEST_NUMBER and step != NO_STEP:  # Below this limit, step + 1 also fits into the field.
        raise InvalidMessageError("the step is out of range")
    return Header(
        kind, sender, header_session, sequence, encoding, incarnation, key, payload_length, meta, step, base, weight,
        level, question,
    )  # fmt: skip


def pack_json(values: dict[str, Any]) -> bytes:
    """Encode a small dictionary as a JSON object."""
    return _compact_json(values).encode()


def unpack_json(payload: memoryview, header: Header) -> dict[str, Any]:
    """Return the JSON object at the start of a payload.

    Raises:
        InvalidMessageError: The payload does not begin with a JSON object.
    """
    try:
        values = json.loads(str(payload[: header.meta], "utf-8"))
    except (ValueError, RecursionError):
        raise InvalidMessageError("the payload does not begin with valid JSON") from None
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
    """Return a message's header and payload.

    Args:
        sender: The header's `sender`.
        session: Number of the run.
        kind: Kind of the message.
        sequence: Sequence number of the message.
        payload: Bytes of the payload, without the JSON object.
        json: Dictionary to put before the payload as a JSON object; None for no JSON object.
        **fields: Other fields of the header.
    """
    json_bytes = b"" if json is None else pack_json(json)
    if json_bytes:
        payload = b"".join((json_bytes, payload))
    header = Header(kind, sender, session, sequence, length=len(payload), meta=len(json_bytes), **fields)
    return header, payload


def fields_of(payload: memoryview, header: Header) -> Message:
    """Return the JSON object at the start of a payload as a :class:`Message`, whose methods check a field's type."""
    return Message(header.kind.name, unpack_json(payload, header))


def pack_keys(keys: Sequence[int]) -> bytes:
    """Encode the keys of slices as a payload."""
    return np.array(keys, "<u4").tobytes()


def unpack_keys(payload: memoryview) -> list[int]:
    """Decode the keys of slices from a payload that :func:`pack_keys` made.

    Raises:
        InvalidMessageError: The payload's length is not a multiple of 4 bytes.
    """
    if len(payload) % 4:
        raise InvalidMessageError("the length of the keys is not a multiple of 4 bytes")
    keys: list[int] = np.frombuffer(payload, "<u4").tolist()
    return keys


class Parcel(NamedTuple):
    """Effect: send a message.

    Attributes:
        to: Id of the receiving server, or ZeroMQ routing id of the receiving worker's connection.
        header: Header of the message.
        payload: Payload of the message. It is not copied, and may be sent later.
        wait: Whether the driver may delay the message, to send it together with later messages to the same peer.
    """

    to: int | bytes
    header: Header
    payload: Any
    wait: bool


class Say(NamedTuple):
    """Effect: show a line of text to the user.

    Attributes:
        text: The line.
        urgent: Whether to print the line to stderr, so that the user sees it; otherwise it is logged as a warning.
    """

    text: str
    urgent: bool


Effects = list[Parcel | Say | End]
