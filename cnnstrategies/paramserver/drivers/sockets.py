"""Sockets of the data plane: a server's ROUTER and the DEALERs of workers and servers.

Large payloads are sent without a copy. This module also checks the operating system's limits on the number of open
files and of threads. Each connection needs an open file.
"""

import os
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
    """A bound, listening socket, which a server takes over as soon as the server knows the specification.

    Until then, the kernel queues new connections.

    Args:
        endpoint: ``ipc://path`` or ``tcp://address:port``, with ``*`` as the port for any free port.
        encrypted: Whether the server will use encryption.
        insecure: Whether an endpoint with TCP may be used without encryption.

    Attributes:
        endpoint: The endpoint, with the actual port.

    Raises:
        ConfigurationError: The endpoint is not valid, or uses TCP without encryption although `insecure` is false.
        OSError: The endpoint cannot be bound.
    """

    def __init__(self, endpoint: str, encrypted: bool = False, insecure: bool = False) -> None:
        check_endpoint(endpoint, encrypted, insecure)
        if endpoint.startswith("ipc://"):
            path = endpoint.removeprefix("ipc://")
            Path(path).unlink(missing_ok=True)  # Remove the file that a killed process has left behind.
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.bind(path)
            self._socket.listen(128)
            self.endpoint = endpoint
        else:
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            self._socket = socket.create_server((host, 0 if port == "*" else int(port)), backlog=128)
            self.endpoint = f"tcp://{host}:{self._socket.getsockname()[1]}"

    def share(self) -> int:
        """Return another file descriptor of the listening socket. The caller owns the descriptor and must close it."""
        return os.dup(self._socket.fileno())

    def close(self) -> None:
        """Close the socket, and remove the file of an ``ipc://`` endpoint."""
        self._socket.close()
        if self.endpoint.startswith("ipc://"):
            Path(self.endpoint.removeprefix("ipc://")).unlink(missing_ok=True)


Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

# A server's socket keeps at most WAITING_BYTES of unread messages for each connection, but always WAITING_MESSAGES. All
# other messages stay in the sender's queue, so that they do not fill the server's memory. WAITING_BYTES is more than
# most workers send in a step, because libzmq 4.3.5 aborts the server in a rare case: the connection breaks while a
# message waits for its place in the queue, and a heartbeat has arrived after this message
# (https://github.com/zeromq/libzmq/issues/4364).
WAITING_MESSAGES, WAITING_BYTES = 64, 1 << 28
LINGER_MS = 500  # milliseconds for which a closed socket still sends its last messages
# Time-out of the handshake in milliseconds, after which the process tries to connect again. The time-out is short,
# because a server refuses a new member until the view with this member has reached the server. But the time-out is
# long enough for a handshake over a connection with a latency of one second.
KNOCK_MS = 3000
# Delayed small messages are sent in one frame as soon as there are MOST_TOGETHER messages, or their payloads have
# BUNDLE_BYTES bytes in total.
MOST_TOGETHER, BUNDLE_BYTES = 32, 1 << 19
# Largest number of headers for which the payload has not arrived yet. If a connection is closed after a header, the
# payload never arrives, so without a limit these headers would fill the memory.
MOST_OPEN = 1 << 12
# Speed of a connection, in bytes per second (10 Mbit/s). On a slower connection, time-outs may expire during the
# transfer of a large frame.
SLOWEST = 1_250_000
IO_THREADS = 2  # number of libzmq's I/O threads in each process
THREADS = 8  # approximate number of threads in a process, including libzmq's and torch's
OWN_FILES = 256  # estimated number of files that a process opens in addition to its connections


