"""The coordinator's socket, the loop that handles arriving messages, and the journal's file."""

import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import zmq

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.coordinator.coordinator import Coordinator
from cnnstrategies.paramserver.coordinator.journal import Journaled, JournalStore
from cnnstrategies.paramserver.coordinator.participant import COORDINATOR
from cnnstrategies.paramserver.coordinator.settings import CoordinatorSettings
from cnnstrategies.paramserver.coordinator.status import WATCHER
from cnnstrategies.paramserver.core.node import ControlError, End, Message, Peer
from cnnstrategies.paramserver.drivers.control import LARGEST_MESSAGE, Loop, encode, parse, parse_checked
from cnnstrategies.paramserver.drivers.sockets import allow_files, key_of, secure, take
from cnnstrategies.paramserver.security import Gatekeeper, KeyPair

BIND_SECONDS = 60.0  # seconds for which binding is retried while an earlier session's coordinator uses the endpoint
LONGEST_WAIT = 0.1  # longest time, in seconds, between two checks whether the parent process is alive
AT_ONCE = 200  # largest number of messages that are handled between two checks of the timers


class CoordinatorService:
    """Driver of the role :class:`~cnnstrategies.paramserver.coordinator.coordinator.Coordinator`, with a ROUTER socket.

    Args:
        settings: Settings of the coordinator, such as the numbers of workers and servers, time-outs and the endpoint.
        keys: The run's CURVE keys; only processes with these keys can register. None for no encryption.
        journal: Storage of the role's journal; None if a killed coordinator is not replaced.
        follows: Whether this coordinator replaces a killed coordinator, and continues its journal.

    Attributes:
        endpoint: Endpoint to which the socket is bound, with the actual port.
        dropped: Number of messages dropped because they were not valid.
        routes: By process: libzmq's id of the connection over which messages reach the process. The mapping contains
            all processes that have sent a valid message, except watchers.
        loop: Driver of the role's messages and timers.

    Raises:
        ConfigurationError: The limit on open files is too low for the number of connections.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        keys: KeyPair | None = None,
        journal: JournalStore | None = None,
        follows: bool = False,
    ) -> None:
        allow_files(2 * (settings.workers + settings.max_joiners + settings.servers), "the coordinator")
        self._keys = keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_MESSAGE)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        secure(self._socket, keys)
        # The gatekeeper admits every key, because each message contains a proof that its sender has the run's keys. A
        # gatekeeper is still needed, because libzmq reports a connection's key only if a gatekeeper has admitted it.
        self._gatekeeper = None if keys is None else Gatekeeper(self._context, lambda key: True)
        role = Coordinator(settings)
        self._bind(settings, BIND_SECONDS if settings.session or follows else 0.0)
        self.endpoint = str(self._socket.get_string(zmq.LAST_ENDPOINT))
        self.dropped = 0
        self._stopped = False
        self.routes: dict[Peer, bytes] = {}
        self._encoded: tuple[Message | None, bytes] = None, b""
        self.loop = Loop(role if journal is None else Journaled(role, journal, follows), self.send, on_end=self._end)
        self.loop.start()

    def _bind(self, settings: CoordinatorSettings, seconds: float) -> None:
        """Bind the socket to the endpoint. If the endpoint is in use, try again for `seconds` seconds.

        The coordinator of an earlier session may still use the endpoint. That coordinator closes its socket as soon as
        a worker of this session connects to the endpoint.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                if _is_listened_at(settings.endpoint):
                    # Without this check, libzmq would take the endpoint from the process that listens on it.
                    raise zmq.ZMQError(zmq.EADDRINUSE)
                self._socket.bind(settings.endpoint)
                return
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE or time.monotonic() > deadline:
                    raise
            time.sleep(LONGEST_WAIT)

    def run(self, orphaned: Callable[[], bool] = lambda: False) -> None:
        """Serve until the role ends.

        If the coordinator fails with an exception, it reports the exception to all processes that have sent a message,
        so that these processes end at once instead of after the time-out.

        Args:
            orphaned: Function that is called several times a second; serving also ends when it returns True.
        """
        try:
            self._serve(orphaned)
        except Exception as error:
            text = f"the coordinator failed: {type(error).__name__}: {error}"
            ended = Message("ended", {"message": text, "clean": False})
            for peer in self.routes:
                self.send(peer, ended)
            raise

    def _serve(self, orphaned: Callable[[], bool]) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        if self._gatekeeper is not None:
            poller.register(self._gatekeeper.socket, zmq.POLLIN)
        while not (self._stopped or orphaned()):
            ready = dict(poller.poll(int(1000 * self.loop.until_next(LONGEST_WAIT)) + 1))
            if self._gatekeeper is not None and self._gatekeeper.socket in ready:
                self._gatekeeper.answer()
            if self._socket in ready:
                for _ in range(AT_ONCE):
                    try:
                        self._handle(*take(self._socket, routed=True))
                    except zmq.Again:
                        break
            self.loop.fire()

    def _handle(self, route: bytes, frame: zmq.Frame) -> None:
        """Handle one message. Drop and count the message if it is not valid, or if its sender is not authenticated.

        Args:
            route: Route of the connection on which the message arrived.
            frame: Frame with the message.
        """
        try:
            if self._keys is None:
                sender, message = parse(frame.buffer)
            else:
                sender, message = parse_checked(frame.buffer, key_of(frame), self._keys)
            self.routes[sender] = route  # Replace the route, because the process may have connected again.
            try:
                self.loop.message(sender, message)
            finally:
                if sender.role == WATCHER:
                    del self.routes[sender]  # A watcher gets only this reply, so the route is not needed any longer.
        except ControlError:
            self.dropped += 1

    def send(self, peer: Peer, message: Message) -> None:
        """Send a message to a process. The message is dropped if the process has never sent a message."""
        route = self.routes.get(peer)
        if route is None:
            return
        if self._encoded[0] is not message:
            # Keep the encoded message: a view is sent to all processes, one after the other, and is encoded only once.
            self._encoded = message, encode(COORDINATOR, message)
        self._socket.send_multipart([route, self._encoded[1]], copy=False)

    def _end(self, end: End) -> None:
        self._stopped = True

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        if self._gatekeeper is not None:
            self._gatekeeper.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_listened_at(endpoint: str) -> bool:
    """Return whether a process listens on an ``ipc://`` endpoint. Return False for all other endpoints.

    The function tries to connect. The existence of the socket's file proves nothing, because a killed process leaves
    the file behind.
    """
    if not endpoint.startswith("ipc://"):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(endpoint.removeprefix("ipc://"))
        except OSError:
            return False
        return True


