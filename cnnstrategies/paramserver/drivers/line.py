"""A process's connection to the coordinator, with its own key once that is registered; and that of who only looks."""

import contextlib
import math
import secrets
import time
from collections import deque
from collections.abc import Iterator
from typing import Self

import zmq

from cnnstrategies.paramserver.coordinator.settings import SECRET_BITS, Address
from cnnstrategies.paramserver.coordinator.window import PLACE, WATCH, WATCHER
from cnnstrategies.paramserver.core.node import ControlError, Message, Peer
from cnnstrategies.paramserver.core.requests import DONE
from cnnstrategies.paramserver.drivers.control import REGISTER, REGISTERED, connect, parse, receive, send
from cnnstrategies.paramserver.drivers.sockets import DRAIN_MS, KNOCK_MS, reconnect
from cnnstrategies.paramserver.security import KeyPair

UNHEARD = 2.0  # heartbeats without an answer, before the own key is registered again
MOST_WAITING = 1 << 10  # messages


class Line:
    """Sends to the coordinator and receives from it. Used by one thread."""

    def __init__(self, address: Address, peer: Peer, own: KeyPair | None, run: KeyPair | None) -> None:
        self._address = address
        self._peer = peer
        self._own = own
        self._run = run
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._waiting: deque[Message] = deque(maxlen=MOST_WAITING)
        self._heard = self._registered = self._opened = -math.inf
        self._desk = None if run is None else connect(address, self._context, run, run)
        self._socket = connect(address, self._context, None, None) if run is None else None

    def send(self, message: Message) -> None:
        """Send a message, as soon as this process is registered."""
        if self._socket is not None:
            send(self._socket, self._peer, message)
        else:
            self._waiting.append(message)

    def receive(self, seconds: float, wake: int | None = None) -> Iterator[tuple[Peer, Message]]:
        """Wait for messages; what is none is dropped.

        Args:
            seconds: How long for the first.
            wake: A file descriptor that ends the wait when it is readable.
        """
        self._register()
        poller = zmq.Poller()
        for one in (self._socket, self._desk, wake):
            if one is not None:
                poller.register(one, zmq.POLLIN)
        poller.poll(int(1000 * seconds) + 1)
        if self._desk is not None and self._read(self._desk, REGISTERED) and self._heard < self._registered:
            self.open(time.monotonic())
        if self._socket is not None and (messages := self._read(self._socket)):
            self._heard = time.monotonic()
            yield from messages

    def cut(self) -> None:
        """Make the connection anew: what is on its way is lost."""
        assert self._socket is not None, "this process is not registered yet"
        reconnect(self._socket)

    def drain(self) -> None:
        """Wait until all that was sent has left, and send no more."""
        self._context.destroy(DRAIN_MS)

    def close(self) -> None:
        """Close the sockets; what was sent last has a moment to leave."""
        for socket in (self._socket, self._desk):
            if socket is not None:
                socket.close()
        self._context.term()

    def _register(self) -> None:
        """Register the own key; again after a silence, for the coordinator may be another process now."""
        now = time.monotonic()
        silent = now - max(self._heard, self._registered) > UNHEARD * self._address.heartbeat
        if self._desk is not None and self._own is not None and silent:
            self._registered = now
            about = {"session": self._address.session, "public_key": self._own.public}
            send(self._desk, self._peer, Message(REGISTER, about))

    def open(self, now: float) -> None:
        """Connect with the own key; for one that was refused would not knock again at once.

        What was begun just now is left alone: over a slow connection it takes longer than a few heartbeats.
        """
        if now - self._opened < KNOCK_MS / 1000:
            return
        self._opened = now
        if self._socket is not None:
            self._socket.close(0)
        self._socket = connect(self._address, self._context, self._own, self._run)
        while self._waiting:
            send(self._socket, self._peer, self._waiting.popleft())

    @staticmethod
    def _read(socket: "zmq.Socket[bytes]", kind: str | None = None) -> list[tuple[Peer, Message]]:
        found = []
        while socket.poll(0):
            with contextlib.suppress(ControlError):
                sender, message = parse(receive(socket).frame)
                if kind in (None, message.kind):
                    found.append((sender, message))
        return found


class Watcher:
    """A connection to a coordinator, for questions."""

    def __init__(self, coordinator: str, keys: KeyPair | None = None) -> None:
        self._address = Address(coordinator, WATCHER, 0)
        self._keys = keys
        self._peer = Peer(WATCHER, 0, 0, secrets.randbits(SECRET_BITS))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._asked = 0

    def ask(self, seconds: float) -> Message | None:
        """How the run goes; see :class:`~cnnstrategies.paramserver.coordinator.window.Window`.

        Args:
            seconds: To wait for an answer.

        Returns:
            The answer; None if none came.
        """
        return self._ask(WATCH, seconds)

    def place(self, seconds: float) -> Message | None:
        """A place in the run for a worker that joins it; see :meth:`ask`."""
        return self._ask(PLACE, seconds)

    def _ask(self, kind: str, seconds: float) -> Message | None:
        if self._socket is None:
            self._socket = connect(self._address, self._context, self._keys, self._keys)
        self._asked += 1
        send(self._socket, self._peer, Message(kind, request=self._asked))
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if not self._socket.poll(int(1000 * left) + 1):
                continue
            with contextlib.suppress(ControlError):
                _, answer = parse(receive(self._socket).frame)
                if answer.kind == DONE and answer.request == self._asked:
                    return answer
        self._socket.close(0)  # What was not delivered must not reach a coordinator that comes later.
        self._socket = None
        return None

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close(0)
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
