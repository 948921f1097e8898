"""Sockets of the data plane: a server's ROUTER, a worker's DEALERs, and sends without copies.

The module also checks the system's limits on what sockets need: files (each connection is one) and threads.
"""

import resource
import socket
import threading
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.core.view import ServerInfo
from cnnstrategies.paramserver.messages import HEADER_BYTES, SMALL_BYTES, Header, begins, length_in
from cnnstrategies.paramserver.security import ZAP_DOMAIN, KeyPair, check_endpoint


class Listener:
    """A bound and listening socket, for a server whose specification is not known yet.

    Connections wait in the kernel until the server takes the socket over.

    Args:
        endpoint: ``ipc://path`` or ``tcp://address:port``; port ``*`` stands for any free one.
        encrypted: Whether the server will use encryption.
        insecure: Allow an endpoint that other machines reach without encryption.

    Attributes:
        endpoint: The endpoint, with the real port.

    Raises:
        ConfigurationError: The endpoint is not valid, or open to other machines without encryption.
        OSError: The endpoint cannot be bound.
    """

    def __init__(self, endpoint: str, encrypted: bool = False, insecure: bool = False) -> None:
        check_endpoint(endpoint, encrypted, insecure)
        if endpoint.startswith("ipc://"):
            path = endpoint.removeprefix("ipc://")
            Path(path).unlink(missing_ok=True)  # left by a process that was killed
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.bind(path)
            self._socket.listen(128)
            self.endpoint = endpoint
        else:
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            self._socket = socket.create_server((host, 0 if port == "*" else int(port)), backlog=128)
            self.endpoint = f"tcp://{host}:{self._socket.getsockname()[1]}"

    def detach(self) -> int:
        """Return the listening socket's file descriptor, which belongs to the caller from now on."""
        return self._socket.detach()

    def close(self) -> None:
        """Stop listening, unless detached, and remove the file."""
        self._socket.close()
        if self.endpoint.startswith("ipc://"):
            Path(self.endpoint.removeprefix("ipc://")).unlink(missing_ok=True)


Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

# Unread messages that a server keeps for each connection; further messages wait at the sender.
WAITING_MESSAGES = 64
LINGER_MS = 500
# Time until a member that a server does not know yet tries to connect again. It must also suffice for a handshake over
# links with a delay of a second.
KNOCK_MS = 3000
# Small payloads wait for each other until they are as many or as large as this.
MOST_TOGETHER, BUNDLE_BYTES = 32, 1 << 19
MOST_OPEN = 1 << 12  # most headers that wait for their payloads, including those of connections that have ended
SLOWEST = 1_250_000  # least speed of a connection, in bytes per second: 10 Mbit/s
IO_THREADS = 2  # of libzmq in each process: two connections can be served at the same time
THREADS = 8  # approximate number in a process: its own, libzmq's and torch's
OWN_FILES = 256  # of a process besides its connections: its program, its data, and libzmq's files


def server_socket(context: Context, listener: Listener, keys: KeyPair | None, largest: int) -> Socket:
    """Return a ROUTER that takes over a listener's socket.

    Args:
        context: libzmq's context.
        listener: The bound and listening socket.
        keys: CURVE keys; None for no encryption.
        largest: Bytes of the largest frame. A peer that announces more is disconnected before memory is allocated.
    """
    router: Socket = context.socket(zmq.ROUTER)
    router.copy_threshold = SMALL_BYTES
    router.linger = LINGER_MS
    router.setsockopt(zmq.MAXMSGSIZE, largest)
    router.setsockopt(zmq.RCVHWM, WAITING_MESSAGES)
    router.setsockopt(zmq.SNDHWM, 0)  # With a limit, a ROUTER would drop messages above it.
    secure(router, keys)
    router.setsockopt(zmq.USE_FD, listener.detach())
    router.bind(listener.endpoint)
    return router


