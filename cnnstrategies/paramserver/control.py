"""Messages of the control plane: few, small, JSON with buffers, checked field by field.

A message is a tag with the version and the kind, a JSON object, and buffers that belong to it. Whatever does not fit
is dropped by the receiver.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import zmq

TAG = b"CNNPS1 "
MAX_HEADER = 1 << 20
LARGEST_MESSAGE = 1 << 30  # bytes; libzmq drops a connection that announces more before it allocates anything
MOST_PARTS = 1 << 14  # of a message: a buffer for each tensor of a module
RECONNECT_MS = 20
Buffer = bytes | bytearray | memoryview
COORDINATOR = b""  # a DEALER has one peer only


class ControlError(ValueError):
    """A message is not one of the control plane."""


@dataclass
class Message:
    """One message.

    Attributes:
        kind: What it asks or says.
        fields: Its JSON object.
        frames: Buffers that belong to it.
        sender: The connection it came in on; empty at a member.
        encoded: The JSON object as bytes, where one goes to many.
    """

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    frames: Sequence[Buffer] = ()
    sender: bytes = COORDINATOR
    encoded: bytes | None = None

    def to(self, connection: bytes) -> "Message":
        """The same for a connection."""
        return replace(self, sender=connection)

    def integer(self, name: str) -> int:
        """A field that is an integer of at most 63 bits and not negative."""
        value = self.fields.get(name)
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise ControlError(f"{self.kind}: {name}={value!r} is not a number")
        return value

    def string(self, name: str) -> str:
        """A field that is a string."""
        value = self.fields.get(name)
        if not isinstance(value, str):
            raise ControlError(f"{self.kind}: {name}={value!r} is not a string")
        return value

    def flag(self, name: str) -> bool:
        """A field that is true or, like one that is not there, false."""
        return self.fields.get(name) is True


def send(socket: "zmq.Socket[bytes]", message: Message, copy: bool = True) -> None:
    """Send a message; to the connection ``message.sender`` if it names one.

    Args:
        socket: The socket.
        message: The message.
        copy: Copy the buffers; else they stay as they are for ever, and one that goes to many is in memory once.
    """
    head = [message.sender] if message.sender else []
    body = encode_fields(message.fields) if message.encoded is None else message.encoded
    socket.send_multipart([*head, TAG + message.kind.encode(), body, *message.frames], copy=copy)


def encode_fields(fields: dict[str, Any]) -> bytes:
    """The JSON object of a message."""
    return json.dumps(fields, separators=(",", ":")).encode()


def receive(socket: "zmq.Socket[bytes]") -> list[bytes]:
    """The parts of the message that waits; none of one that has too many.

    Raises:
        zmq.Again: None waits.
    """
    parts = [socket.recv(zmq.NOBLOCK)]
    count = 1
    while socket.getsockopt(zmq.RCVMORE):
        part = socket.recv(zmq.NOBLOCK)
        count += 1
        if count <= MOST_PARTS:
            parts.append(part)
    return parts if count <= MOST_PARTS else []


def waiting(socket: "zmq.Socket[bytes]") -> bool:
    """Whether a message can be received now."""
    return bool(socket.poll(0))


def parse(parts: Sequence[bytes], routed: bool) -> Message:
    """The message in the frames that a socket received.

    Args:
        parts: The frames.
        routed: Whether the first one names the connection, as on a ROUTER.

    Raises:
        ControlError: They are not a message.
    """
    head, rest = (parts[0], parts[1:]) if routed and parts else (COORDINATOR, parts)
    if len(rest) < 2 or not rest[0].startswith(TAG) or len(rest[0]) > 64 or len(rest[1]) > MAX_HEADER:
        raise ControlError("no message of this version")
    try:
        fields = json.loads(rest[1])
        kind = rest[0].removeprefix(TAG).decode("ascii")
    except (ValueError, RecursionError) as error:
        raise ControlError(str(error)) from error
    if not isinstance(fields, dict):
        raise ControlError("no JSON object")
    return Message(kind, fields, list(rest[2:]), head)
