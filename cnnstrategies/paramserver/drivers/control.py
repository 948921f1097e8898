"""The control plane's roles in a process, and their messages on the wire: few, small, JSON with buffers, checked.

A message is one frame: a tag with the version, a proof, the length of a JSON array, the array, and the buffers one
after the other. The array has the kind, the sender, the request, the buffers' lengths and the fields. Whatever does not
fit is dropped by the receiver.

Every process of a run has the run's keys, and makes a pair of its own with which it connects. Its messages prove that
it has the run's, which are the coordinator's, and what it says is believed because nobody else has its own: the
coordinator knows each process by the fingerprint of its key.
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
LARGEST_MESSAGE = 1 << 30  # bytes; libzmq drops a connection that announces more before it allocates anything
RECONNECT_MS = 20
ROLES = ("worker", "server", "supervision", "coordinator", "watcher")
DESK = Peer("coordinator", 0)  # Who answers.
_START = struct.Struct(f"<{len(TAG)}s{PROOF_BYTES}sI")


def encode(sender: Peer, message: Message, proof: bytes = b"") -> bytes:
    """A message as a frame; the coordinator proves nothing, for who connects knows its key."""
    about = [message.kind, sender, message.request, [len(buffer) for buffer in message.frames], message.fields]
    text = json.dumps(about, separators=(",", ":")).encode()
    return b"".join([_START.pack(TAG, proof, len(text)), text, *message.frames])


def parse(frame: bytes | memoryview) -> tuple[Peer, Message]:
    """The sender and the message in a frame.

    Raises:
        ControlError: It is no message.
    """
    if len(frame) < _START.size:
        raise ControlError("no message")
    tag, _, length = _START.unpack_from(frame)
    rest = frame[_START.size :]
    if tag != TAG or length > min(len(rest), MAX_HEADER):
        raise ControlError("no message of this version")
    try:
        kind, sender, request, sizes, fields = json.loads(bytes(rest[:length]))
    except (ValueError, TypeError, RecursionError) as error:
        raise ControlError(str(error)) from error
    if not isinstance(kind, str) or not isinstance(fields, dict):
        raise ControlError("no kind, or no fields")
    if not isinstance(sender, list) or len(sender) != 4 or sender[0] not in ROLES:
        raise ControlError(f"{kind}: no sender")
    if any(type(one) is not int or not 0 <= one < 1 << SECRET_BITS for one in sender[1:]):
        raise ControlError(f"{kind}: a sender without numbers")
    if type(request) is not int or not 0 <= request < INTEGER_LIMIT:
        raise ControlError(f"{kind}: request={request!r} is not a number")
    if not isinstance(sizes, list) or any(type(size) is not int or size < 0 for size in sizes):
        raise ControlError(f"{kind}: buffers without lengths")
    *starts, end = itertools.accumulate(sizes, initial=length)
    if end != len(rest):
        raise ControlError(f"{kind}: buffers of other lengths")
    buffers = [bytes(rest[start : start + size]) for start, size in zip(starts, sizes, strict=True)]
    return Peer(*sender), Message(kind, fields, buffers, request)


def parse_checked(frame: bytes | memoryview, key: str, run: KeyPair) -> tuple[Peer, Message]:
    """What has come over a connection with a key, if who has that key has the run's, too, and speaks for itself.

    Raises:
        ControlError: It is no message, or another one's.
    """
    start = len(TAG)
    if not hmac.compare_digest(bytes(frame[start : start + PROOF_BYTES]), prove(run, key)):
        raise ControlError("a stranger's key")
    sender, message = parse(frame)
    if sender.process != fingerprint(key) or message.fields.get("public_key", key) != key:
        raise ControlError(f"{message.kind}: a key that is not its sender's")
    return sender, message


class Line:
    """A process's connection to the coordinator, with its own keys and the run's, if any. Used by one thread."""

    def __init__(self, address: Address, peer: Peer, own: KeyPair | None, run: KeyPair | None) -> None:
        self._peer = peer
        self._proof = b"" if run is None or own is None else prove(run, own.public)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_MESSAGE)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        sockets.notice_silence(self._socket, address.timeout)
        if run is not None:
            sockets.secure(self._socket, own, run.public)
        self._socket.connect(address.coordinator)

    def send(self, message: Message) -> None:
        """Send a message, as soon as there is a connection."""
        sockets.send(self._socket, encode(self._peer, message, self._proof))

    def receive(self, seconds: float, wake: int | None = None) -> list[tuple[Peer, Message]]:
        """Wait some seconds for messages, or until the file descriptor `wake` is readable; what is none is dropped."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        if wake is not None:
            poller.register(wake, zmq.POLLIN)
        poller.poll(int(1000 * seconds) + 1)
        found = []
        while self._socket.poll(0):
            with contextlib.suppress(ControlError):
                found.append(parse(sockets.take(self._socket, routed=False)[1].buffer))
        return found

    def close(self) -> None:
        """Close the connection; what was sent last has a moment to leave."""
        self._socket.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Loop:
    """A role with its timers. Used by one thread; `send` must not wait."""

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
        """Begin."""
        self.act(self.role.start(time.monotonic()))

    def message(self, sender: Peer, message: Message) -> None:
        """A message has come.

        Raises:
            ControlError: It is none. Whatever else is raised is a mistake of the role's own.
        """
        self.act(self.role.on_message(time.monotonic(), sender, message))

    def hear(self, received: Iterable[tuple[Peer, Message]]) -> None:
        """Some time has passed, and maybe messages have come; what is none is dropped."""
        for sender, message in received:
            with contextlib.suppress(ControlError):
                self.message(sender, message)
        self.fire()

    def fire(self) -> None:
        """Call the role for the timers whose time has come."""
        now = time.monotonic()
        for name in [name for name, at in self._timers.items() if at <= now]:
            del self._timers[name]
            self.act(self.role.on_timer(now, name))

    def until_next(self, most: float) -> float:
        """Seconds until the next timer, at most some."""
        return max(0.0, min(min(self._timers.values(), default=float("inf")) - time.monotonic(), most))

    def act(self, effects: Effects) -> None:
        """Do what the role says."""
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