def client_socket(context: Context, server: ServerInfo, keys: KeyPair | None, largest: int, patience: float) -> Socket:
    """Return a DEALER that is connected to a server.

    Args:
        context: libzmq's context.
        server: The server.
        keys: CURVE keys; None for no encryption.
        largest: Bytes of the largest frame.
        patience: Seconds of silence that count as a failure.
    """
    dealer: Socket = context.socket(zmq.DEALER)
    dealer.copy_threshold = SMALL_BYTES
    dealer.linger = LINGER_MS
    dealer.setsockopt(zmq.MAXMSGSIZE, largest)
    dealer.setsockopt(zmq.SNDHWM, 0)
    dealer.setsockopt(zmq.RCVHWM, 0)
    dealer.setsockopt(zmq.RECONNECT_IVL, 50)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    notice_silence(dealer, patience, largest)
    secure(dealer, keys, server.public_key)
    dealer.connect(server.endpoint)
    return dealer


def secure(socket: Socket, keys: KeyPair | None, server: str = "") -> None:
    """Set up the encryption of a socket; without keys, nothing is encrypted.

    Args:
        socket: The socket, not connected or bound yet.
        keys: CURVE keys of this process; None for no encryption.
        server: Public key of the server to connect to; empty if this process is the server.
    """
    if not server:
        socket.zap_domain = ZAP_DOMAIN
    if keys is None:
        return
    if server:
        socket.curve_serverkey = server.encode()
    else:
        socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()


def notice_silence(socket: Socket, seconds: float, largest: int = 0) -> None:
    """Have libzmq renew a connection that is silent, or that is not established.

    libzmq renews a connection whose stream has ended or broken. But if a length was corrupted on its way, the other end
    waits for bytes that were never sent, and only a heartbeat without an answer shows the fault. That takes at most 5/8
    of the given seconds. A frame is seen only when it is complete, so that the largest frame may need more time.

    Args:
        socket: The socket, not connected yet.
        seconds: Seconds of silence that count as a failure.
        largest: Bytes of the largest frame.
    """
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(125 * seconds))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(max(500 * seconds, 1000 * largest / SLOWEST)))
    socket.setsockopt(zmq.HANDSHAKE_IVL, KNOCK_MS)


def send(socket: Socket, frame: Any) -> None:
    """Send a frame without waiting, over a new connection if libzmq has given up the last one.

    libzmq gives up a connection when a byte was corrupted on its way, and never connects again by itself.
    """
    try:
        socket.send(frame, zmq.NOBLOCK, copy=False)
    except zmq.Again:
        reconnect(socket)
        socket.send(frame, zmq.NOBLOCK, copy=False)


def reconnect(socket: Socket) -> None:
    """Renew a socket's only connection; messages that are on their way are lost."""
    endpoint = socket.get_string(zmq.LAST_ENDPOINT)
    linger, socket.linger = socket.linger, 0
    socket.disconnect(endpoint)
    socket.linger = linger
    socket.connect(endpoint)


def largest_frame(payload: int) -> int:
    """Return the bytes of the largest frame that a :class:`Bundle` sends, from those of the largest payload."""
    return max(payload, BUNDLE_BYTES + SMALL_BYTES + (MOST_TOGETHER + 1) * HEADER_BYTES)


class Bundle:
    """Messages to one peer; small messages may wait for each other and are then sent together.

    Most parameters of a CNN are small, and each single message wakes a thread at both ends. Every libzmq message has
    only one frame: libzmq aborts the process if a connection breaks within a message of several frames at the moment
    when its socket is closed. A large payload is not copied, and follows the frame with its header as a message of its
    own.

    Args:
        to: The socket.
        route: Route of the peer, if the socket is a ROUTER.

    Attributes:
        route: Route of the peer, if the socket is a ROUTER.
    """

    def __init__(self, to: Socket, route: bytes | None = None) -> None:
        self.route = route
        self._to = to
        self._waiting: list[Any] = []
        self._bytes = 0

    def send(self, header: Header, payload: Any = b"", wait: bool = False) -> None:
        """Send a message after those that wait; a small message may `wait` with them.

        A large payload's memory is kept alive, and read later by a thread of libzmq.
        """
        self._waiting.append(header.pack())
        if len(payload) > SMALL_BYTES:
            self.flush()
            self._leave(payload)
            return
        self._waiting.append(payload)
        self._bytes += len(payload)
        if not wait or len(self._waiting) == 2 * MOST_TOGETHER or self._bytes >= BUNDLE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Send the waiting messages."""
        if self._waiting:
            frame = b"".join(self._waiting)
            self._waiting, self._bytes = [], 0
            self._leave(frame)

    def _leave(self, frame: Any) -> None:
        if self.route is not None:
            self._to.send(self.route, zmq.SNDMORE)
        send(self._to, frame)


def take(socket: Socket, routed: bool) -> tuple[bytes, zmq.Frame]:
    """Return the sender's route and the next frame of a socket.

    The frame is empty if the message has further frames: all messages of this package have one.

    Args:
        socket: The socket.
        routed: Whether the socket is a ROUTER, which puts a frame with the sender's route first.

    Raises:
        zmq.Again: No message is waiting.
    """
    route = socket.recv(zmq.NOBLOCK) if routed else b""  # Another frame always follows the route.
    frame = socket.recv(zmq.NOBLOCK, copy=False)
    if not frame.more:
        return route, frame
    while socket.recv(zmq.NOBLOCK, copy=False).more:
        pass
    return route, zmq.Frame()


def key_of(frame: zmq.Frame) -> str:
    """Return the CURVE key of a frame's sender, in Z85 form, as the gatekeeper admitted it; "" for an empty frame."""
    return str(frame.get("User-Id")) if len(frame) else ""  # The empty frame of `take` was not received from libzmq.


