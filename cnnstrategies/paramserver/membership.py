"""A process's membership in a run: heartbeats from a thread of its own, and the views that come back."""

import contextlib
import os
import queue
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import zmq

from cnnstrategies.paramserver.control import (
    LARGEST_MESSAGE,
    RECONNECT_MS,
    Buffer,
    ControlError,
    Message,
    parse,
    send,
    waiting,
)
from cnnstrategies.paramserver.security import KeyPair
from cnnstrategies.paramserver.view import RunEnded, View


@dataclass(frozen=True)
class Address:
    """Who a process is, and where its coordinator listens.

    Attributes:
        coordinator: The coordinator's endpoint.
        role: ``worker``, ``server`` or ``supervisor``.
        id: Its number among those of its role.
        incarnation: How many processes had its place before.
        heartbeat: Seconds between two heartbeats.
        timeout: Seconds of silence after which either side counts the other as dead.
        appear: Seconds in which the coordinator must have answered once.
        session: Which of the sessions that follow one another at this place. A coordinator hears those of its own.
        token: Secret of this process: once it has registered, nobody else speaks in its name.
    """

    coordinator: str
    role: str
    id: int
    incarnation: int = 0
    heartbeat: float = 0.5
    timeout: float = 10.0
    appear: float = 60.0
    session: int = 0
    token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)

    def fields(self) -> dict[str, object]:
        """What every message of this process says of its sender."""
        return {"role": self.role, "id": self.id, "incarnation": self.incarnation}

    def message(self, kind: str, fields: Mapping[str, object] | None = None, frames: Sequence[Buffer] = ()) -> Message:
        """A message to this session's coordinator."""
        said = {"session": self.session, "by": [self.role, self.id], "token": self.token}
        return Message(kind, {**said, **(fields or {})}, frames)

    def connect(self, context: "zmq.Context[zmq.Socket[bytes]]", keys: KeyPair | None) -> "zmq.Socket[bytes]":
        """A socket to the coordinator, with the run's keys if there are some."""
        connection = context.socket(zmq.DEALER)
        connection.setsockopt(zmq.LINGER, 200)
        connection.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        connection.setsockopt(zmq.MAXMSGSIZE, LARGEST_MESSAGE)
        connection.setsockopt(zmq.SNDHWM, 0)
        if keys is not None:
            # Whoever lacks the run's key file cannot even shake hands.
            connection.curve_serverkey = connection.curve_publickey = keys.public.encode()
            connection.curve_secretkey = keys.secret.encode()
        connection.connect(self.coordinator)
        return connection


