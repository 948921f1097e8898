"""A server's sockets and main loop, and the check of the keys with which processes connect."""

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable

import zmq

from cnnstrategies.paramserver.core.node import End
from cnnstrategies.paramserver.core.view import RunEnded, ServerInfo, View, ViewSource
from cnnstrategies.paramserver.drivers.sockets import (
    IO_THREADS,
    Bundle,
    Context,
    Inbox,
    Listener,
    Received,
    Socket,
    allow_files,
    client_socket,
    largest_frame,
    server_socket,
)
from cnnstrategies.paramserver.messages import (
    HEADER_BYTES,
    LARGEST_JSON,
    SERVER,
    Bounds,
    Effects,
    InvalidMessageError,
    Parcel,
    unpack,
)
from cnnstrategies.paramserver.security import Gatekeeper, KeyPair
from cnnstrategies.paramserver.server.senders import PING_SECONDS
from cnnstrategies.paramserver.server.server import Server
from cnnstrategies.paramserver.server.store import Store
from cnnstrategies.paramserver.slicing import cut, largest_payload
from cnnstrategies.paramserver.specification import Specification
from cnnstrategies.runtime.allocation import keep_freed_memory

_LOG = logging.getLogger(__name__)
MESSAGES_AT_ONCE = 32  # largest number of messages handled in a row before the loop checks for new views and updates
WORK_SECONDS = 0.002  # longest time, in seconds, to work on updates of slices before messages are read again