class Received(NamedTuple):
    """A message that is not checked yet; `user` is the sender's CURVE key."""

    route: bytes
    header: bytes
    payload: memoryview
    user: str


class Inbox:
    """Messages that the :class:`Bundle` of each peer sends to a socket.

    Args:
        socket: A DEALER, or a ROUTER.
        session: Number of the run.
        routed: Whether the socket is a ROUTER.
        encrypted: Whether connections are encrypted.
    """

    def __init__(self, socket: Socket, session: int, routed: bool, encrypted: bool) -> None:
        self._socket = socket
        self._session = session
        self._routed = routed
        self._has_users = encrypted and routed
        self._open: dict[bytes, bytes] = {}  # by route, the header whose payload is the next frame

    def receive(self) -> list[Received]:
        """Return the messages that the next frame completes; a frame that no bundle sends becomes one invalid message.

        Raises:
            zmq.Again: No frame is waiting.
        """
        route, frame = take(self._socket, self._routed)
        user = key_of(frame) if self._has_users else ""
        header, rest = self._open.pop(route, None), frame.buffer
        # If the connection was lost between header and payload, this frame is not the payload.
        if header is not None and not begins(rest, self._session):
            return [Received(route, header, rest, user)]
        messages: list[Received] = []
        while begins(rest, self._session):
            header, length = bytes(rest[:HEADER_BYTES]), length_in(rest)
            rest = rest[HEADER_BYTES:]
            if length > SMALL_BYTES and not len(rest):
                self._open[route] = header
                if len(self._open) > MOST_OPEN:
                    del self._open[next(iter(self._open))]
                return messages
            messages.append(Received(route, header, rest[:length], user))
            rest = rest[length:]
        if messages and not len(rest):
            return messages
        return [Received(route, bytes(rest[:HEADER_BYTES]), rest[HEADER_BYTES:], user)]  # `unpack` refuses it.


def allow_files(connections: int, process: str) -> None:
    """Raise this process's limit on open files to its maximum, so that strangers' connections cannot lock members out.

    Args:
        connections: Least number of connections and sockets, each of which is a file.
        process: Name of this process in the error.

    Raises:
        ConfigurationError: The limit cannot be raised far enough.
    """
    count = OWN_FILES + connections

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        raise ConfigurationError(
            f"{process} needs {count} open files for its connections, and the limit is {hard}: raise the limit "
            "(`ulimit -Hn`, LimitNOFILE or limits.conf), or use fewer workers and servers"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def allow_threads(processes: int) -> None:
    """Check that this user may have the threads that some processes will start: libzmq aborts without them.

    Raises:
        ConfigurationError: The user's limit is too low.
    """
    go_on, size = threading.Event(), threading.stack_size(1 << 16)
    threads = [threading.Thread(target=go_on.wait) for _ in range(processes * THREADS)]
    try:
        for thread in threads:
            thread.start()
    except RuntimeError as error:
        raise ConfigurationError(
            f"{processes} processes on this machine need about {len(threads)} threads, which is more than this user "
            "may start: raise the limit (`ulimit -u`, TasksMax or pids.max), or use fewer workers or servers"
        ) from error
    finally:
        go_on.set()
        threading.stack_size(size)
        for thread in threads:
            if thread.ident is not None:
                thread.join()