class JournalFile:
    """A :class:`~cnnstrategies.paramserver.coordinator.journal.JournalStore` in a file.

    If the file cannot be written, for example because the disk is full, the run continues without a journal: the file
    is removed, and a warning is printed to stderr. A killed coordinator cannot be replaced until :meth:`replace`
    succeeds.

    Args:
        path: Path of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1

    def create(self) -> None:
        """Create an empty file. The process that starts the coordinator calls this before the first start.

        A coordinator that is killed before it writes anything can then be replaced, and the file cannot be the journal
        of an earlier run at the same address.
        """
        self.replace(b"")
        self._close()

    def read(self) -> bytes:
        """Return the contents of the journal's file.

        Raises:
            ConfigurationError: The file was removed, because it could not be written.
        """
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            raise ConfigurationError(
                f"its journal {self._path} was removed, because it could not be written: free disk space, and resume "
                "the run from its last checkpoint"
            ) from None

    def append(self, record: bytes) -> None:
        """Append a record to the journal's file. Nothing happens if the file was removed after a failed write."""
        if self._file < 0:
            return
        try:
            _write(self._file, record)
        except OSError as error:
            self._remove(error)

    def replace(self, contents: bytes) -> None:
        """Replace the contents of the journal's file atomically: a new file is written completely, then renamed."""
        new = self._path.with_suffix(".new")
        self._close()
        try:
            self._file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            _write(self._file, contents)
            new.replace(self._path)
        except OSError as error:
            self._remove(error)

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _remove(self, error: OSError) -> None:
        self._close()
        self._path.unlink(missing_ok=True)
        text = f"the coordinator's journal {self._path} cannot be written ({error.strerror}): free disk space"
        print(f"{text}; otherwise the run ends if the coordinator is killed", file=sys.stderr, flush=True)


def _write(file: int, contents: bytes) -> None:
    rest = memoryview(contents)
    while rest:
        rest = rest[os.write(file, rest) :]
