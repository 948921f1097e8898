"""A worker's connections to the servers, and what it knows of who is alive."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import zmq

from cnnstrategies.paramserver.core.view import ServerInfo, ViewSource
from cnnstrategies.paramserver.drivers.sockets import IO_THREADS, Bundle, Context, Socket, client_socket, receive
from cnnstrategies.paramserver.errors import RemovedError, ServersUnreachableError
from cnnstrategies.paramserver.limits import allow_files, files_of_worker
from cnnstrategies.paramserver.messages import (
    HEADER_BYTES,
    LARGEST_JSON,
    SERVER,
    Bounds,
    Header,
    InvalidMessageError,
    Kind,
    pack_json,
    unpack,
)
from cnnstrategies.paramserver.security import KeyPair, check_endpoint
from cnnstrategies.paramserver.slicing import Slice, largest_payload
from cnnstrategies.paramserver.specification import Specification

POLL_SECONDS = 0.05
_ANSWERS = (Kind.PULLED, Kind.STATE_IS)


class Links:
    """Sends to servers and receives from them; never blocks but in :meth:`receive`, for a moment.

    Args:
        specification: What all processes of the run agree on.
        slices: All slices.
        views: Tells of the membership.
        id: This worker's number.
        incarnation: Its incarnation.
        keys: CURVE keys; None for no encryption.
        insecure: Allow `keys` None with servers on other machines.

    Attributes:
        view: The view that is followed.
        sequence: Number of the last message sent.
    """

    def __init__(
        self,
        specification: Specification,
        slices: Sequence[Slice],
        views: ViewSource,
        id: int,
        incarnation: int,
        keys: KeyPair | None,
        insecure: bool,
    ) -> None:
        allow_files(files_of_worker(specification.servers), f"worker {id}")
        self.view = views.current()
        self.sequence = 0
        self._views = views
        self._specification = specification
        self._bounds = Bounds(largest_payload(slices) + LARGEST_JSON, max(1, len(slices)))
        self._id = id
        self._incarnation = incarnation
        self._keys = keys
        self._insecure = insecure
        self._context: Context = zmq.Context(io_threads=IO_THREADS)
        self._sockets: dict[int, tuple[ServerInfo, Socket]] = {}
        self._bundles: dict[int, Bundle] = {}
        self._arrived: deque[tuple[int, Header, memoryview]] = deque()
        self._poller = zmq.Poller()
        self._descriptor = views.fileno()
        if self._descriptor is not None:
            self._poller.register(self._descriptor, zmq.POLLIN)
        self._news = True  # The views have to be asked.
        self._last: dict[int, int] = {}
        self._heard: dict[int, float] = {}
        self._probed: dict[int, float] = {}
        self._orphaned_since: float | None = None
        self._was_member = False
        self._connect()

    def wait_for_members(self) -> None:
        """Wait until this worker and all servers are in the view, but those that have died already.

        Raises:
            ServersUnreachableError: They did not come within the time-out.
        """
        deadline = time.monotonic() + self._specification.timeout
        while self._missing() or not self._is_member():
            try:
                self.view = self._views.wait_newer(self.view.number, max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                missing = self._missing()
                who = f"servers {sorted(missing)}" if missing else f"worker {self._id} itself"
                raise ServersUnreachableError(
                    f"worker {self._id}: {who} did not join within {self._specification.timeout} s: look at their "
                    "logs, or raise timeout"
                ) from None
        self._was_member = True
        self._connect()

    def _missing(self) -> set[int]:
        return set(range(self._specification.servers)) - {server.id for server in self.view.servers} - {*self.view.lost}

    def _is_member(self) -> bool:
        return any((worker.id, worker.incarnation) == (self._id, self._incarnation) for worker in self.view.workers)

    def follow(self) -> bool:
        """Take over a newer view; whether its servers are others.

        Raises:
            RemovedError: This worker is not in it.
        """
        if not self._news:
            return False
        self._news = self._descriptor is None
        view = self._views.current()
        if view.number <= self.view.number:
            return False
        before, self.view = self.view, view
        if self._was_member and not self._is_member():
            raise RemovedError(
                f"worker {self._id} (incarnation {self._incarnation}) is no longer in the view (number {view.number}): "
                "it was taken for dead; start it again as a new incarnation"
            )
        if view.servers == before.servers:
            return False
        self._connect()
        return True

    def _connect(self) -> None:
        now = {server.id: server for server in self.view.servers}
        for server, (info, socket) in list(self._sockets.items()):
            if now.get(server) != info:
                self._poller.unregister(socket)
                socket.close(linger=0)
                del self._sockets[server], self._bundles[server]
                self._last.pop(server, None)
                self._arrived = deque(arrived for arrived in self._arrived if arrived[0] != server)
        for server, info in now.items():
            if server not in self._sockets:
                check_endpoint(info.endpoint, self._keys is not None, self._insecure)
                largest = self._bounds.payload + HEADER_BYTES
                socket = client_socket(self._context, info, self._keys, largest)
                self._sockets[server] = info, socket
                self._bundles[server] = Bundle(socket)
                self._poller.register(socket, zmq.POLLIN)
                self._heard[server] = time.monotonic()

    def send(
        self, server: int, kind: Kind, payload: Any = b"", json: dict[str, Any] | None = None, **fields: Any
    ) -> int:
        """Send a message; nothing if the server is not in the view.

        Small pushes wait for each other, at most until something else is sent there.

        Returns:
            Bytes sent.
        """
        if server not in self._sockets:
            return 0
        meta = 0
        if json is not None:
            text = pack_json(json)
            meta = len(text)
            payload = text + bytes(payload)
        self.sequence += 1
        header = Header(
            kind, self._id, self._specification.session, self.sequence, incarnation=self._incarnation,
            length=len(payload), meta=meta, **fields,
        )  # fmt: skip
        self._bundles[server].send(header, payload, wait=kind == Kind.PUSH)
        return HEADER_BYTES + len(payload)

    def receive(self, seconds: float) -> Iterator[tuple[int, Header, memoryview]]:
        """The messages that are waiting; waits for the first, but not for longer than some seconds."""
        if not self._arrived:
            for bundle in self._bundles.values():
                bundle.flush()
            ready = dict(self._poller.poll(int(1000 * seconds)))
            self._news = self._news or self._descriptor in ready
            for server, (_, socket) in self._sockets.items():
                if socket in ready:
                    self._read(server, socket)
        while self._arrived:  # Who does not take all finds the rest the next time.
            yield self._arrived.popleft()

    def _read(self, server: int, socket: Socket) -> None:
        """Take all that has come from a server."""
        while True:
            try:
                together = receive(socket, False, self._keys is not None)
            except zmq.Again:
                return
            for received in together:
                try:
                    header = unpack(received.header, len(received.payload), self._specification.session, self._bounds)
                    if header.sender != SERVER + server or header.sequence <= self._last.get(server, 0):
                        raise InvalidMessageError("a replay")
                except InvalidMessageError:
                    continue
                self._last[server] = header.sequence
                self._heard[server] = time.monotonic()
                if header.kind in _ANSWERS:
                    self._probed[server] = self._heard[server]
                self._arrived.append((server, header, received.payload))

    # Who is alive

    def begin_waiting(self) -> None:
        """From now on silence counts."""
        now = time.monotonic()
        self._heard = dict.fromkeys(self._sockets, now)
        self._probed = dict.fromkeys(self._sockets, now)

    def unanswering(self, seconds: float) -> list[int]:
        """The servers that have answered no request, and not been asked, for some seconds; they count as asked now."""
        now = time.monotonic()
        asked = [server for server in self._sockets if now - self._probed.setdefault(server, now) >= seconds]
        self._probed.update(dict.fromkeys(asked, now))
        return asked

    def check_deaf(self, server: int, deaf: Sequence[int]) -> None:
        """Give up if a server hears nothing from others although they are there.

        Raises:
            ServersUnreachableError: It does.
        """
        there = sorted({int(other) for other in deaf} & self._sockets.keys())
        if there:
            raise ServersUnreachableError(
                f"server {server} has heard nothing from server {', '.join(map(str, there))} for "
                f"{self._specification.deaf_after:g} s, and worker {self._id} hears both: look at the "
                "connection between their machines"
            )

    def check(self, slices_without_server: int) -> None:
        """Give up if a server has not answered for the time-out, or slices have had no server for so long.

        Raises:
            ServersUnreachableError: One of them is the case.
        """
        now = time.monotonic()
        limit = self._specification.patience
        dead = [server for server in self._sockets if now - self._heard.setdefault(server, now) > limit]
        if dead:
            names = ", ".join(f"{server} ({self._sockets[server][0].endpoint})" for server in dead)
            raise ServersUnreachableError(
                f"worker {self._id} had no answer from server {names} for {limit} s: look at its log, or raise timeout"
            )
        if not slices_without_server:
            self._orphaned_since = None
        elif self._orphaned_since is None:
            self._orphaned_since = now
        elif now - self._orphaned_since > limit:
            missing = sorted(set(range(self._specification.servers)) - {server.id for server in self.view.servers})
            raise ServersUnreachableError(
                f"server {', '.join(map(str, missing))} died, and {slices_without_server} slices of the parameters "
                f"with it; no other took its place within {limit} s: use replication=2, or snapshot_every with "
                "servers that are restarted"
            )

    def lost(self, server: int) -> None:
        """A server was replaced by one that has no values.

        Raises:
            ServersUnreachableError: Always.
        """
        raise ServersUnreachableError(
            f"server {server} was started again, but its slices of the parameters are lost: use replication=2 or "
            "snapshot_every to go on after a server's death"
        )

    def close(self) -> None:
        """Close all sockets."""
        for _, socket in self._sockets.values():
            socket.close()
        self._context.term()
