"""Messages of the control plane on the wire: few, small, JSON with buffers, checked field by field.

A message is a tag with the version and the kind, a JSON object that also names the sender and the request, and buffers
that belong to it. Whatever does not fit is dropped by the receiver.
"""

import json
from collections.abc import Sequence

import zmq

from cnnstrategies.paramserver.coordinator.settings import SECRET_BITS, Address
from cnnstrategies.paramserver.core.node import ControlError, Message, Peer
from cnnstrategies.paramserver.security import KeyPair

TAG = b"CNNPS2 "
MAX_HEADER = 1 << 20
LARGEST_MESSAGE = 1 << 30  # bytes; libzmq drops a connection that announces more before it allocates anything
MOST_PARTS = 1 << 14  # of a message: a buffer for each tensor of a module
RECONNECT_MS = 20
ROLES = ("worker", "server", "supervision", "coordinator", "watcher")


def connect(
    address: Address, context: "zmq.Context[zmq.Socket[bytes]]", keys: KeyPair | None, run: KeyPair | None
) -> "zmq.Socket[bytes]":
    """A socket to the coordinator.

    Args:
        address: Where it is.
        context: Of the socket.
        keys: With which this process speaks; None for no encryption.
        run: The run's keys, which are the coordinator's.
    """
    connection = context.socket(zmq.DEALER)
    connection.setsockopt(zmq.LINGER, 200)
    connection.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    connection.setsockopt(zmq.MAXMSGSIZE, LARGEST_MESSAGE)
    connection.setsockopt(zmq.SNDHWM, 0)
    if keys is not None and run is not None:
        connection.curve_serverkey = run.public.encode()
        connection.curve_publickey, connection.curve_secretkey = keys.public.encode(), keys.secret.encode()
    connection.connect(address.coordinator)
    return connection


def encode(sender: Peer, message: Message) -> list[bytes]:
    """The first two frames of a message: its tag and its JSON object."""
    fields = {"from": sender, "request": message.request, **message.fields}
    return [TAG + message.kind.encode(), json.dumps(fields, separators=(",", ":")).encode()]


def send(socket: "zmq.Socket[bytes]", sender: Peer, message: Message) -> None:
    """Send a message to the one peer of a socket."""
    socket.send_multipart([*encode(sender, message), *message.frames])


def receive(socket: "zmq.Socket[bytes]", encrypted: bool) -> tuple[list[bytes], str]:
    """The parts of the message that waits, none of one that has too many; and the key of its connection.

    Args:
        socket: Where it waits.
        encrypted: Whether the connection has one.

    Raises:
        zmq.Again: None waits.
    """
    first = socket.recv(zmq.NOBLOCK, copy=False)
    parts = [first.bytes]
    count = 1
    while socket.getsockopt(zmq.RCVMORE):
        part = socket.recv(zmq.NOBLOCK)
        count += 1
        if count <= MOST_PARTS:
            parts.append(part)
    return parts if count <= MOST_PARTS else [], str(first.get("User-Id")) if encrypted else ""


def parse(frames: Sequence[bytes]) -> tuple[Peer, Message]:
    """The sender and the message in the frames that a socket received, without the one that names a connection.

    Raises:
        ControlError: They are not a message.
    """
    if len(frames) < 2 or not frames[0].startswith(TAG) or len(frames[0]) > 64 or len(frames[1]) > MAX_HEADER:
        raise ControlError("no message of this version")
    try:
        fields = json.loads(frames[1])
        kind = frames[0].removeprefix(TAG).decode("ascii")
    except (ValueError, RecursionError) as error:
        raise ControlError(str(error)) from error
    if not isinstance(fields, dict):
        raise ControlError("no JSON object")
    named = Message(kind, fields)
    sender = fields.pop("from", None)
    if not isinstance(sender, list) or len(sender) != 4 or sender[0] not in ROLES:
        raise ControlError(f"{kind}: no sender")
    if any(type(one) is not int or not 0 <= one < 1 << SECRET_BITS for one in sender[1:]):
        raise ControlError(f"{kind}: a sender without numbers")
    request = named.integer("request")
    del fields["request"]
    return Peer(*sender), Message(kind, fields, list(frames[2:]), request)
