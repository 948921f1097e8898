"""The control plane's roles in a process, and their messages on the wire: few, small, JSON with buffers, checked.

A message is one frame: a tag with the version, the length of a JSON array, the array, and the buffers one after the
other. The array has the kind, the sender, the request, the buffers' lengths and the fields. Whatever does not fit is
dropped by the receiver.

Every process of a run has the run's key, so it proves only that who has it may take part. Under it a process registers
a key of its own, and then speaks with that alone: what a member says is believed because nobody else has its key.
"""

import itertools
import json
import struct
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import zmq

from cnnstrategies.paramserver.coordinator.settings import SECRET_BITS, Address
from cnnstrategies.paramserver.coordinator.window import WATCHER
from cnnstrategies.paramserver.core.node import (
    LARGEST,
    Call,
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
from cnnstrategies.paramserver.security import KeyPair, fingerprint

TAG = b"CNNPS3"
MAX_HEADER = 1 << 20
LARGEST_MESSAGE = 1 << 30  # bytes; libzmq drops a connection that announces more before it allocates anything
RECONNECT_MS = 20
ROLES = ("worker", "server", "supervision", "coordinator", "watcher")
_START = struct.Struct(f"<{len(TAG)}sI")


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
    sockets.notice_silence(connection, address.timeout)
    if run is not None:
        sockets.secure(connection, keys, run.public)
    connection.connect(address.coordinator)
    return connection


def encode(sender: Peer, message: Message) -> bytes:
    """A message as a frame."""
    about = [message.kind, sender, message.request, [len(buffer) for buffer in message.frames], message.fields]
    text = json.dumps(about, separators=(",", ":")).encode()
    return b"".join([_START.pack(TAG, len(text)), text, *message.frames])


def send(socket: "zmq.Socket[bytes]", sender: Peer, message: Message) -> None:
    """Send a message to the one peer of a socket."""
    sockets.send(socket, encode(sender, message))


class Arrived(NamedTuple):
    """What has come, not checked yet.

    Attributes:
        route: Of its connection, at a ROUTER.
        frame: What should be a message.
        key: The public key of its connection, where it has one.
    """

    route: bytes
    frame: memoryview
    key: str = ""


def receive(socket: "zmq.Socket[bytes]", routed: bool = False, encrypted: bool = False) -> Arrived:
    """What waits; see :func:`~cnnstrategies.paramserver.drivers.sockets.take` for the arguments and errors."""
    route, frame = sockets.take(socket, routed)
    return Arrived(route, frame.buffer, str(frame.get("User-Id")) if encrypted else "")


def parse(frame: bytes | memoryview) -> tuple[Peer, Message]:
    """The sender and the message in a frame."""
    if len(frame) < _START.size:
        raise ControlError("no message")
    tag, length = _START.unpack_from(frame)
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
    if type(request) is not int or not 0 <= request < LARGEST:
        raise ControlError(f"{kind}: request={request!r} is not a number")
    if not isinstance(sizes, list) or any(type(size) is not int or size < 0 for size in sizes):
        raise ControlError(f"{kind}: buffers without lengths")
    *starts, end = itertools.accumulate(sizes, initial=length)
    if end != len(rest):
        raise ControlError(f"{kind}: buffers of other lengths")
    buffers = [bytes(rest[start : start + size]) for start, size in zip(starts, sizes, strict=True)]
    return Peer(*sender), Message(kind, fields, buffers, request)


REGISTER, REGISTERED = "register", "registered"
DESK = Peer("coordinator", 0)  # Who answers.
MOST_KEYS = 1 << 16  # that are known at a time
MEMBERS = frozenset(ROLES) - {"coordinator", WATCHER}


class Bindings:
    """Whose keys are known at the coordinator.

    Args:
        run: The run's public key.
        members: Those whose keys are never forgotten.
        most: How many keys are known at a time.

    Attributes:
        bound: Whose each key is, the last registered last.
    """

    def __init__(self, run: str, members: Callable[[], set[Peer]], most: int = MOST_KEYS) -> None:
        self._run = run
        self._members = members
        self._most = most
        self.bound: OrderedDict[str, Peer] = OrderedDict()

    def admits(self, key: str) -> bool:
        """Whether who has a key may connect."""
        return key == self._run or key in self.bound

    def check(self, key: str, sender: Peer, message: Message) -> None:
        """Look whether a message comes from whom it says."""
        if message.kind == REGISTER:
            self._register(key, sender, message.string("public_key"))
        elif sender.role == WATCHER:
            if key != self._run:
                raise ControlError("who only watches has the run's key")
        elif self.bound.get(key) != sender:
            raise ControlError(f"{message.kind}: a key that is not its sender's")
        elif message.fields.get("public_key", key) != key:
            raise ControlError(f"{message.kind}: another one's key")

    def _register(self, key: str, sender: Peer, own: str) -> None:
        if key != self._run or sender.role not in MEMBERS or not own.isascii() or sender.process != fingerprint(own):
            raise ControlError("a key is registered in another one's name")
        if self.bound.setdefault(own, sender) != sender:
            raise ControlError("a key is one member's, for one life")
        self.bound.move_to_end(own)
        if len(self.bound) > self._most:
            members = self._members()
            del self.bound[next(key for key, peer in self.bound.items() if peer not in members)]


class Loop:
    """A role with its timers. Used by one thread.

    Args:
        role: What is run.
        send: Sends a message to a peer; must not wait.
        on_return: Takes the result of a call.
        on_end: Hears of the role's end.

    Attributes:
        role: What is run.
        send: Sends a message to a peer.
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
        """Begin."""
        self._act(self.role.start(time.monotonic()))

    def message(self, sender: Peer, message: Message) -> None:
        """A message has come.

        Raises:
            ControlError: It is none. Whatever else is raised is a mistake of the role's own.
        """
        self._act(self.role.on_message(time.monotonic(), sender, message))

    def call(self, call: Call) -> None:
        """This process asks for something."""
        self._act(self.role.on_call(time.monotonic(), call))

    def fire(self) -> None:
        """Call the role for the timers whose time has come."""
        now = time.monotonic()
        for name in [name for name, at in self._timers.items() if at <= now]:
            del self._timers[name]
            self._act(self.role.on_timer(now, name))

    def until_next(self, most: float) -> float:
        """Seconds until the next timer, at most some."""
        return max(0.0, min(min(self._timers.values(), default=float("inf")) - time.monotonic(), most))

    def _act(self, effects: Effects) -> None:
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
