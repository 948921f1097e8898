"""A server: holds slices of the parameters, applies the optimizer to them, and answers pulls."""

import contextlib
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import zmq

from cnnstrategies.paramserver.allocation import keep_freed_memory
from cnnstrategies.paramserver.asynchronous import Asynchronous
from cnnstrategies.paramserver.gaps import PING_SECONDS, Gaps
from cnnstrategies.paramserver.messages import (
    HEADER_BYTES,
    LARGEST_JSON,
    NO_STEP,
    SERVER,
    Bounds,
    Encoding,
    Header,
    InvalidMessageError,
    Kind,
    unpack,
    unpack_json,
)
from cnnstrategies.paramserver.post import Post
from cnnstrategies.paramserver.pushes import Begin
from cnnstrategies.paramserver.security import Gatekeeper, KeyPair
from cnnstrategies.paramserver.shard import Pull, Shard
from cnnstrategies.paramserver.slicing import cut, largest_payload
from cnnstrategies.paramserver.snapshots import Snapshots
from cnnstrategies.paramserver.specification import Specification
from cnnstrategies.paramserver.synchronous import Synchronous
from cnnstrategies.paramserver.transport import IO_THREADS, Context, Listener, Received, receive, server_socket
from cnnstrategies.paramserver.view import RunEnded, View, ViewSource

