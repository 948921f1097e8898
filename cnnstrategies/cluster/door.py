"""Sockets of the handshake between the ranks of a run: rank 0's door, and the knocking of the other ranks."""

import contextlib
import errno
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from cnnstrategies.cluster.handshake import (
    Door,
    Knock,
    Proof,
    RankCredentials,
    Refusal,
    Visit,
    WrongBytesError,
    read,
    write,
)
from cnnstrategies.cluster.search import Answer, Failed

HANDSHAKE_SECONDS = 5.0  # Time within which a process must complete the handshake.
ANSWER_SECONDS = 3.0  # Time within which a door must answer. Afterwards the rank tries again.
CONNECT_SECONDS = 10.0  # Time-out of a connection.
MOST_STRANGERS = 512  # Largest number of simultaneous connections whose handshake is not complete.
CHUNK = 8192
# Seconds until the loss of a rank's host is noticed: two probes at this interval after this silence.
KEEP_ALIVE = 5


@dataclass
class _Guest:
    """A connection to the door."""

    connection: socket.socket
    visit: Visit
    deadline: float
    received: bytearray = field(default_factory=bytearray)


class OpenDoor:
    """Thread that answers the processes that knock. It ends with its process, or after :meth:`close`.

    A process that connects and sends nothing delays nobody: the thread never waits for a single connection.

    Args:
        listener: Listening socket, which then belongs to this object.
        door: Decides which processes are let in.
    """

    def __init__(self, listener: socket.socket, door: Door) -> None:
        self.port = int(listener.getsockname()[1])
        self._listener = listener
        self._door = door
        self._guests: dict[socket.socket, _Guest] = {}
        # Guests whose handshake is not complete, in the order of their deadlines. The keys are their connections.
        self._waiting: dict[socket.socket, _Guest] = {}
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        for file in (listener, self._woken):
            file.setblocking(False)
            self._selector.register(file, selectors.EVENT_READ)
        _open.add(self)
        self._thread = threading.Thread(target=self._run, name="door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the door and all connections."""
        if self._thread.is_alive():
            self._wake.send(b"x")
            self._thread.join()
        self.forget()

    def forget(self) -> None:
        """Close this process's copies of all sockets."""
        for file in (self._listener, self._wake, self._woken, *self._guests):
            file.close()
        self._selector.close()

    def _run(self) -> None:
        while True:
            first = next(iter(self._waiting.values()), None)
            timeout = None if first is None else max(0.0, first.deadline - time.monotonic())
            for key, _ in self._selector.select(timeout):
                if key.fileobj is self._woken:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._guests:
                    self._serve(self._guests[key.fileobj])
            while (first := next(iter(self._waiting.values()), None)) and first.deadline <= time.monotonic():
                self._remove(first)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(0.1)  # The process has no free file descriptor now, and the connection stays in the queue.
            return
        connection.setblocking(False)
        _keep_alive(connection)
        if len(self._waiting) >= MOST_STRANGERS:
            self._remove(next(iter(self._waiting.values())))
        guest = _Guest(connection, Visit(self._door, secrets.token_hex(16)), time.monotonic() + HANDSHAKE_SECONDS)
        self._guests[connection] = self._waiting[connection] = guest
        self._selector.register(connection, selectors.EVENT_READ)

    def _serve(self, guest: _Guest) -> None:
        try:
            data = guest.connection.recv(CHUNK)
            guest.received += data
            if not data:
                raise WrongBytesError("the process has closed the connection")
            while (message := read(guest.received)) is not None:
                answer = guest.visit.receive(message)
                # A message is shorter than the free space in the buffer of a new connection, so that this never waits.
                guest.connection.send(write(answer))
                if isinstance(answer, Refusal):
                    raise WrongBytesError("the process is refused")
                if guest.visit.rank is not None:
                    self._waiting.pop(guest.connection, None)
            if self._door.complete:
                # The connections were only needed to notice that a rank has ended before the run has begun.
                for entered in [other for other in self._guests.values() if other.visit.rank is not None]:
                    self._remove(entered)
        except BlockingIOError:
            return
        except (OSError, WrongBytesError):
            self._remove(guest)

    def _remove(self, guest: _Guest) -> None:
        self._waiting.pop(guest.connection, None)
        if self._guests.pop(guest.connection, None) is not None:
            self._selector.unregister(guest.connection)
            guest.visit.end()
            guest.connection.close()


_open: "weakref.WeakSet[OpenDoor]" = weakref.WeakSet()  # Doors of this process.
_entered: list[socket.socket] = []  # Connections by which doors notice that this process has ended.


def _forget_all() -> None:
    """Close the sockets in a process that was forked from this process.

    A process that loads data may live longer than this process, whose port must be free when it ends.
    """
    for door in list(_open):
        door.forget()
    for connection in _entered:
        connection.close()
    _entered.clear()


os.register_at_fork(after_in_child=_forget_all)


def listen(address: str, ports: Sequence[int]) -> socket.socket | None:
    """Return a socket that listens at the first free port. Return None if no port is free.

    Args:
        address: IP address at which to listen. Port 0 in `ports` is any free port.
        ports: The ports, the preferred port first.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in ports:
        with contextlib.suppress(OSError):
            return socket.create_server((address, port), family=family, backlog=1024)
    return None


@dataclass
class _Attempt:
    """A connection to a port at which a door may be."""

    connection: socket.socket
    knock: Knock
    port: int
    deadline: float
    connected: bool = False
    received: bytearray = field(default_factory=bytearray)


def knock(address: str, ports: Sequence[int], rank: RankCredentials, seconds: float) -> dict[int, Answer]:
    """Knock at several ports at the same time, and return the answers. The keys are ports.

    If rank 0 of the rank's own run answers, the function returns at once. The connection to it then stays open until
    this process ends.

    Args:
        address: IP address of rank 0's host.
        ports: The ports.
        rank: This process.
        seconds: Longest time to wait for a connection.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    answers: dict[int, Answer] = {}
    connect_seconds = min(seconds, CONNECT_SECONDS)
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as at_end:
        for port in ports:
            connection = at_end.enter_context(socket.socket(family, socket.SOCK_STREAM))
            connection.setblocking(False)
            code = connection.connect_ex((address, port))
            if code not in (0, errno.EINPROGRESS):
                answers[port] = _failed(code)
                continue
            attempt = _Attempt(connection, Knock(rank, secrets.token_hex(16)), port, time.monotonic() + connect_seconds)
            selector.register(connection, selectors.EVENT_WRITE, attempt)
        while selector.get_map():
            now = time.monotonic()
            attempts: list[_Attempt] = [key.data for key in selector.get_map().values()]
            ready = selector.select(max(0.0, min(attempt.deadline for attempt in attempts) - now))
            for key, _ in ready:
                answer = _go_on(key.data, partial(selector.modify, key.fileobj, selectors.EVENT_READ, key.data))
                if answer is not None:
                    selector.unregister(key.fileobj)
                    answers[key.data.port] = answer
                if isinstance(answer, int):
                    _entered.append(_kept(key.data.connection))
                    return answers
            now = time.monotonic()
            for attempt in attempts:
                if attempt.deadline <= now and attempt.port not in answers:
                    selector.unregister(attempt.connection)
                    answers[attempt.port] = Failed("mute" if attempt.connected else "silent")
    return {port: answers[port] for port in ports}


def _go_on(attempt: _Attempt, wait_for_data: Callable[[], object]) -> Answer | None:
    """Make the next step of a handshake. Return its result, or None if the handshake is not complete yet."""
    connection = attempt.connection
    try:
        if not attempt.connected:
            if code := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                return _failed(code)
            attempt.connected, attempt.deadline = True, time.monotonic() + ANSWER_SECONDS
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.send(write(attempt.knock.hello()))
            wait_for_data()
            return None
        data = connection.recv(CHUNK)
        attempt.received += data
        while (message := read(attempt.received)) is not None:
            step = attempt.knock.receive(message)
            if not isinstance(step, Proof):
                return step
            connection.send(write(step))
        return None if data else Failed("mute")
    except BlockingIOError:
        return None
    except (OSError, WrongBytesError):
        return Failed("mute")


def _failed(code: int) -> Failed:
    if code == errno.ECONNREFUSED:
        return Failed("absent")
    return Failed("silent") if code == errno.ETIMEDOUT else Failed("other", os.strerror(code))


def _kept(connection: socket.socket) -> socket.socket:
    """Return a copy of a connected socket, which stays open when the original object is closed."""
    kept = connection.dup()
    _keep_alive(kept)
    return kept


def _keep_alive(connection: socket.socket) -> None:
    with contextlib.suppress(OSError, AttributeError):  # Some systems do not have all options.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_ALIVE)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEP_ALIVE)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