def server_socket(context: Context, listener: Listener, keys: KeyPair | None, largest: int) -> Socket:
    """Create a server's ROUTER from the socket of a listener.

    Args:
        context: libzmq's context.
        listener: The bound, listening socket. Another ROUTER can use it later.
        keys: CURVE keys of this process; None for no encryption.
        largest: Size of the largest frame, in bytes. libzmq disconnects a peer that announces a larger frame.
    """
    router: Socket = context.socket(zmq.ROUTER)
    router.copy_threshold = SMALL_BYTES
    router.linger = LINGER_MS
    router.setsockopt(zmq.MAXMSGSIZE, largest)
    router.setsockopt(zmq.RCVHWM, max(WAITING_MESSAGES, WAITING_BYTES // largest))
    router.setsockopt(zmq.SNDHWM, 0)  # no limit on queued messages, because a ROUTER drops messages above a limit
    secure(router, keys)
    router.setsockopt(zmq.USE_FD, listener.share())
    router.bind(listener.endpoint)
    return router


def client_socket(context: Context, server: ServerInfo, keys: KeyPair | None, largest: int, patience: float) -> Socket:
    """Create a DEALER, and connect it to a server.

    Args:
        context: libzmq's context.
        server: The server.
        keys: CURVE keys of this process; None for no encryption.
        largest: Size of the largest frame, in bytes.
        patience: Seconds without a message from the server after which the connection counts as broken.
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
    """Set a socket's encryption options. Call this before the socket is connected or bound.

    Args:
        socket: The socket.
        keys: CURVE keys of this process; None for no encryption.
        server: Public key of the server to connect to; an empty string if this process is the server.
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
    """Make libzmq reconnect when the peer is silent, or does not complete the handshake.

    Without this function, libzmq reconnects only when the TCP connection is closed or broken. But if the network
    corrupts a frame's length, the connection stays open, and the receiver waits for bytes that were never sent.
    Therefore libzmq sends heartbeats, and reconnects within 5/8 of `seconds` when the peer does not reply to a
    heartbeat.

    libzmq cannot see the reply to a heartbeat before a frame that is being received is complete. The heartbeat's
    time-out is therefore at least the time in which the largest frame is transferred at the speed `SLOWEST`.

    Args:
        socket: The socket, which is not connected yet.
        seconds: Seconds without a message from the peer after which the connection counts as broken.
        largest: Size of the largest frame, in bytes.
    """
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(125 * seconds))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(max(500 * seconds, 1000 * largest / SLOWEST)))
    socket.setsockopt(zmq.HANDSHAKE_IVL, KNOCK_MS)


def send(socket: Socket, frame: Any) -> None:
    """Send a frame without waiting.

    If the network has corrupted a byte, libzmq may close the connection and not connect again. In this case, this
    function connects again, and sends the frame over the new connection.
    """
    try:
        socket.send(frame, zmq.NOBLOCK, copy=False)
    except zmq.Again:
        reconnect(socket)
        socket.send(frame, zmq.NOBLOCK, copy=False)


def reconnect(socket: Socket) -> None:
    """Close a socket's only connection, and connect again. Messages that are not delivered yet are lost."""
    endpoint = socket.get_string(zmq.LAST_ENDPOINT)
    linger, socket.linger = socket.linger, 0
    socket.disconnect(endpoint)
    socket.linger = linger
    socket.connect(endpoint)


def largest_frame(payload: int) -> int:
    """Return the size in bytes of the largest frame that a :class:`Bundle` sends.

    Args:
        payload: Size of the largest payload, in bytes.
    """
    return max(payload, BUNDLE_BYTES + SMALL_BYTES + (MOST_TOGETHER + 1) * HEADER_BYTES)