class Views:
    """One user's view of the membership: a ``ViewSource``.

    Each user has its own, since to have returned a view once is to have told that user.

    Args:
        newest: The newest view, and how the run has ended if it has.
        on_news: Called when a view is returned for the first time.
    """

    def __init__(self, newest: Callable[[], tuple[View, RunEnded | None]], on_news: Callable[[], None]) -> None:
        self._newest = newest
        self._on_news = on_news
        self._readable, self._writable = os.pipe()
        os.set_blocking(self._readable, False)
        os.set_blocking(self._writable, False)
        self.seen = -1
        self.announce()

    def current(self) -> View:
        """The newest view; see :class:`~cnnstrategies.paramserver.view.ViewSource`."""
        _drain(self._readable)
        view, ended = self._newest()
        if ended is not None:
            self.announce()  # It stays readable: the next to wait must not sleep.
            raise RunEnded(str(ended), ended.clean)
        if view.number > self.seen:
            self.seen = view.number
            self._on_news()
        return view

    def wait_newer(self, number: int, timeout: float) -> View:
        """Wait for a view with a higher number; see :class:`~cnnstrategies.paramserver.view.ViewSource`.

        Raises:
            TimeoutError: None came.
        """
        deadline = time.monotonic() + timeout
        while (view := self.current()).number <= number:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no view newer than {number} within {timeout:g} s")
            waiting = select.poll()  # Unlike `select` it takes descriptors of any number.
            waiting.register(self._readable, select.POLLIN)
            waiting.poll(1000 * left)
        return view

    def fileno(self) -> int:
        """Readable when there is a view that :meth:`current` has not returned, or the run has ended."""
        return self._readable

    def announce(self) -> None:
        """Make the descriptor readable."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._writable, b"x")

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._readable)
        os.close(self._writable)


def _drain(descriptor: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while os.read(descriptor, 4096):
            pass


class Membership:
    """Registers this process, sends heartbeats and keeps the newest view: a ``ViewSource``.

    The thread has its own socket, so a long computation or a blocked step is not taken for a death; a stopped or
    killed process is.

    Args:
        address: Who this process is, and where the coordinator is.
        endpoint: Where this process can be reached, for servers.
        public_key: Its own CURVE key, which the views tell the others; empty without encryption.
        keys: The run's CURVE keys, which every process of it has.
    """

    def __init__(self, address: Address, endpoint: str = "", public_key: str = "", keys: KeyPair | None = None) -> None:
        self.address = address
        self._keys = keys
        self._hello = address.message(
            "hello",
            {
                **address.fields(),
                "process": os.getpid(),
                "host": socket.gethostname(),
                "endpoint": endpoint,
                "public_key": public_key,
            },
        )
        self._lock = threading.Lock()
        self._view: View | None = None
        self._ended: RunEnded | None = None
        self._requests: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._notices: dict[str, int] = {}
        self._announced: dict[str, int] = {}
        self._ending: Message | None = None
        self._closing = False
        self._left = False
        self._closed = False
        self._wake_in, self._wake_out = os.pipe()
        for descriptor in (self._wake_in, self._wake_out):
            os.set_blocking(descriptor, False)
        self._views = Views(self._newest, self._wake)
        self._sources: list[Views] = []
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)
        self._thread.start()

    # Views

    def source(self) -> Views:
        """Views for another user than the collectives: a worker or a server of the data plane.

        From then on it is this user that must have seen a view before the coordinator counts it as seen.
        """
        with self._lock:
            self._sources.append(Views(self._newest, self._wake))
            return self._sources[-1]

    def current(self) -> View:
        """The newest view; see :class:`~cnnstrategies.paramserver.view.ViewSource`."""
        return self._views.current()

    def wait_newer(self, number: int, timeout: float) -> View:
        """Wait for a view with a higher number; see :class:`~cnnstrategies.paramserver.view.ViewSource`.

        Raises:
            TimeoutError: None came.
        """
        return self._views.wait_newer(number, timeout)

    def fileno(self) -> int:
        """Readable when there is a view that :meth:`current` has not returned, or the run has ended."""
        return self._views.fileno()

    def _newest(self) -> tuple[View, RunEnded | None]:
        with self._lock:
            return self._view if self._view is not None else View(-1, (), ()), self._ended

    @property
    def _seen(self) -> int:
        return max(0, min(views.seen for views in self._sources or [self._views]))

    # The run

    def wait_registered(self) -> None:
        """Wait until the coordinator knows this process.

        Raises:
            RunEnded: It does not answer, or expects no such process.
        """
        self.wait_newer(-1, self.address.appear + self.address.timeout)

    def end(self, message: str, clean: bool = False) -> None:
        """Have every process of the run end, with a message."""
        self._ending = self.address.message("end", {"message": message, "clean": clean})
        self._wake()

    def announce(self, name: str, value: int) -> None:
        """Tell every process of the run a number, without waiting for any."""
        self._announced[name] = value  # Every sign of life repeats it.
        self._requests.put(self.address.message("notice", {"name": name, "value": value}))
        self._wake()

    def announced(self, name: str) -> int | None:
        """The number that some process has told under a name, if any has."""
        return self._notices.get(name)

    def close(self, leave: bool = True) -> None:
        """Stop the thread; with ``leave`` the coordinator is told that this process goes on purpose."""
        if self._closed:
            return
        self._closed = True
        self._closing = leave
        self._left = not leave
        self._wake()
        self._thread.join(self.address.timeout + 1.0)
        if not self._thread.is_alive():
            for views in (self._views, *self._sources):
                views.close()
            os.close(self._wake_in)
            os.close(self._wake_out)

    # The thread

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        connection = self.address.connect(context, self._keys)
        try:
            self._serve(connection)
        except Exception as error:  # The main thread must hear of it, whatever it is.
            self._set_ended(f"the heartbeat thread failed: {type(error).__name__}: {error}", clean=False)
        finally:
            connection.close()
            context.term()

    def _serve(self, connection: "zmq.Socket[bytes]") -> None:
        address = self.address
        poller = zmq.Poller()
        poller.register(connection, zmq.POLLIN)
        poller.register(self._wake_in, zmq.POLLIN)
        heard = time.monotonic()
        beat_at = heard
        asked_to_leave = False
        left_at = heard
        running = heard
        while not self._left:
            now = time.monotonic()
            if now - running > 1.0:
                heard += now - running  # This process was stopped, not the coordinator silent.
            running = now
            patience = address.timeout if self._view is not None else address.appear
            if now - heard > patience and self._ended is None and not asked_to_leave:
                self._set_ended(
                    f"the coordinator at {address.coordinator} was silent for {patience:g} s: it died, or the "
                    "connection to it is cut",
                    clean=False,
                )
            if now >= beat_at:
                # What is said once may be lost: each beat says it again until it is heard.
                beat_at = now + address.heartbeat
                if not asked_to_leave:
                    send(connection, self._beat())
                if self._ending is not None and self._ended is None:
                    send(connection, self._ending)
                if self._closing:
                    send(connection, address.message("leave", address.fields()))
                    left_at = left_at if asked_to_leave else now
                    asked_to_leave = True
            while not self._requests.empty():
                send(connection, self._requests.get())
            if asked_to_leave and now - left_at > (address.timeout if self._ended is None else address.heartbeat):
                return
            ready = dict(poller.poll(int(max(0.0, min(beat_at - now, 0.5)) * 1000)))
            if self._wake_in in ready:
                _drain(self._wake_in)
                beat_at = 0.0
            while waiting(connection):
                heard = time.monotonic()
                try:
                    message = parse(connection.recv_multipart(), routed=False)
                    if message.kind == "left":
                        return
                    self._take(message)
                except ControlError:
                    continue

    def _beat(self) -> Message:
        here = self._newest()[0].number
        if here < 0:
            # Until it is answered: what listens there may be the coordinator of the session before, which does not.
            return self._hello
        fields = {**self.address.fields(), "here": here, "seen": self._seen, "notices": self._announced}
        return self.address.message("beat", fields)

    def _take(self, message: Message) -> None:
        if message.kind == "ended":
            self._set_ended(message.string("message"), message.flag("clean"))
        elif message.kind == "notice":
            self._notices[message.string("name")] = message.integer("value")
        elif message.kind == "pong":
            self._notices |= message.fields.get("notices", {})
        elif message.kind == "view":
            try:
                view = View.from_dict(message.fields["view"])
            except (TypeError, KeyError, ValueError) as error:
                raise ControlError(f"view: {error}") from error
            with self._lock:
                if self._view is None or view.number > self._view.number:
                    self._view = view
                    for views in (self._views, *self._sources):
                        views.announce()

    def _set_ended(self, text: str, clean: bool) -> None:
        with self._lock:
            if self._ended is None:
                self._ended = RunEnded(text, clean)
                for views in (self._views, *self._sources):
                    views.announce()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_out, b"x")
