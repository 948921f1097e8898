"""The driver of the control plane's roles, and their messages on the wire, which are few and small.

A message is one frame: a tag with the version, a proof, the length of a JSON array, the array, and the buffers one
after the other. The array contains the kind, the sender, the request's number, the buffers' lengths and the fields. A
receiver checks each message and drops those that do not have this form.

Every process of a run has the run's keys, which are the coordinator's, and makes a pair of its own with which it
connects. Each message proves that its sender has the run's keys. The process's own key proves who the sender is: the
coordinator knows each process by the fingerprint of its key, and no other process has that key.
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

TAG = b"CNNPS4"
MAX_HEADER = 1 << 20
LARGEST_MESSAGE = 1 << 30  # bytes; libzmq drops a connection that announces more, before it allocates memory
RECONNECT_MS = 20
ROLES = ("worker", "server", "supervision", "coordinator", "watcher")
DESK = Peer("coordinator", 0)  # sender of the coordinator's messages
_START = struct.Struct(f"<{len(TAG)}s{PROOF_BYTES}sI")


def encode(sender: Peer, message: Message, proof: bytes = b"") -> bytes:
    """Return a message as a frame.

    The coordinator's messages are without a proof: every process that connects knows its key.
    """
    envelope = [message.kind, sender, message.request, [len(buffer) for buffer in message.frames], message.fields]
    text = json.dumps(envelope, separators=(",", ":")).encode()
    return b"".join([_START.pack(TAG, proof, len(text)), text, *message.frames])


def parse(frame: bytes | memoryview) -> tuple[Peer, Message]:
    """Return the sender and the message in a frame.

    Raises:
        ControlError: The frame is not a message.
    """
    if len(frame) < _START.size:
        raise ControlError("not a message: it is too short")
    tag, _, length = _START.unpack_from(frame)
    rest = frame[_START.size :]
    if tag != TAG or length > min(len(rest), MAX_HEADER):
        raise ControlError("not a message of this version")
    try:
        kind, sender, request, sizes, fields = json.loads(bytes(rest[:length]))
    except (ValueError, TypeError, RecursionError) as error:
        raise ControlError(str(error)) from error
    if not isinstance(kind, str) or not isinstance(fields, dict):
        raise ControlError("a message without kind or fields")
    if not isinstance(sender, list) or len(sender) != 4 or sender[0] not in ROLES:
        raise ControlError(f"{kind}: the sender is missing or has an unknown role")
    if any(type(number) is not int or not 0 <= number < 1 << SECRET_BITS for number in sender[1:]):
        raise ControlError(f"{kind}: a sender without numbers")
    if type(request) is not int or not 0 <= request < INTEGER_LIMIT:
        raise ControlError(f"{kind}: request={request!r} is not a number")
    if not isinstance(sizes, list) or any(type(size) is not int or size < 0 for size in sizes):
        raise ControlError(f"{kind}: buffers without lengths")
    *starts, end = itertools.accumulate(sizes, initial=length)
    if end != len(rest):
        raise ControlError(f"{kind}: the buffers have other lengths than announced")
    buffers = [bytes(rest[start : start + size]) for start, size in zip(starts, sizes, strict=True)]
    return Peer(*sender), Message(kind, fields, buffers, request)


def parse_checked(frame: bytes | memoryview, key: str, run: KeyPair) -> tuple[Peer, Message]:
    """Return the sender and the message in a frame, if the connection's key belongs to that sender and to this run.

    Args:
        frame: The frame.
        key: Public key with which the sender has connected.
        run: The run's keys.

    Raises:
        ControlError: The frame is not a message, or not one of this run, or of another sender than it says.
    """
    start = len(TAG)
    if not hmac.compare_digest(bytes(frame[start : start + PROOF_BYTES]), prove(run, key)):
        raise ControlError("the sender does not have the run's keys")
    sender, message = parse(frame)
    if sender.process != fingerprint(key) or message.fields.get("public_key", key) != key:
        raise ControlError(f"{message.kind}: the connection's key is not the sender's")
    return sender, message


class Line:
    """A process's connection to the coordinator. Used by one thread.

    Args:
        address: Address of the coordinator, and the time-out.
        peer: This process.
        keys: The process's own keys; None without encryption.
        run_keys: The run's keys; None without encryption.
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
        """Send a message, which leaves as soon as the connection is made."""
        sockets.send(self._socket, encode(self._peer, message, self._proof))

    def receive(self, seconds: float, wake: int | None = None) -> list[tuple[Peer, Message]]:
        """Return the messages that have arrived; frames that are not messages are dropped.

        Args:
            seconds: Longest time to wait for the first message.
            wake: A file descriptor that ends the wait when it is readable.
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
        """Close the connection; the last messages have a moment to leave."""
        self._socket.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Loop:
    """A role with its timers. Used by one thread.

    Args:
        role: The role.
        send: Sends a message to a peer; must not block.
        on_return: Called with the results that the role returns.
        on_end: Called when the role ends.
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
        """Start the role."""
        self.act(self.role.start(time.monotonic()))

    def message(self, sender: Peer, message: Message) -> None:
        """Hand a message to the role.

        Raises:
            ControlError: The message is not valid. Any other error is a mistake in the role itself.
        """
        self.act(self.role.on_message(time.monotonic(), sender, message))

    def hear(self, received: Iterable[tuple[Peer, Message]]) -> None:
        """Hand messages to the role, and call it for its timers; messages that are not valid are dropped."""
        for sender, message in received:
            with contextlib.suppress(ControlError):
                self.message(sender, message)
        self.fire()

    def fire(self) -> None:
        """Call the role for the timers that have expired."""
        now = time.monotonic()
        for name in [name for name, at in self._timers.items() if at <= now]:
            del self._timers[name]
            self.act(self.role.on_timer(now, name))

    def until_next(self, most: float) -> float:
        """Return the seconds until the next timer, but `most` at most."""
        return max(0.0, min(min(self._timers.values(), default=float("inf")) - time.monotonic(), most))

    def act(self, effects: Effects) -> None:
        """Carry out the role's effects."""
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
