"""Sockets of the data plane: a server's ROUTER, a worker's DEALERs, and sends without copies."""

import socket
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from cnnstrategies.paramserver.core.view import ServerInfo
from cnnstrategies.paramserver.messages import SMALL_BYTES, Header
from cnnstrategies.paramserver.security import ZAP_DOMAIN, KeyPair, check_endpoint


class Listener:
    """An address that is bound and listening, for a server whose specification is not known yet.

    Connections wait in the kernel until the server takes it over.

    Args:
        endpoint: ``ipc://path`` or ``tcp://address:port``; port ``*`` for any free one.
        encrypted: Whether the server will have CURVE keys.
        insecure: Allow no keys on an endpoint that other machines reach.

    Attributes:
        endpoint: The same with the real port.

    Raises:
        ConfigurationError: The endpoint is no such address, or open to other machines without encryption.
        OSError: It cannot be bound.
    """

    def __init__(self, endpoint: str, encrypted: bool = False, insecure: bool = False) -> None:
        check_endpoint(endpoint, encrypted, insecure)
        if endpoint.startswith("ipc://"):
            path = endpoint.removeprefix("ipc://")
            Path(path).unlink(missing_ok=True)  # left by a process that was killed
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.bind(path)
            self.endpoint = endpoint
        else:
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host.strip("[]"), 0 if port == "*" else int(port)))
            self.endpoint = f"tcp://{host}:{self._socket.getsockname()[1]}"
        self._socket.listen(128)

    def detach(self) -> int:
        """The listening socket's file descriptor, for whom it now belongs to."""
        return self._socket.detach()

    def close(self) -> None:
        """Stop listening, unless detached."""
        self._socket.close()


Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

# Messages that wait unread, of each connection to a server; what lies beyond waits at the sender.
WAITING_MESSAGES = 64
LINGER_MS = 500
KNOCK_MS = 1000  # until a member that a server does not know yet tries again
# Small payloads wait for each other until they are as many or as large as this.
MOST_TOGETHER, BUNDLE_BYTES = 32, 1 << 19
IO_THREADS = 2  # of libzmq in each process: one copies for one connection while the other does for another
DRAIN_MS = 10_000  # for what was sent, to leave


def server_socket(context: Context, listener: Listener, keys: KeyPair | None, largest: int) -> Socket:
    """A ROUTER on an address that is already bound.

    Args:
        context: The process's context.
        listener: The address; belongs to the socket from now on.
        keys: CURVE keys; None for no encryption.
        largest: Bytes of the largest frame; a peer that announces more is disconnected before anything is allocated.
    """
    router: Socket = context.socket(zmq.ROUTER)
    router.copy_threshold = SMALL_BYTES
    router.linger = LINGER_MS
    router.setsockopt(zmq.MAXMSGSIZE, largest)
    router.setsockopt(zmq.RCVHWM, WAITING_MESSAGES)
    router.setsockopt(zmq.SNDHWM, 0)  # a ROUTER drops what is over its limit
    router.zap_domain = ZAP_DOMAIN
    if keys is not None:
        router.curve_server = True
        router.curve_publickey = keys.public.encode()
        router.curve_secretkey = keys.secret.encode()
    router.setsockopt(zmq.USE_FD, listener.detach())
    router.bind(listener.endpoint)
    return router


def client_socket(context: Context, server: ServerInfo, keys: KeyPair | None, largest: int) -> Socket:
    """A DEALER that is connected to a server; sends never block."""
    dealer: Socket = context.socket(zmq.DEALER)
    dealer.copy_threshold = SMALL_BYTES
    dealer.linger = LINGER_MS
    dealer.setsockopt(zmq.MAXMSGSIZE, largest)
    dealer.setsockopt(zmq.SNDHWM, 0)
    dealer.setsockopt(zmq.RCVHWM, 0)
    dealer.setsockopt(zmq.RECONNECT_IVL, 50)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    if keys is not None:
        dealer.setsockopt(zmq.HANDSHAKE_IVL, KNOCK_MS)
        dealer.curve_serverkey = server.public_key.encode()
        dealer.curve_publickey = keys.public.encode()
        dealer.curve_secretkey = keys.secret.encode()
    dealer.connect(server.endpoint)
    return dealer


class Bundle:
    """Sends messages to one peer; small ones may wait for each other and then leave as one of libzmq's messages.

    Most parameters of a CNN are small, and each message on its own wakes a thread at both ends.

    Args:
        to: The socket.
        route: The peer, if the socket is a ROUTER.
    """

    def __init__(self, to: Socket, route: bytes | None = None) -> None:
        self.route = route
        self._to = to
        self._waiting: list[Any] = []
        self._bytes = 0

    def send(self, header: Header, payload: Any = b"", wait: bool = False) -> None:
        """Send a message after those that wait.

        Args:
            header: Its header.
            payload: Its memory is read later, when it leaves or by libzmq's thread, and kept alive until then.
            wait: Let it wait for the next ones, if it is small.
        """
        if not wait or len(payload) > SMALL_BYTES:
            self._leave([*self._waiting, header.pack(), payload])
            return
        self._waiting += header.pack(), payload
        self._bytes += len(payload)
        if len(self._waiting) == 2 * MOST_TOGETHER or self._bytes >= BUNDLE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Send what waits."""
        if self._waiting:
            self._leave(self._waiting)

    def _leave(self, frames: list[Any]) -> None:
        self._waiting, self._bytes = [], 0
        if self.route is not None:
            self._to.send(self.route, zmq.SNDMORE)
        last = len(frames) - 1
        for place, frame in enumerate(frames):  # A message of many small frames costs less so than by one call.
            more = 0 if place == last else zmq.SNDMORE
            self._to.send(frame, more, copy=len(frame) <= SMALL_BYTES)


class Received(NamedTuple):
    """One message, not checked yet.

    Attributes:
        route: Where it came from, at a ROUTER.
        header: The first frame.
        payload: The second frame's memory; kept alive by it.
        user: The sender's CURVE key in Z85 form, as the gatekeeper admitted it.
    """

    route: bytes
    header: bytes
    payload: memoryview
    user: str


def receive(socket: Socket, routed: bool, encrypted: bool) -> list[Received]:
    """The messages that came together next; none if they do not have a header and a payload each, or are too many.

    Args:
        socket: A DEALER, or a ROUTER (`routed`).
        routed: Whether a frame with the sender's route comes first.
        encrypted: Whether the sender's key is known.

    Raises:
        zmq.Again: Nothing is waiting.
    """
    frames: list[zmq.Frame] = []
    route = b""
    count = 0
    more = True
    if routed:
        route = socket.recv(zmq.NOBLOCK)  # Another frame always follows.
    while more:
        frame = socket.recv(zmq.NOBLOCK, copy=False)
        more = frame.more
        count += 1
        if count <= 2 * (MOST_TOGETHER + 1):
            frames.append(frame)
    if count % 2 or count != len(frames):
        return []
    user = str(frames[-1].get("User-Id")) if encrypted and routed and frames else ""
    pairs = zip(frames[::2], frames[1::2], strict=True)
    return [Received(route, header.bytes, payload.buffer, user) for header, payload in pairs]
