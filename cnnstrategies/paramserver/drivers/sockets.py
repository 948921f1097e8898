"""Sockets of the data plane: a server's ROUTER, a worker's DEALERs, and sends without copies.

And what the system must let a process have for them: files, of which each connection is one, and threads.
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
    """An address that is bound and listening, for a server whose specification is not known yet.

    Connections wait in the kernel until the server takes it over. The endpoint is ``ipc://path`` or
    ``tcp://address:port``; with port ``*`` for any free one, the attribute has that.

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
            self._socket.listen(128)
            self.endpoint = endpoint
        else:
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            self._socket = socket.create_server((host, 0 if port == "*" else int(port)), backlog=128)
            self.endpoint = f"tcp://{host}:{self._socket.getsockname()[1]}"

    def detach(self) -> int:
        """The listening socket's file descriptor, for whom it now belongs to."""
        return self._socket.detach()

    def close(self) -> None:
        """Stop listening, unless detached, and remove the file."""
        self._socket.close()
        if self.endpoint.startswith("ipc://"):
            Path(self.endpoint.removeprefix("ipc://")).unlink(missing_ok=True)


Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

# Messages that wait unread, of each connection to a server; what lies beyond waits at the sender.
WAITING_MESSAGES = 64
LINGER_MS = 500
# Until a member that a server does not know yet tries again; over links with a second from end to end it must do, too.
KNOCK_MS = 3000
# Small payloads wait for each other until they are as many or as large as this.
MOST_TOGETHER, BUNDLE_BYTES = 32, 1 << 19
MOST_OPEN = 1 << 12  # headers that are kept for payloads: of connections that ended there, too
SLOWEST = 1_250_000  # bytes per second that a connection has at least: 10 Mbit/s
IO_THREADS = 2  # of libzmq in each process: one copies for one connection while the other does for another
THREADS = 8  # of a process with its own, libzmq's and torch's, about
OWN_FILES = 256  # of a process besides its connections: its program, its data, libzmq's own


def server_socket(context: Context, listener: Listener, keys: KeyPair | None, largest: int) -> Socket:
    """A ROUTER on an address that is already bound, which belongs to it from now on.

    A peer that announces more than the bytes of the largest frame is disconnected before anything is allocated.
    """
    router: Socket = context.socket(zmq.ROUTER)
    router.copy_threshold = SMALL_BYTES
    router.linger = LINGER_MS
    router.setsockopt(zmq.MAXMSGSIZE, largest)
    router.setsockopt(zmq.RCVHWM, WAITING_MESSAGES)
    router.setsockopt(zmq.SNDHWM, 0)  # a ROUTER drops what is over its limit
    secure(router, keys)
    router.setsockopt(zmq.USE_FD, listener.detach())
    router.bind(listener.endpoint)
    return router


def client_socket(context: Context, server: ServerInfo, keys: KeyPair | None, largest: int, patience: float) -> Socket:
    """A DEALER that is connected to a server; so many seconds of silence are a failure."""
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
    """Encrypt what goes over a socket: to a server with a public key, or as one; without keys nothing is."""
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
    """Have libzmq make a connection anew over which nothing comes, or that does not come about.

    It does so itself where a stream has ended or broken; but where the other end waits for the rest of something that
    was never sent so long, because a length has changed on its way, only a question without an answer shows it. That
    takes at most 5/8 of the seconds that are a failure; a frame shows only when it is whole, so the largest one, of so
    many bytes, may take longer. The socket is not connected yet.
    """
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(125 * seconds))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(max(500 * seconds, 1000 * largest / SLOWEST)))
    socket.setsockopt(zmq.HANDSHAKE_IVL, KNOCK_MS)


def send(socket: Socket, frame: Any) -> None:
    """Send a frame without waiting, over a new connection where libzmq has given up the last.

    That it does when a byte came otherwise than it was sent, and never connects again by itself.
    """
    try:
        socket.send(frame, zmq.NOBLOCK, copy=False)
    except zmq.Again:
        reconnect(socket)
        socket.send(frame, zmq.NOBLOCK, copy=False)


def reconnect(socket: Socket) -> None:
    """Make a socket's one connection anew: what is on its way is lost."""
    endpoint = socket.get_string(zmq.LAST_ENDPOINT)
    linger, socket.linger = socket.linger, 0
    socket.disconnect(endpoint)
    socket.linger = linger
    socket.connect(endpoint)


def largest_frame(payload: int) -> int:
    """Bytes of the largest frame that a :class:`Bundle` sends, for those of the largest payload."""
    return max(payload, BUNDLE_BYTES + SMALL_BYTES + (MOST_TOGETHER + 1) * HEADER_BYTES)


