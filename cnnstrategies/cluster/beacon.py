"""A small server on each host of a run that answers "I am here", and the question to it."""

import socket
import threading
import time
from dataclasses import dataclass
from typing import Literal

PING, HERE = b"ping\n", b"here\n"

Answer = Literal["here", "refused", "silent"]


@dataclass(frozen=True)
class Peer:
    """Where a host of the run answers.

    Attributes:
        node: Number of the host in the run.
        host: Its own name.
        address: Its IP address towards the other hosts.
        port: Of its beacon.
    """

    node: int
    host: str
    address: str
    port: int

    def __str__(self) -> str:
        return f"{self.host} ({self.address}, node {self.node})"


class Beacon:
    """Answers ``ping`` on a free port until it is closed.

    Args:
        address: The IP address to listen on.
    """

    def __init__(self, address: str) -> None:
        self._socket = socket.create_server(
            (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET, backlog=1024
        )
        self.port = int(self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, name="beacon", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # It was closed.
            with connection:
                try:
                    connection.settimeout(1.0)
                    if connection.recv(len(PING)) == PING:
                        connection.sendall(HERE)
                except OSError:
                    continue

    def close(self) -> None:
        """Stop to answer."""
        # Closing alone does not wake a thread that accepts.
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


def ping(peer: Peer, seconds: float) -> tuple[Answer, str]:
    """Ask a host's beacon.

    Args:
        peer: The host.
        seconds: How long to wait for its answer.

    Returns:
        ``here``, ``refused`` (the host answers, but its part of the run has ended) or ``silent``; and the reason for
        having no answer.
    """
    deadline = time.monotonic() + seconds
    try:
        with socket.create_connection((peer.address, peer.port), timeout=seconds) as connection:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            connection.sendall(PING)
            answer = connection.recv(len(HERE))
            return ("here", "") if answer else ("refused", "connection closed")
    except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError) as error:
        return "refused", str(error.strerror)
    except TimeoutError:
        return "silent", f"no answer in {seconds:g} s"
    except OSError as error:
        return "silent", str(error.strerror)
