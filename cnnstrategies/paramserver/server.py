"""A server: holds slices of the parameters, applies the optimizer to them, and answers pulls."""

import contextlib
import logging
import os
import threading
import time
from collections import Counter
from typing import Any

import zmq

from cnnstrategies.paramserver.allocation import keep_freed_memory
from cnnstrategies.paramserver.asynchronous import Asynchronous
from cnnstrategies.paramserver.core.view import RunEnded, View, ViewSource
from cnnstrategies.paramserver.gaps import PING_SECONDS, Gaps
from cnnstrategies.paramserver.limits import allow_files, files_of_server, memory_of_server
from cnnstrategies.paramserver.messages import (
    HEADER_BYTES,
    LARGEST_JSON,
    SERVER,
    Bounds,
    InvalidMessageError,
    Kind,
    unpack,
)
from cnnstrategies.paramserver.post import Post
from cnnstrategies.paramserver.security import Gatekeeper, KeyPair
from cnnstrategies.paramserver.senders import Senders
from cnnstrategies.paramserver.server_handlers import Mode, ServerHandlers
from cnnstrategies.paramserver.shard import Shard
from cnnstrategies.paramserver.slicing import cut, largest_payload
from cnnstrategies.paramserver.snapshots import Snapshots
from cnnstrategies.paramserver.specification import Specification
from cnnstrategies.paramserver.synchronous import Synchronous
from cnnstrategies.paramserver.transport import IO_THREADS, Context, Listener, Received, receive, server_socket

_LOG = logging.getLogger(__name__)
POLL_MS = 50  # how often a view source without a descriptor is asked
MESSAGES_AT_ONCE = 32  # between two looks at the view and at the work that waits
STOPPED_SECONDS = 1.0  # between two looks: then this process was stopped
MOST_STATES = 4  # tensors of a slice's size that an optimizer of torch's keeps, and one for the update
WORK_SECONDS = 0.002  # on slices, between two looks at the messages


