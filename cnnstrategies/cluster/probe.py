"""Small server on each host of a run. Other hosts use the server to test and measure their connection to this host."""

import contextlib
import socket
import statistics
import struct
import threading
import time
from dataclasses import dataclass
from typing import Literal

Answer = Literal["here", "refused", "silent"]
# ECHO requests one byte from the server. COUNT requests that the server counts the bytes that follow, and replies with
# their number.
ECHO, COUNT = b"E", b"N"
ROUNDS = 30  # Number of round trips in a measurement.
SEND_SECONDS = 0.3  # Seconds for which data is sent in a measurement of the bandwidth.
CHUNK = bytes(2**18)


class Probe:
    """Server thread that answers other hosts' requests until :meth:`close` is called.

    The server listens at an IP address of this host and a free port.
    """

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=1024)
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._accept, name="probe", daemon=True).start()

    def close(self) -> None:
        """Stop the server, so that it does not answer requests any more."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # The probe was closed.
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while request := connection.recv(1):
                if request == ECHO:
                    connection.sendall(ECHO)
                elif request == COUNT:
                    buffer, received = bytearray(2**20), 0
                    while size := connection.recv_into(buffer):
                        received += size
                    connection.sendall(struct.pack("!Q", received))


@dataclass(frozen=True)
class ProbedHost:
    """A host of the run.

    Attributes:
        node: Number of the host.
        host: Name that the host has announced for itself.
        address: IP address at which the other hosts reach this host.
        port: Port of the host's :class:`Probe`.
    """

    node: int
    host: str
    address: str
    port: int

    def __str__(self) -> str:
        return f"{self.host} ({self.address}, node {self.node})"


def ping(peer: ProbedHost, seconds: float) -> tuple[Answer, str]:
    """Test the connection to a host's :class:`Probe`.

    Args:
        peer: The host.
        seconds: Time-out in seconds.

    Returns:
        The result and a reason. The result is ``here`` if the probe has answered. It is ``refused`` if the host has
        refused or closed the connection, because the run's processes on this host have ended. Otherwise it is
        ``silent``. The reason says why the probe has not answered; it is empty for ``here``.
    """
    deadline = time.monotonic() + seconds
    try:
        with socket.create_connection((peer.address, peer.port), timeout=seconds) as connection:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            connection.sendall(ECHO)
            return ("here", "") if connection.recv(1) else ("refused", "connection closed")
    except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError) as error:
        return "refused", str(error.strerror)
    except TimeoutError:
        return "silent", f"no answer in {seconds:g} s"
    except OSError as error:
        return "silent", str(error.strerror)


def measure(address: str, port: int, timeout: float) -> tuple[float, float]:
    """Measure the connection to another host's :class:`Probe`. This takes about half a second.

    Args:
        address: IP address of the other host.
        port: Port of the probe.
        timeout: Time-out of the connection, in seconds.

    Returns:
        The median round-trip time in seconds, and the bandwidth from this host to the other host over one TCP
        connection, in bytes per second.
    """
    with socket.create_connection((address, port), timeout=timeout) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            connection.sendall(ECHO)
            _receive(connection, 1)
            times.append(time.perf_counter() - start)
        start = time.perf_counter()
        connection.sendall(COUNT)
        while time.perf_counter() - start < SEND_SECONDS:
            connection.sendall(CHUNK)
        connection.shutdown(socket.SHUT_WR)
        received = struct.unpack("!Q", _receive(connection, 8))[0]
        seconds = time.perf_counter() - start
    return statistics.median(times), received / seconds


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionResetError("the other end closed the connection")
        data += part
    return data
