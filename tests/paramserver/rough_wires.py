"""Wires between the processes of a run, each of which may do any harm that wires do: see `FAULTS`."""

import contextlib
import random
import selectors
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field

FAULTS = ("nothing", "nothing", "byte", "byte", "drop", "half", "stall")
HERE, FAR = "127.0.0.1", "127.0.0.2"  # A wire is reached at the same port of another address.
STALL = 20.0  # seconds
NOTICED = 0.5  # seconds that this thread needs at most if it gets to run
LATEST = 0.3  # seconds that bytes may need


@dataclass
class End:
    """One end of a connection."""

    socket: socket.socket
    carried: int = 0  # bytes that have come in here
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)  # to leave at the other end, and when
    deaf: bool = False  # what comes in here is lost


@dataclass
class Connection:
    """A connection, and what is done to it: a fault at one of its ends (`side`), with one byte (`place`)."""

    ends: tuple[End, End]  # who has connected, and to whom
    fault: str
    side: int
    place: int
    delay: float  # seconds of each byte
    held: float = 0.0  # until then nothing arrives


class Wires(threading.Thread):
    """Carries bytes, in a thread.

    Args:
        seed: What is done to which connection depends on it.
        faults: Which there are.
        faulty: How many connections of each wire are hit, the first ones: so every run comes to an end.
        lost: Which part of the pieces that come is lost, whatever the connection.

    Attributes:
        met: The faults that have come to pass, and when.
        starved: Seconds in which this thread did not get to run: nor, then, did the processes.
    """

    def __init__(self, seed: int, faults: tuple[str, ...] = FAULTS, faulty: int = 6, lost: float = 0.0) -> None:
        super().__init__(daemon=True)
        self.met: list[tuple[str, float]] = []
        self.starved = 0.0
        self._chance = random.Random(seed)
        self._faults = faults
        self._faulty = faulty
        self._lost = lost
        self._selector = selectors.DefaultSelector()
        self._connections: list[Connection] = []
        self._counts: dict[int, int] = {}
        self._over = False

    def lay(self, port: int) -> None:
        """Lay a wire to a port; before the thread is started."""
        listener = socket.create_server((FAR, port))
        self._counts[port] = 0
        self._selector.register(listener, selectors.EVENT_READ, port)

    def run(self) -> None:
        """Carry."""
        looked = time.monotonic()
        while not self._over:
            for key, _ in self._selector.select(0.005):
                if isinstance(key.data, int):
                    self._accept(key.fileobj, key.data)  # type: ignore[arg-type]
                else:
                    self._take(*key.data)
            now = time.monotonic()
            self.starved += max(0.0, now - looked - NOTICED)
            looked = now
            for connection in list(self._connections):
                self._hand_over(connection, now)

    def end(self) -> None:
        """Stop."""
        self._over = True
        self.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _accept(self, listener: socket.socket, port: int) -> None:
        near, _ = listener.accept()
        try:
            far = socket.create_connection((HERE, port), 1)
        except OSError:
            near.close()
            return
        chance, self._counts[port] = self._chance, self._counts[port] + 1
        fault = chance.choice(self._faults) if self._counts[port] <= self._faulty else "nothing"
        delay = chance.choice([0.0, chance.uniform(0, LATEST)])
        place = int(10 ** chance.uniform(0, 4.2))
        connection = Connection((End(near), End(far)), fault, chance.randrange(2), place, delay)
        self._connections.append(connection)
        for side, end in enumerate(connection.ends):
            end.socket.setblocking(False)
            self._selector.register(end.socket, selectors.EVENT_READ, (connection, side))

    def _take(self, connection: Connection, side: int) -> None:
        """Take what has come in at an end, with what is done to it."""
        if connection not in self._connections:
            return
        end = connection.ends[side]
        try:
            data = end.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(connection)
            return
        now = time.monotonic()
        place = connection.place - end.carried
        end.carried += len(data)
        if side == connection.side and 0 <= place < len(data) and connection.fault != "nothing":
            self.met.append((connection.fault, now))
            if connection.fault == "byte":
                data = data[:place] + bytes([data[place] ^ 1 << self._chance.randrange(8)]) + data[place + 1 :]
            elif connection.fault == "drop":
                self._close(connection)
                return
            elif connection.fault == "half":
                end.deaf = True
                with contextlib.suppress(OSError):
                    connection.ends[1 - side].socket.shutdown(socket.SHUT_WR)
            else:
                connection.held = now + STALL
        if self._chance.random() < self._lost:
            self.met.append(("lost", now))
        elif not end.deaf:
            end.waiting.append((now + connection.delay, data))

    def _hand_over(self, connection: Connection, now: float) -> None:
        for end, other in (connection.ends, connection.ends[::-1]):
            while end.waiting and max(connection.held, end.waiting[0][0]) <= now:
                due, data = end.waiting.popleft()
                try:
                    sent = other.socket.send(data)
                except BlockingIOError:
                    sent = 0
                except OSError:
                    self._close(connection)
                    return
                if sent < len(data):
                    end.waiting.appendleft((due, data[sent:]))
                    break

    def _close(self, connection: Connection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            for end in connection.ends:
                self._selector.unregister(end.socket)
                with contextlib.suppress(OSError):
                    end.socket.shutdown(socket.SHUT_RDWR)  # Processes that were forked have it, too.
                end.socket.close()