class ServerService:
    """Driver of the role :class:`~cnnstrategies.paramserver.server.server.Server`, with a ROUTER socket.

    The service is single-threaded, except for libzmq's threads, which send and receive bytes. Run it in a process of
    its own.

    Args:
        specification: The run's specification, the same in all processes.
        views: Source of the membership's views. The server begins to serve with the first view that contains it.
        id: This server's id, from 0 to `specification.servers` - 1.
        endpoint: Endpoint to bind: ``ipc://path`` or ``tcp://address:port``, with ``*`` as the port for any free port.
            Pass a :class:`~cnnstrategies.paramserver.drivers.sockets.Listener` instead if the endpoint must be bound
            before the specification is known, or is used again. The caller then closes the listener.
        keys: CURVE keys; None for no encryption.
        insecure: Whether an endpoint with TCP may be used without encryption.

    Attributes:
        role: The server's state machine.
        bounds: Limits of the messages that the server accepts.
        is_outdated: Whether :meth:`run` has returned because another specification has replaced this one.
        endpoint: Endpoint to which the socket is bound, with the actual port. The caller can register this endpoint
            with the coordinator before it calls :meth:`run`.

    Raises:
        ConfigurationError: The endpoint uses TCP without encryption, although `insecure` is false; or the limit on open
            files is too low for the number of connections.
    """

    def __init__(
        self,
        specification: Specification,
        views: ViewSource,
        id: int,
        endpoint: str | Listener = "tcp://127.0.0.1:*",
        keys: KeyPair | None = None,
        insecure: bool = False,
    ) -> None:
        keep_freed_memory()
        allow_files(2 * specification.most_workers + 4 * specification.servers, f"server {id}")
        encrypted = keys is not None
        self.is_outdated = False
        self._owns_listener = isinstance(endpoint, str)
        self._listener = Listener(endpoint, encrypted, insecure) if isinstance(endpoint, str) else endpoint
        self.endpoint = self._listener.endpoint
        self._specification = specification
        self._views = views
        self._keys = keys
        slices = cut(specification)
        self.bounds = Bounds(max(largest_payload(slices), 4 * len(slices)) + LARGEST_JSON, len(slices))
        self._largest = largest_frame(self.bounds.payload)
        self._context: Context = zmq.Context(io_threads=IO_THREADS)
        self._gatekeeper = Gatekeeper(self._context, self._admitted) if encrypted else None
        self._router = server_socket(self._context, self._listener, keys, self._largest)
        self._inbox = Inbox(self._router, specification.session, routed=True, encrypted=encrypted)
        self._dealers: dict[int, tuple[ServerInfo, Socket]] = {}
        self._bundles: dict[int | bytes, Bundle] = {}
        store = Store(specification, [slice_ for slice_ in slices if id in slice_.servers])
        self.role = Server(specification, id, store, encrypted)
        self._sent = self._received = 0  # number of bytes that the server has sent, and that it has received
        self._stopping = threading.Event()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def run(self, move: Callable[[], None] = lambda: None) -> None:
        """Serve until :meth:`stop` is called, or until another specification replaces the specification.

        Args:
            move: Function that is called in each round of the main loop.

        Raises:
            RunEnded: The run has ended or failed, or a new view no longer contains this server.
        """
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        if self._gatekeeper is not None:
            poller.register(self._gatekeeper.socket, zmq.POLLIN)
        descriptor, role = self._views.fileno(), self.role
        poller.register(descriptor, zmq.POLLIN)
        try:
            self._follow(self._views.current())  # The source may have told an earlier service of the newest view.
            while not self._stopping.is_set():
                move()
                ready = dict(poller.poll(0 if role.busy else int(1000 * PING_SECONDS)))
                # Handle new views before messages, because a message is dropped if its sender is not in the current
                # view.
                if descriptor in ready:
                    self._follow(self._views.current())
                if self._gatekeeper is not None and self._gatekeeper.socket in ready:
                    self._gatekeeper.answer()
                if self._router in ready:
                    self._receive_waiting()
                    self.act(role.flush())
                now = time.monotonic()
                self.act(role.on_time(now))
                until = now + WORK_SECONDS
                while role.busy and time.monotonic() < until:
                    self.act(role.work())
                for bundle in self._bundles.values():
                    bundle.flush()
        finally:
            self._close()

    def stop(self) -> None:
        """Make :meth:`run` return soon. This method may be called from a signal handler or another thread."""
        self._stopping.set()
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def figures(self) -> dict[str, float]:
        """Return the server's counters by the names that the coordinator uses: steps, and bytes sent and received.

        Any thread may call this method.
        """
        return {"step": self.role.mode.finished, "sent": self._sent, "received": self._received}

    def _close(self) -> None:
        for _, dealer in self._dealers.values():
            dealer.close()
        self._router.close()
        if self._gatekeeper is not None:
            self._gatekeeper.close()
        self._context.term()
        os.close(self._wake)
        if self._owns_listener:
            self._listener.close()

    # Membership

    def _admitted(self, key: str) -> bool:
        """Return whether a connection's public key belongs to a member of the newest view.

        The newest view is fetched for each connection, so that a new member can connect before the main loop handles
        the view.
        """
        self._follow(self._views.current())
        return self.role.admits(key)

    def _follow(self, view: View) -> None:
        if view.number <= self.role.view.number:
            return
        if view.specification > self._specification.number:
            self.is_outdated = True
            self._stopping.set()
            return
        effects = self.role.follow(time.monotonic(), view)
        self._connect()
        self.act(effects)

    def _connect(self) -> None:
        """Connect to the other servers of the current view. Disconnect from servers that are gone or were replaced."""
        infos = {server.id: server for server in self.role.view.servers if server.id != self.role.id}
        for server, (info, dealer) in list(self._dealers.items()):
            if infos.get(server) != info:
                dealer.close(linger=0)
                del self._dealers[server], self._bundles[server]
        for server, info in infos.items():
            if server not in self._dealers:
                dealer = client_socket(self._context, info, self._keys, self._largest, self._specification.timeout)
                self._dealers[server] = info, dealer
                self._bundles[server] = Bundle(dealer)

    # Messages

    def _receive_waiting(self) -> None:
        handled = 0
        while handled < MESSAGES_AT_ONCE:
            try:
                messages = self._inbox.receive()
            except zmq.Again:
                return
            handled += max(1, len(messages))
            for received in messages:
                self._handle(received)

    def _handle(self, received: Received) -> None:
        if self.is_outdated:
            return
        try:
            self._received += HEADER_BYTES + len(received.payload)
            header = unpack(received.header, len(received.payload), self._specification.session, self.bounds)
        except InvalidMessageError as error:
            self.role.drop(str(error))
            return
        if header.sender >= SERVER and header.incarnation > self.role.view.number:
            self._follow(self._views.current())
        effects = self.role.on_message(time.monotonic(), received.route, received.user, header, received.payload)
        if effects:
            self.act(effects)

    def act(self, effects: Effects) -> None:
        """Carry out effects that the role has returned. Only the thread that runs the service may call this method."""
        for effect in effects:
            if isinstance(effect, Parcel):
                to, header, payload, wait = effect
                bundle = self._bundles.get(to) or self._bundle_for(to)
                bundle.send(header, payload, wait)
                self._sent += HEADER_BYTES + len(payload)
            elif isinstance(effect, End):
                raise RunEnded(effect.reason, effect.clean)
            elif effect.urgent:
                print(effect.text, file=sys.stderr, flush=True)
            else:
                _LOG.warning("%s", effect.text)

    def _bundle_for(self, to: int | bytes) -> Bundle:
        """Create the sender of messages for a worker's new connection. Remove the senders of unused connections."""
        assert isinstance(to, bytes), "all servers of the view are connected"
        routes = set(self.role.routes.values())
        self._bundles = {
            known: bundle for known, bundle in self._bundles.items() if isinstance(known, int) or known in routes
        }
        bundle = self._bundles[to] = Bundle(self._router, to)
        return bundle