class Bundle:
    """Sender of messages to one peer, which puts several small messages into one frame.

    Most parameters of a CNN are small. Each libzmq message wakes a thread in the sender and in the receiver, so fewer
    messages are faster.

    A large payload is sent without a copy, in a separate frame after the frame with the header. These two frames are
    two libzmq messages and not one message of two frames. The reason is a bug: libzmq aborts the process if a
    connection breaks inside a message of several frames while its socket is being closed.

    Args:
        to: The socket over which the messages are sent.
        route: Route of the peer if the socket is a ROUTER; None for a DEALER.

    Attributes:
        route: The argument `route`.
    """

    def __init__(self, to: Socket, route: bytes | None = None) -> None:
        self.route = route
        self._to = to
        self._waiting: list[Any] = []
        self._bytes = 0

    def send(self, header: Header, payload: Any = b"", wait: bool = False) -> None:
        """Send a message after all earlier messages of this bundle.

        Args:
            header: Header of the message.
            payload: Payload of the message. A large payload is not copied: a thread of libzmq reads the payload later,
                and libzmq keeps the payload's memory alive until then.
            wait: Whether to delay a small message until :meth:`flush` is called, or until enough small messages are
                waiting.
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
        """Send all delayed messages of this bundle in one frame."""
        if self._waiting:
            frame = b"".join(self._waiting)
            self._waiting, self._bytes = [], 0
            self._leave(frame)

    def _leave(self, frame: Any) -> None:
        if self.route is not None:
            self._to.send(self.route, zmq.SNDMORE)
        send(self._to, frame)


def take(socket: Socket, routed: bool) -> tuple[bytes, zmq.Frame]:
    """Receive the next libzmq message, and return the sender's route and the message's frame.

    All messages of this package have one frame. A message of several frames comes from another program, so an empty
    frame is returned in its place.

    Args:
        socket: The socket.
        routed: Whether the socket is a ROUTER, which puts a frame with the sender's route before the message.

    Raises:
        zmq.Again: No message has arrived.
    """
    route = socket.recv(zmq.NOBLOCK) if routed else b""
    frame = socket.recv(zmq.NOBLOCK, copy=False)
    if not frame.more:
        return route, frame
    while socket.recv(zmq.NOBLOCK, copy=False).more:
        pass
    return route, zmq.Frame()


def key_of(frame: zmq.Frame) -> str:
    """Return the CURVE public key of a frame's sender, encoded in Z85; an empty string for an empty frame.

    The key is the user id that the gatekeeper gave to the connection.
    """
    return str(frame.get("User-Id")) if len(frame) else ""  # An empty frame was created by `take`, without a user id.


class Received(NamedTuple):
    """A message that has arrived and is not checked yet.

    Attributes:
        route: Route of the sender; empty if the socket is a DEALER.
        header: Bytes of the header.
        payload: Bytes of the payload.
        user: The sender's CURVE public key; empty without encryption and for a DEALER.
    """

    route: bytes
    header: bytes
    payload: memoryview
    user: str


class Inbox:
    """Receiver of the messages that peers send with a :class:`Bundle`.

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
        self._open: dict[bytes, bytes] = {}  # By route: the header whose payload is expected in the next frame.

    def receive(self) -> list[Received]:
        """Receive the next frame, and return the messages that this frame completes.

        A frame that a :class:`Bundle` cannot have sent is returned as one message whose header is not valid.

        Raises:
            zmq.Again: No frame has arrived.
        """
        route, frame = take(self._socket, self._routed)
        user = key_of(frame) if self._has_users else ""
        header, rest = self._open.pop(route, None), frame.buffer
        # A large payload follows its header in a separate frame. But if the connection broke after the header, the next
        # frame begins with the header of a new message, and the old header is dropped.
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
        # The frame is not valid. The caller's call of `unpack` with this header raises the error.
        return [Received(route, bytes(rest[:HEADER_BYTES]), rest[HEADER_BYTES:], user)]


def allow_files(connections: int, process: str) -> None:
    """Raise this process's limit on open files to the hard limit.

    The limit must be high, because other programs may also open connections to this process. If these connections used
    up the limit, members could not connect.

    Args:
        connections: Number of connections and sockets that the process needs; each of them needs a file.
        process: Name of this process in the error message.

    Raises:
        ConfigurationError: The hard limit is too low.
    """
    count = OWN_FILES + connections
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        raise ConfigurationError(
            f"{process} needs {count} open files for its connections, but the hard limit is {hard}: raise the limit "
            "(`ulimit -Hn`, LimitNOFILE or limits.conf), or use fewer workers or servers"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def allow_threads(processes: int) -> None:
    """Check that the limit on the user's threads is high enough for the processes that will be started.

    libzmq aborts a process if it cannot start a thread. To check the limit, this function starts as many threads as
    these processes need, and ends the threads again.

    Args:
        processes: Number of processes that will be started on this machine.

    Raises:
        ConfigurationError: The limit is too low.
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