_LOG = logging.getLogger(__name__)
POLL_MS = 50  # how often a view source without a descriptor is asked
LARGEST_OPTION = 1e30
MESSAGES_AT_ONCE = 32  # between two looks at the view and at the work that waits
SLICES_AT_ONCE = 4  # that are updated between two looks at the messages
_FROM_WORKERS = frozenset(
    {Kind.HELLO, Kind.LEAVE, Kind.VALUE, Kind.STATE, Kind.BEGIN, Kind.PUSH, Kind.PULL, Kind.GET_STATE}
)
_FROM_SERVERS = frozenset(
    {
        Kind.STATUS, Kind.VOTE, Kind.DECIDE, Kind.NORM, Kind.SCALE, Kind.RELAY_BEGIN, Kind.RELAY, Kind.ACKNOWLEDGE,
        Kind.COPY_STATE, Kind.COPY, Kind.PING,
    }
)  # fmt: skip


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
        dropped: How many messages were dropped, by reason.
        lost_updates: Updates that were made after the snapshot that this server began with, as far as workers told.

    Raises:
        ConfigurationError: The endpoint is open to other machines without encryption.
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
        listener = Listener(endpoint, keys is not None, insecure) if isinstance(endpoint, str) else endpoint
        self.id = id
        self.endpoint = listener.endpoint
        self.dropped: Counter[str] = Counter()
        self.lost_updates = 0
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
        self._shard = Shard(specification, slices, id, self._post)
        self._mode: Synchronous | Asynchronous = (
            Synchronous(specification, self._shard, id, self._post)
            if specification.aggregates
            else Asynchronous(specification, self._shard)
        )
        self._snapshots = Snapshots(specification, id)
        self._restored = self._snapshots.load(self._shard.store)
        if self._restored and isinstance(self._mode, Synchronous):
            self._mode.caught_up(min(self._shard.store.versions.values(), default=0))
        self._last: dict[int, tuple[int, int]] = {}
        self._gaps = Gaps()
        self._pinged = 0.0
        self._members: dict[int, tuple[int, str]] = {}
        self._stopping = threading.Event()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._handlers: dict[Kind, Callable[[int, Header, memoryview], None]] = {
            Kind.HELLO: self._hello,
            Kind.LEAVE: lambda worker, header, payload: self._mode.leave(worker),
            Kind.VALUE: self._initialise,
            Kind.STATE: self._initialise,
            Kind.BEGIN: self._begin,
            Kind.PUSH: self._push,
            Kind.PULL: self._pull,
            Kind.GET_STATE: lambda worker, header, payload: self._shard.send_state(worker, header.step),
            Kind.RELAY_BEGIN: lambda server, header, payload: self._shard.relay_begins(
                server, self._options(unpack_json(payload, header))
            ),
            Kind.RELAY: self._shard.relayed,
            Kind.ACKNOWLEDGE: lambda server, header, payload: self._shard.acknowledged(server, header.key, header.base),
            Kind.COPY: self._copied,
            Kind.COPY_STATE: self._copied,
            Kind.PING: lambda server, header, payload: self._asked(server, header.base),
        }

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
                self._ping()
                for _ in range(SLICES_AT_ONCE):
                    if self._mode.busy():
                        self._mode.work()
                if self._snapshots.after(self._mode.finished, self._shard.store):
                    _LOG.info("server %d wrote a snapshot after %d updates", self.id, self._mode.finished)
        finally:
            self._close()

    def stop(self) -> None:
        """Have :meth:`run` return soon; may be called from a signal handler or another thread."""
        self._stopping.set()
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    @property
    def log(self) -> list[Any]:
        """The mode's log: see `SyncClock.log` and `StaleClock.log`."""
        return list(self._mode.clock.log)

    def _close(self) -> None:
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
        return any(key == member for _, member in self._members.values())

    def _follow(self, view: View) -> None:
        if view.number <= self._view.number:
            return
        if self.id in {server.id for server in self._view.servers} - {server.id for server in view.servers}:
            raise RunEnded(
                f"server {self.id} is no longer in the view (number {view.number}): it was taken for dead and another "
                "takes its place"
            )
        before = {server.id: server.since for server in self._view.servers}
        now = {server.id: server.since for server in view.servers}
        self._gaps.forget([server for server, since in before.items() if now.get(server) != since])
        self._view = view
        self._members = {worker.id: (worker.incarnation, worker.public_key) for worker in view.workers}
        self._members |= {SERVER + server.id: (server.since, server.public_key) for server in view.servers}
        self._last = {peer: last for peer, last in self._last.items() if self._life(peer) == last[0]}
        self._post.follow(view)
        self._shard.place(view)
        self._mode.follow(view)

    def _life(self, peer: int) -> int | None:
        return self._members[peer][0] if peer in self._members else None

    # Messages

    def _receive_waiting(self) -> None:
        for _ in range(MESSAGES_AT_ONCE):
            try:
                received = receive(self._router, True, self._keys is not None)
            except zmq.Again:
                return
            try:
                if received is None:
                    raise InvalidMessageError("a message of another number of frames")
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
        life, key = self._members.get(header.sender, (None, ""))
        if life is None or (not is_server and life != header.incarnation):
            raise InvalidMessageError("from no member of the view")
        if is_server and not life <= header.incarnation <= self._view.number:
            raise InvalidMessageError("of a view that is not known here, or of a server that was replaced")
        if self._keys is not None and received.user != key:
            raise InvalidMessageError("a key that is not its sender's")
        if header.kind not in (_FROM_SERVERS if is_server else _FROM_WORKERS):
            raise InvalidMessageError("a kind that its sender does not send")
        peer = header.sender & ~SERVER
        if is_server:
            if self._gaps.take(peer, header.sequence):
                self._post.to_server(peer, Kind.PING, base=self._gaps.found[peer])
        else:
            if header.sequence <= self._last.get(peer, (life, 0))[1]:
                raise InvalidMessageError("a replay")
            self._last[peer] = life, header.sequence
            before = self._post.routes.get(peer, received.route)
            self._post.routes[peer] = received.route
            if before != received.route:
                # Answers on the old connection may be lost: have the worker send again what is not answered.
                self._post.ask_again(peer)
        handler = self._handlers.get(header.kind)
        if handler is not None:
            handler(peer, header, received.payload)
        elif isinstance(self._mode, Synchronous):
            self._mode.from_server(peer, header, unpack_json(received.payload, header))

    def _ping(self) -> None:
        """Now and then tell the other servers what has been missed of theirs; it also shows them what they missed."""
        now = time.monotonic()
        if now - self._pinged > PING_SECONDS:
            self._pinged = now
            for server in self._view.servers:
                if server.id != self.id:
                    self._post.to_server(server.id, Kind.PING, base=self._gaps.found.get(server.id, 0))

    def _asked(self, server: int, gaps: int) -> None:
        if self._gaps.asked(server, gaps):
            self._shard.tell_again(server)
            if isinstance(self._mode, Synchronous):
                self._mode.tell_again(server)

    def _hello(self, worker: int, header: Header, payload: memoryview) -> None:
        if header.base > self._view.number:
            return  # It knows a newer view, and asks again until this server does too.
        step = None if header.step == NO_STEP else header.step
        if step is not None and self._restored:
            self._catch_up(worker, header.incarnation, step)
        # Only a question, at first: a newcomer becomes a member when it says from which step on.
        joins = unpack_json(payload, header).get("joins") is True
        first = self._mode.join(worker, step) if joins else 0
        answer = {"ready": self._shard.ready, "leader": self._leads(), "asked": header.sequence}
        self._post.to_worker(worker, Kind.WELCOME, step=first, json=answer)

    def _leads(self) -> bool:
        return not isinstance(self._mode, Synchronous) or self._mode.leader == self.id

    def _catch_up(self, worker: int, incarnation: int, step: int) -> None:
        """Go on from a snapshot at the step where the workers are, and say what is missing."""
        store = self._shard.store
        before = self.lost_updates
        if isinstance(self._mode, Synchronous):
            lost = max((step - store.versions[key] for key in self._shard.own), default=0)
            if lost <= 0:
                return
            self.lost_updates += lost
            for key in self._shard.own:
                store.versions[key] = step
            self._mode.caught_up(step)
            self._shard.copy_to_backups()
        else:
            last = [store.seen[key].get((worker, incarnation), -1) for key in self._shard.own]
            self.lost_updates += max(0, step - 1 - min(last, default=step - 1))
            for key in self._shard.own:
                store.seen[key][worker, incarnation] = max(step - 1, store.seen[key].get((worker, incarnation), -1))
        if self.lost_updates > before:
            print(
                f"server {self.id} goes on from its last snapshot: {self.lost_updates} updates since then are lost",
                file=sys.stderr,
                flush=True,
            )

    def _initialise(self, worker: int, header: Header, payload: memoryview) -> None:
        before = self._shard.ready
        self._shard.initialise(header, unpack_json(payload, header) if header.meta else {}, payload)
        if self._shard.ready and not before:
            for known in list(self._post.routes):
                self._post.ask_again(known)  # What came too early was dropped.

    def _copied(self, server: int, header: Header, payload: memoryview) -> None:
        self._shard.copied(server, header, unpack_json(payload, header), payload)

    def _options(self, values: dict[str, Any]) -> list[dict[str, Any]]:
        options = values["options"]
        if not _alike(options, [group.options for group in self._specification.groups]):
            raise InvalidMessageError("hyper-parameters of other parameter groups")
        checked: list[dict[str, Any]] = options
        return checked

    def _begin(self, worker: int, header: Header, payload: memoryview) -> None:
        begin = Begin(self._options(unpack_json(payload, header)), header.weight)
        self._mode.begin(worker, header.step, begin)

    def _push(self, worker: int, header: Header, payload: memoryview) -> None:
        if header.key not in self._shard.owned:
            raise InvalidMessageError("a push of a slice that another server is the primary of")
        if not self._mode.push((worker, header.incarnation), header, payload):
            self.dropped["a push that is here already"] += 1

    def _pull(self, worker: int, header: Header, payload: memoryview) -> None:
        if header.encoding != Encoding.KEYS or len(payload) % 4:
            raise InvalidMessageError("a pull without keys")
        keys = np.frombuffer(payload, "<u4").tolist()
        if len(set(keys)) != len(keys) or not self._shard.owned.issuperset(keys):
            raise InvalidMessageError("a pull of slices that another server is the primary of")
        if header.base:
            self._shard.pull(worker, keys, Pull(header.step, whole=True))
        elif isinstance(self._mode, Synchronous):
            self._shard.pull(worker, keys, Pull(header.step, version=header.step))
        else:
            self._mode.pull((worker, header.incarnation), keys, header.step)


def _alike(value: Any, given: Any) -> bool:
    """Whether an option may replace another: numbers for numbers, and lists and objects of the same size."""
    if isinstance(given, dict):
        return (
            isinstance(value, dict) and value.keys() == given.keys() and all(_alike(value[k], given[k]) for k in given)
        )
    if isinstance(given, list | tuple):
        return isinstance(value, list) and len(value) == len(given) and all(map(_alike, value, given))
    if isinstance(given, bool | str) or given is None:
        return bool(value == given)
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST_OPTION