class Bundle:
    """Sends messages to one peer; small ones may wait for each other and then leave together.

    Most parameters of a CNN are small, and each message on its own wakes a thread at both ends. What leaves is always
    one frame: libzmq ends this process where a connection breaks in the middle of a message of several, just when its
    socket is closed. A large payload follows the frame with its header, as a message of its own, for it is not copied.
    """

    def __init__(self, to: Socket, route: bytes | None = None) -> None:
        self.route = route
        self._to = to
        self._waiting: list[Any] = []
        self._bytes = 0

    def send(self, header: Header, payload: Any = b"", wait: bool = False) -> None:
        """Send a message after those that wait, or have it wait with them, if it is small.

        The memory of a large payload is read later, by libzmq's thread, and kept alive until then.
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
        """Send what waits."""
        if self._waiting:
            frame = b"".join(self._waiting)
            self._waiting, self._bytes = [], 0
            self._leave(frame)

    def _leave(self, frame: Any) -> None:
        if self.route is not None:
            self._to.send(self.route, zmq.SNDMORE)
        send(self._to, frame)


def take(socket: Socket, routed: bool) -> tuple[bytes, zmq.Frame]:
    """The frame that waits, and where it came from; an empty one if it was not alone, as all that is sent here is.

    At a ROUTER (`routed`) a frame with the sender's route comes first.

    Raises:
        zmq.Again: Nothing is waiting.
    """
    route = socket.recv(zmq.NOBLOCK) if routed else b""  # Another frame always follows.
    frame = socket.recv(zmq.NOBLOCK, copy=False)
    if not frame.more:
        return route, frame
    while socket.recv(zmq.NOBLOCK, copy=False).more:
        pass
    return route, zmq.Frame()


def key_of(frame: zmq.Frame) -> str:
    """The CURVE key with which a frame has come, in Z85 form, as the gatekeeper admitted it; of an empty one none."""
    return str(frame.get("User-Id")) if len(frame) else ""  # Libzmq tells nothing of one that has not come.


class Received(NamedTuple):
    """One message, not checked yet; `user` is the sender's CURVE key."""

    route: bytes
    header: bytes
    payload: memoryview
    user: str


class Inbox:
    """Takes apart what the :class:`Bundle` of each peer has sent to a DEALER, or a ROUTER (`routed`)."""

    def __init__(self, socket: Socket, session: int, routed: bool, encrypted: bool) -> None:
        self._socket = socket
        self._session = session
        self._routed = routed
        self._names = encrypted and routed
        self._open: dict[bytes, bytes] = {}  # By route, the header whose payload is the next frame.

    def receive(self) -> list[Received]:
        """The messages that are whole with the frame that came next; of one that no bundle sends only what is wrong.

        Raises:
            zmq.Again: Nothing is waiting.
        """
        route, frame = take(self._socket, self._routed)
        user = key_of(frame) if self._names else ""
        header, rest = self._open.pop(route, None), frame.buffer
        # If the connection was lost between the two, this is no payload.
        if header is not None and not begins(rest, self._session):
            return [Received(route, header, rest, user)]
        found: list[Received] = []
        while begins(rest, self._session):
            header, length = bytes(rest[:HEADER_BYTES]), length_in(rest)
            rest = rest[HEADER_BYTES:]
            if length > SMALL_BYTES and not len(rest):
                self._open[route] = header
                if len(self._open) > MOST_OPEN:
                    del self._open[next(iter(self._open))]
                return found
            found.append(Received(route, header, rest[:length], user))
            rest = rest[length:]
        if found and not len(rest):
            return found
        return [Received(route, bytes(rest[:HEADER_BYTES]), rest[HEADER_BYTES:], user)]  # The checks refuse it.


def allow_files(connections: int, who: str) -> None:
    """Raise this process's limit of open files as far as it may, so that strangers who connect keep no member out.

    Args:
        connections: How many it has at least, and sockets, each of which is a file, too.
        who: It is.

    Raises:
        ConfigurationError: It may not have so many.
    """
    count = OWN_FILES + connections
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        raise ConfigurationError(
            f"{who} needs {count} open files, for its connections, and may have {hard}: raise the limit (`ulimit -Hn`, "
            "LimitNOFILE or limits.conf), or use fewer workers and servers"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def allow_threads(processes: int) -> None:
    """Look whether this user may have the threads that so many processes will start: libzmq aborts without them."""
    go_on, size = threading.Event(), threading.stack_size(1 << 16)
    threads = [threading.Thread(target=go_on.wait) for _ in range(processes * THREADS)]
    try:
        for thread in threads:
            thread.start()
    except RuntimeError as error:
        raise ConfigurationError(
            f"{processes} processes on this machine need some {len(threads)} threads, and this user may not have "
            "so many more: raise the limit (`ulimit -u`, TasksMax or pids.max), or use fewer workers or servers"
        ) from error
    finally:
        go_on.set()
        threading.stack_size(size)
        for thread in threads:
            if thread.ident is not None:
                thread.join()
