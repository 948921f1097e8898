"""A run on one machine listens on the loopback alone; left to themselves torch's store and gloo choose others, too."""

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator

from lightning.pytorch.strategies import ParallelStrategy, Strategy
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from cnnstrategies._lightning_private import ranks_are_children
from cnnstrategies.cluster.addresses import resolve, use_interface

LOOPBACK, INTERFACE = "127.0.0.1", "lo"
SERVED = "TORCHELASTIC_USE_AGENT_STORE"  # torch's: another process serves the store, and rank 0 only connects to it.


def serve_on_loopback(address: str = LOOPBACK, port: int = 0) -> TCPStore:
    """A store of torch's that listens on the loopback alone; by itself it listens on all interfaces.

    ``torch.distributed`` opens it again later: within a process both share one server.

    Args:
        address: One of the loopback's.
        port: Its port; 0 takes a free one.

    Raises:
        OSError: The port is taken.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family)
    port = listener.getsockname()[1]
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
    )


@contextlib.contextmanager
def on_loopback(strategy: Strategy) -> Iterator[None]:
    """Have what torch opens for a run on one machine listen on the loopback alone; on several do nothing.

    What is set of ``MASTER_ADDR``, ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME`` is kept.

    Args:
        strategy: This process is one of its ranks, not connected to the others yet, or will start all of them.
    """
    environment = getattr(strategy, "cluster_environment", None)
    several = getattr(strategy, "num_nodes", 1) > 1
    if several or not isinstance(strategy, ParallelStrategy) or environment is None:
        yield
        return
    use_interface(INTERFACE)
    os.environ.setdefault("MASTER_ADDR", LOOPBACK)
    address, store = resolve(environment.main_address), None
    if strategy.local_rank == 0 and ipaddress.ip_address(address).is_loopback:
        with contextlib.suppress(OSError):  # It is served already; or by another program, as torch will say.
            store = serve_on_loopback(address, environment.main_port)
    # Inside a child its number is known.
    starts = ranks_are_children(strategy.launcher) and not environment.creates_processes_externally
    with _served() if store is not None and starts else contextlib.nullcontext():
        yield
    del store


@contextlib.contextmanager
def _served() -> Iterator[None]:
    os.environ[SERVED] = str(True)
    try:
        yield
    finally:
        del os.environ[SERVED]
