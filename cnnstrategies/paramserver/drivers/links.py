"""A worker's sockets: one connection to each server."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import zmq

from cnnstrategies.paramserver.core.view import ServerInfo, View, ViewSource
from cnnstrategies.paramserver.drivers.sockets import (
    IO_THREADS,
    Bundle,
    Context,
    Inbox,
    Socket,
    client_socket,
    largest_frame,
)
from cnnstrategies.paramserver.messages import LARGEST_JSON, Bounds, Header, InvalidMessageError, Parcel, unpack
from cnnstrategies.paramserver.security import KeyPair
from cnnstrategies.paramserver.slicing import Slice, largest_payload
from cnnstrategies.paramserver.specification import Specification

POLL_SECONDS = 0.05  # longest time, in seconds, between two checks of views and time-outs while a worker waits


class ServerLink(NamedTuple):
    """A worker's connection to one server.

    Attributes:
        info: Id, endpoint and key of the server.
        socket: The DEALER socket that is connected to the server.
        bundle: Sender of messages over the socket.
        inbox: Receiver of messages over the socket.
    """

    info: ServerInfo
    socket: Socket
    bundle: Bundle
    inbox: Inbox


class Links:
    """A worker's connections to all servers. Only :meth:`receive` blocks, for a limited time.

    Args:
        specification: The run's specification.
        slices: All slices.
        views: Source of the membership's views, for example from :meth:`.Membership.source`.
        heard: Function that is called for each message that arrives, with the time, the server's id and the header. It
            returns whether to handle the message. Otherwise the message is dropped, for example because it is a
            repetition.
        keys: CURVE keys of this process; None for no encryption.
    """

    def __init__(
        self,
        specification: Specification,
        slices: Sequence[Slice],
        views: ViewSource,
        heard: Callable[[float, int, Header], bool],
        keys: KeyPair | None,
    ) -> None:
        self._session = specification.session
        self._patience = specification.timeout
        self._views = views
        self._heard = heard
        self._bounds = Bounds(largest_payload(slices) + LARGEST_JSON, max(1, len(slices)))
        self._keys = keys
        self._context: Context = zmq.Context(io_threads=IO_THREADS)
        self._links: dict[int, ServerLink] = {}
        self._arrived: deque[tuple[int, Header, memoryview]] = deque()
        self._poller = zmq.Poller()
        self._poller.register(views.fileno(), zmq.POLLIN)
        self._may_have_new_view = True

    def new_view(self) -> View | None:
        """Return the newest view. Return None if no view has arrived since the last call."""
        if not self._may_have_new_view:
            return None
        self._may_have_new_view = False
        return self._views.current()

    def connect(self, view: View) -> None:
        """Connect to the servers of a view, and close the connections to servers that are not in the view."""
        infos = {server.id: server for server in view.servers}
        for server, link in list(self._links.items()):
            if infos.get(server) != link.info:
                self._close(server)
                self._arrived = deque(arrived for arrived in self._arrived if arrived[0] != server)
        for server, info in infos.items():
            if server not in self._links:
                self._open(info)

    def _open(self, info: ServerInfo) -> None:
        largest = largest_frame(self._bounds.payload)
        socket = client_socket(self._context, info, self._keys, largest, self._patience)
        inbox = Inbox(socket, self._session, routed=False, encrypted=self._keys is not None)
        self._links[info.id] = ServerLink(info, socket, Bundle(socket), inbox)
        self._poller.register(socket, zmq.POLLIN)

    def _close(self, server: int) -> None:
        socket = self._links.pop(server).socket
        self._poller.unregister(socket)
        socket.close(linger=0)

    def send(self, parcels: Iterable[Parcel]) -> None:
        """Send messages to servers. This worker must be connected to each of these servers; see :meth:`connect`."""
        for to, header, payload, wait in parcels:
            assert isinstance(to, int)
            self._links[to].bundle.send(header, payload, wait)

    def receive(self, seconds: float) -> Iterator[tuple[int, Header, memoryview]]:
        """Yield the messages that have arrived: the server's id, the header and the payload of each message.

        Args:
            seconds: Longest time to wait for the first message.
        """
        if not self._arrived:
            for link in self._links.values():
                link.bundle.flush()
            ready = dict(self._poller.poll(int(1000 * seconds)))
            self._may_have_new_view = self._may_have_new_view or self._views.fileno() in ready
            for server, link in self._links.items():
                if link.socket in ready:
                    self._read(server, link.inbox)
        yield from self.arrived()

    def arrived(self) -> Iterator[tuple[int, Header, memoryview]]:
        """Yield the messages that were already read from the sockets.

        If the caller stops early, the next call yields the remaining messages.
        """
        while self._arrived:
            yield self._arrived.popleft()

    def _read(self, server: int, inbox: Inbox) -> None:
        """Read all messages that have arrived from a server. Keep the valid messages for which `heard` returns True."""
        while True:
            try:
                messages = inbox.receive()
            except zmq.Again:
                return
            for received in messages:
                try:
                    header = unpack(received.header, len(received.payload), self._session, self._bounds)
                except InvalidMessageError:
                    continue
                if self._heard(time.monotonic(), server, header):
                    self._arrived.append((server, header, received.payload))

    def close(self) -> None:
        """Close all sockets."""
        for link in self._links.values():
            link.socket.close()
        self._context.term()
