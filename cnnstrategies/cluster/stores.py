"""torch.distributed stores, through which the ranks of a run exchange addresses."""

import contextlib
import ipaddress
import os
import socket
import time
from collections.abc import Iterator

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

LOOPBACK = "127.0.0.1"
# Environment variable of torch: "True" if a process that is not a rank, such as torchrun's agent, serves the store.
SERVED = "TORCHELASTIC_USE_AGENT_STORE"
POLL = 0.05  # Seconds between two checks of a store or a file.


def serve_on_loopback(address: str = LOOPBACK, port: int = 0) -> TCPStore:
    """Return a torch.distributed store that listens only on the loopback interface.

    Stores normally listen on all interfaces. If ``torch.distributed`` later opens a store at this port in this process,
    the new store uses the server of the store that this function returns.

    Args:
        address: Address of the loopback interface.
        port: Port to listen at; 0 for any free port.

    Raises:
        OSError: The port is in use.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family)
    port = listener.getsockname()[1]
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
    )


@contextlib.contextmanager
def served_by_parent() -> Iterator[None]:
    """Tell torch, in the ranks that this process starts inside this context, that this process serves their store."""
    os.environ[SERVED] = str(True)
    try:
        yield
    finally:
        del os.environ[SERVED]


def serve(address: str, port: int = 0) -> tuple[int, TCPStore]:
    """Return the port of a new torch.distributed store, and the store.

    Args:
        address: IP address at which to listen. If it is not an address of the loopback interface, the store listens on
            all interfaces.
        port: Port to listen at; 0 for any free port.

    Raises:
        OSError: The port is in use.
    """
    if ipaddress.ip_address(address).is_loopback:
        store = serve_on_loopback(address, port)
    else:
        try:
            store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, multi_tenant=True)
        except RuntimeError as error:
            raise OSError(str(error).splitlines()[0]) from error
    return store.port, store


def missing_after(store: Store, keys: list[str], seconds: float) -> list[str]:
    """Wait until all keys exist in the store, for at most ``seconds``. Return the keys that are still missing."""
    deadline = time.monotonic() + seconds
    while keys and not store.check(keys):
        if time.monotonic() > deadline:
            return [key for key in keys if not store.check([key])]
        time.sleep(POLL)
    return []
