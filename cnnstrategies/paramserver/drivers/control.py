"""Driver and wire format of the control plane: the messages between the coordinator and the other processes of a run.

A message is one frame: a tag with the version, a proof, the length of a JSON array, the array, and the buffers one
after the other. The array contains the kind, the sender, the request's id, the buffers' lengths and the fields. A
receiver checks each message, and drops messages that do not have this format.

All processes of a run have the run's key pair. The coordinator uses this key pair for its socket; every other process
creates its own key pair for its connection. The proof in a message shows that the sender has the run's keys. The
public key of the connection identifies the sender, because the sender's process number is the fingerprint of this key.
"""

import contextlib
import hmac
import itertools
import json
import struct
import time
from collections.abc import Callable, Iterable
from typing import Self

import zmq

from cnnstrategies.paramserver.coordinator.settings import SECRET_BITS, Address
from cnnstrategies.paramserver.core.node import (
    INTEGER_LIMIT,
    ControlError,
    Effects,
    End,
    Message,
    Peer,
    Return,
    Role,
    Send,
    Timer,
)
from cnnstrategies.paramserver.drivers import sockets
from cnnstrategies.paramserver.security import PROOF_BYTES, KeyPair, fingerprint, prove

TAG = b"CNNPS5"
MAX_HEADER = 1 << 20  # largest size of a message's JSON array, in bytes
LARGEST_MESSAGE = 1 << 30  # in bytes; libzmq closes a connection on which the peer announces a larger message
RECONNECT_MS = 20  # milliseconds after which libzmq connects again when a connection is closed
ROLES = ("worker", "server", "supervision", "coordinator", "watcher")
_START = struct.Struct(f"<{len(TAG)}s{PROOF_BYTES}sI")


def encode(sender: Peer, message: Message, proof: bytes = b"") -> bytes:
    """Encode a message as a frame.

    Args:
        sender: The process that sends the message.
        message: The message.
        proof: Proof that the sender has the run's keys. The coordinator's messages need no proof, because the
            connection's encryption already authenticates the coordinator.
    """
    envelope = [message.kind, sender, message.request, [len(buffer) for buffer in message.frames], message.fields]
    text = json.dumps(envelope, separators=(",", ":")).encode()
    return b"".join([_START.pack(TAG, proof, len(text)), text, *message.frames])


def parse(frame: bytes | memoryview) -> tuple[Peer, Message]:
    """Decode a frame into its sender and its message. The sender is not authenticated; see :func:`parse_checked`.

    Raises:
        ControlError: The frame is not a valid message.
    """
    if len(frame) < _START.size:
        raise ControlError("the frame is too short for a message")
    tag, _, length = _START.unpack_from(frame)
    rest = frame[_START.size :]
    if tag != TAG or length > min(len(rest), MAX_HEADER):
        raise ControlError("the frame is not a message in this process's version of the protocol")
    try:
        kind, sender, request, sizes, fields = json.loads(bytes(rest[:length]))
    except (ValueError, TypeError, RecursionError) as error:
        raise ControlError(str(error)) from error
    if not isinstance(kind, str) or not isinstance(fields, dict):
        raise ControlError("the message has no kind or no fields")
    if not isinstance(sender, list) or len(sender) != 4 or sender[0] not in ROLES:
        raise ControlError(f"{kind}: the sender is missing or has an unknown role")
    if any(type(number) is not int or not 0 <= number < 1 << SECRET_BITS for number in sender[1:]):
        raise ControlError(f"{kind}: the sender's id, incarnation or process number is missing or out of range")
    if type(request) is not int or not 0 <= request < INTEGER_LIMIT:
        raise ControlError(f"{kind}: request={request!r} is not an integer from 0 to 2^63 - 1")
    if not isinstance(sizes, list) or any(type(size) is not int or size < 0 for size in sizes):
        raise ControlError(f"{kind}: the buffers' lengths are missing or not valid")
    *starts, end = itertools.accumulate(sizes, initial=length)
    if end != len(rest):
        raise ControlError(f"{kind}: the announced lengths of the buffers do not add up to the frame's length")
    buffers = [bytes(rest[start : start + size]) for start, size in zip(starts, sizes, strict=True)]
    return Peer(*sender), Message(kind, fields, buffers, request)


