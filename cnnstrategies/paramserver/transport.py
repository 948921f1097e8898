"""Sockets of the data plane: a server's ROUTER, a worker's DEALERs, and sends without copies."""

import socket
from pathlib import Path

from cnnstrategies.paramserver.security import check_endpoint


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