class Server:
    """One server process of a run. Single-threaded; libzmq's own thread moves the bytes.

    It is meant to have a process for itself.

    Args:
        specification: What all processes of the run agree on.
        views: Tells of the membership; the server waits for the first view with itself in it.
        id: This server's place, 0 to `specification.servers` - 1.
        endpoint: Where to bind: ``ipc://path`` or ``tcp://address:port``, port ``*`` for any free one; or a
            :class:`~cnnstrategies.paramserver.transport.Listener` made before the specification was known.
        keys: CURVE keys; None for no encryption.
        insecure: Allow `keys` None on an endpoint that other machines reach.

    Attributes:
        endpoint: Where the socket is bound (with the real port), known before :meth:`run`: bind, register this with
            the coordinator, then run.

    Raises:
        ConfigurationError: The endpoint is open to other machines without encryption, or the process may not open as
            many files as there are connections.
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
        allow_files(files_of_server(specification.workers, specification.servers), f"server {id}")
        listener = Listener(endpoint, keys is not None, insecure) if isinstance(endpoint, str) else endpoint
        self.id = id
        self.endpoint = listener.endpoint
        self._specification = specification
        self._views = views
        self._keys = keys
        slices = cut(specification)
        self._bounds = Bounds(max(largest_payload(slices), 4 * len(slices)) + LARGEST_JSON, len(slices))
        self._context: Context = zmq.Context(io_threads=IO_THREADS)
        self._view = View(-1, (), ())
        self._gatekeeper = Gatekeeper(self._context, self._admitted) if keys is not None else None
        largest = self._bounds.payload + HEADER_BYTES
        self._router = server_socket(self._context, listener, keys, largest)
        self._post = Post(self._context, id, specification.session, keys, largest, self._router)
        shard = Shard(specification, slices, id, self._post)
        self._mode: Mode = (
            Synchronous(specification, shard, id, self._post)
            if specification.aggregates
            else Asynchronous(specification, shard)
        )
        self._store = shard.store
        self._snapshots = Snapshots(specification, id)
        restored = self._snapshots.load(self._store)
        if restored:
            self._mode.roll.begin()
            if isinstance(self._mode, Synchronous):
                self._mode.caught_up(min(self._store.versions.values(), default=0))
        self._gaps = Gaps()
        self._senders = Senders(keys is not None, self._gaps)
        self._handlers = ServerHandlers(
            specification, id, shard, self._mode, self._post, self._gaps, restored, self._deaf
        )
        self._sign_seconds = min(1.0, specification.timeout / 4)
        self._pinged = self._signed = self._looked = time.monotonic()
        self._heard: dict[int, float] = {}  # when each other server was
        self._heard_workers: set[int] = set()
        self._stopping = threading.Event()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    @property
    def declared_memory(self) -> int:
        """Bytes that the server may come to need beside what it has now."""
        held = sum(slice_.nbytes for slice_ in self._store.slices.values())
        copies = MOST_STATES + self._specification.replication
        return memory_of_server(held, copies, self._specification.workers, self._bounds.payload)

    def run(self) -> None:
        """Serve until :meth:`stop` is called.

        Raises:
            RunEnded: From the views: the run is over, cleanly or not; or a view came without this server.
        """
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        if self._gatekeeper is not None:
            poller.register(self._gatekeeper.socket, zmq.POLLIN)
        descriptor = self._views.fileno()
        if descriptor is not None:
            poller.register(descriptor, zmq.POLLIN)
        try:
            while not self._stopping.is_set():
                wait = 0 if self._mode.busy() else POLL_MS if descriptor is None else int(1000 * PING_SECONDS)
                ready = dict(poller.poll(wait))
                # Always before the messages: those of members of a newer view would be dropped.
                if descriptor is None or descriptor in ready:
                    self._follow(self._views.current())
                if self._gatekeeper is not None and self._gatekeeper.socket in ready:
                    self._gatekeeper.answer()
                if self._router in ready:
                    self._receive_waiting()
                    self._mode.flush()
                self._ping()
                until = time.monotonic() + WORK_SECONDS
                while self._mode.busy() and time.monotonic() < until:
                    self._mode.work()
                self._post.flush()
                if self._snapshots.after(self._mode.finished, self._store):
                    _LOG.info("server %d writes a snapshot after %d updates", self.id, self._mode.finished)
        except RunEnded as ended:
            self._snapshots.close(remove=ended.clean)
            raise
        finally:
            self._close()

    def stop(self) -> None:
        """Have :meth:`run` return soon; may be called from a signal handler or another thread."""
        self._stopping.set()
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    @property
    def dropped(self) -> Counter[str]:
        """How many messages were dropped, by reason."""
        return self._handlers.dropped

    @property
    def lost_updates(self) -> int:
        """Updates that were made after the snapshot that this server began with, as far as workers told."""
        return self._handlers.lost_updates

    @property
    def log(self) -> list[Any]:
        """The mode's log: see `SyncClock.log` and `StaleClock.log`."""
        return list(self._mode.clock.log)

    def _close(self) -> None:
        self._snapshots.close()
        self._post.close()
        self._router.close()
        if self._gatekeeper is not None:
            self._gatekeeper.close()
        self._context.term()
        os.close(self._wake)
        if self.endpoint.startswith("ipc://"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.endpoint.removeprefix("ipc://"))

    # Membership

    def _admitted(self, key: str) -> bool:
        """Whether a key belongs to a member; the newest view is asked, for members knock as soon as they are one."""
        self._follow(self._views.current())
        return self._senders.have(key)

    def _follow(self, view: View) -> None:
        if view.number <= self._view.number:
            return
        if self.id in {server.id for server in self._view.servers} - {server.id for server in view.servers}:
            raise RunEnded(
                f"server {self.id} is no longer in the view (number {view.number}): it was taken for dead and another "
                "takes its place"
            )
        before, self._view = {server.id: server.since for server in self._view.servers}, view
        self._senders.follow(view)
        self._post.follow(view)
        self._handlers.follow(view)
        now = time.monotonic()
        self._heard = {
            server.id: self._heard.get(server.id, now) if before.get(server.id) == server.since else now
            for server in view.servers
            if server.id != self.id
        }

    def _deaf(self) -> list[int]:
        """The servers of the view of which nothing has come for too long: a dead one is out of the view by then."""
        limit = time.monotonic() - self._specification.deaf_after
        return [server for server, heard in self._heard.items() if heard < limit]

    # Messages

    def _receive_waiting(self) -> None:
        handled = 0
        while handled < MESSAGES_AT_ONCE:
            try:
                together = receive(self._router, True, self._keys is not None)
            except zmq.Again:
                return
            if not together:
                self._drop("a message of another number of frames")
            handled += max(1, len(together))
            for received in together:
                try:
                    self._handle(received)
                except InvalidMessageError as error:
                    self._drop(str(error))
                except (KeyError, TypeError, ValueError, IndexError, OverflowError, AssertionError) as error:
                    self._drop(f"contents of another form ({type(error).__name__})")

    def _drop(self, reason: str) -> None:
        self.dropped[reason] += 1
        if self.dropped[reason] == 1:
            _LOG.warning("server %d dropped a message: %s; further ones are only counted", self.id, reason)

    def _handle(self, received: Received) -> None:
        header = unpack(received.header, len(received.payload), self._specification.session, self._bounds)
        is_server = header.sender >= SERVER
        if is_server and header.incarnation > self._view.number:
            self._follow(self._views.current())
        missed = self._senders.check(header, received.user)
        peer = header.sender & ~SERVER
        if is_server:
            self._heard[peer] = time.monotonic()
        else:
            self._heard_workers.add(peer)
        if missed:
            self._post.to_server(peer, Kind.PING, base=self._gaps.found[peer])
        if not is_server:
            before = self._post.routes.get(peer, received.route)
            self._post.routes[peer] = received.route
            if before != received.route:
                # Answers on the old connection may be lost: have the worker send again what is not answered.
                self._post.ask_again(peer)
        self._handlers.handle(peer, header, received.payload)

    def _ping(self) -> None:
        """Now and then tell the other servers what has been missed of theirs; it also shows them what they missed."""
        now = time.monotonic()
        if now - self._looked > STOPPED_SECONDS:  # This process was stopped, not the others silent.
            self._heard = {server: heard + now - self._looked for server, heard in self._heard.items()}
        self._looked = now
        if now - self._signed > self._sign_seconds:
            self._signed = now
            self._post.sign(self._heard_workers)
            self._heard_workers.clear()
        if now - self._pinged > PING_SECONDS:
            self._pinged = now
            for server in self._view.servers:
                if server.id != self.id:
                    self._post.to_server(server.id, Kind.PING, base=self._gaps.found.get(server.id, 0))