def parse_checked(frame: bytes | memoryview, key: str, run: KeyPair) -> tuple[Peer, Message]:
    """Decode a frame into its sender and its message, and authenticate the sender.

    Args:
        frame: The frame.
        key: Public key of the connection over which the frame arrived.
        run: The run's keys.

    Raises:
        ControlError: The frame is not a valid message; or the sender does not have the run's keys; or the message names
            a sender to which the connection's public key does not belong.
    """
    start = len(TAG)
    if not hmac.compare_digest(bytes(frame[start : start + PROOF_BYTES]), prove(run, key)):
        raise ControlError("the sender does not have the run's keys")
    sender, message = parse(frame)
    if sender.process != fingerprint(key) or message.fields.get("public_key", key) != key:
        raise ControlError(f"{message.kind}: the connection's key does not belong to the sender")
    return sender, message


class Line:
    """A process's connection to the coordinator. Only one thread may use the connection.

    Args:
        address: Endpoint of the coordinator, and the time-out.
        peer: Role, id, incarnation and process number of this process.
        keys: This process's own key pair; None without encryption.
        run_keys: The run's key pair; None without encryption.
    """

    def __init__(self, address: Address, peer: Peer, keys: KeyPair | None, run_keys: KeyPair | None) -> None:
        self._peer = peer
        self._proof = b"" if run_keys is None or keys is None else prove(run_keys, keys.public)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_MESSAGE)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        sockets.notice_silence(self._socket, address.timeout)
        if run_keys is not None:
            sockets.secure(self._socket, keys, run_keys.public)
        self._socket.connect(address.coordinator)

    def send(self, message: Message) -> None:
        """Send a message to the coordinator, as soon as the connection is established."""
        sockets.send(self._socket, encode(self._peer, message, self._proof))

    def receive(self, seconds: float, wake: int | None = None) -> list[tuple[Peer, Message]]:
        """Return the messages that have arrived, each with its sender. Frames that are not valid messages are dropped.

        Args:
            seconds: Longest time to wait for the first message.
            wake: File descriptor that ends the wait when it becomes readable; None if only a message ends the wait.
        """
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        if wake is not None:
            poller.register(wake, zmq.POLLIN)
        poller.poll(int(1000 * seconds) + 1)
        received = []
        while self._socket.poll(0):
            with contextlib.suppress(ControlError):
                received.append(parse(sockets.take(self._socket, routed=False)[1].buffer))
        return received

    def close(self) -> None:
        """Close the connection. Messages that are not sent within another 0.2 s are lost."""
        self._socket.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Loop:
    """Driver that passes messages and expired timers to a role, and carries out the effects that the role returns.

    Only one thread may use a loop.

    Args:
        role: The role.
        send: Function that sends a message to a peer; it must not block.
        on_return: Function that is called with each :class:`.Return` effect.
        on_end: Function that is called with the :class:`.End` effect when the role ends.
    """

    def __init__(
        self,
        role: Role,
        send: Callable[[Peer, Message], None],
        on_return: Callable[[Return], None] = lambda result: None,
        on_end: Callable[[End], None] = lambda end: None,
    ) -> None:
        self.role = role
        self.send = send
        self._on_return = on_return
        self._on_end = on_end
        self._timers: dict[str, float] = {}

    def start(self) -> None:
        """Start the role, and carry out the effects that the role returns."""
        self.act(self.role.start(time.monotonic()))

    def message(self, sender: Peer, message: Message) -> None:
        """Pass a message to the role, and carry out the effects that the role returns.

        Raises:
            ControlError: The message is not valid. Any other exception is a bug in the role.
        """
        self.act(self.role.on_message(time.monotonic(), sender, message))

    def hear(self, received: Iterable[tuple[Peer, Message]]) -> None:
        """Pass messages to the role, and then all expired timers. Messages that are not valid are dropped.

        Args:
            received: The messages that have arrived, each in a pair with its sender.
        """
        for sender, message in received:
            with contextlib.suppress(ControlError):
                self.message(sender, message)
        self.fire()

    def fire(self) -> None:
        """Pass all expired timers to the role."""
        now = time.monotonic()
        for name in [name for name, at in self._timers.items() if at <= now]:
            del self._timers[name]
            self.act(self.role.on_timer(now, name))

    def until_next(self, most: float) -> float:
        """Return the number of seconds until the next timer expires, but at most `most`."""
        return max(0.0, min(min(self._timers.values(), default=float("inf")) - time.monotonic(), most))

    def act(self, effects: Effects) -> None:
        """Carry out effects that the role has returned."""
        for effect in effects:
            match effect:
                case Send():
                    self.send(effect.to, effect.message)
                case Timer(name, None):
                    self._timers.pop(name, None)
                case Timer(name, float(at)):
                    self._timers[name] = at
                case Return():
                    self._on_return(effect)
                case End():
                    self._on_end(effect)
