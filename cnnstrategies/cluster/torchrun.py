"""Under torchrun: a store of the ranks' own for each start."""

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from cnnstrategies.cluster.addresses import free_port
from cnnstrategies.cluster.loopback import LOOPBACK, SERVED, serve_on_loopback
from cnnstrategies.errors import ConfigurationError

SECONDS = 60.0
FREE_PORT = "free port"


@contextlib.contextmanager
def own_store(listens: bool = False) -> Iterator[None]:
    """Have rank 0 serve the store through which the ranks find each other, instead of torchrun's agent.

    The agent's store outlives a restart, and restarted ranks read from it the addresses of the dead ones: gloo then
    tries to connect to these until its time-out, and the restart fails (seen with torch 2.13 and 2.15). Here each
    start has a store of its own; its port is made known through the agent's. Nothing happens when torchrun's agent
    serves no store.

    Args:
        listens: The run opens no store of torch's, but listens at the main port itself: make that another port, which
            is free on rank 0's machine.

    Raises:
        ConfigurationError: Rank 0 has not served one in time.
    """
    if os.environ.get(SERVED) != "True":
        yield
        return
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=SECONDS)
    agent = PrefixStore("cnnstrategies", TCPStore(address, port, is_master=False, timeout=timeout))
    server, alone = None, os.environ.get("GROUP_WORLD_SIZE") == "1"
    if alone:
        address = os.environ["MASTER_ADDR"] = LOOPBACK
    if os.environ["RANK"] == "0":
        # torch.distributed opens it again: within a process both share one server.
        server = (
            serve_on_loopback()
            if alone
            else TCPStore(address, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
        )
        if listens:
            server.set(FREE_PORT, str(free_port()))
        agent.set("port", str(server.port))
    main_port = _current_port(agent, address)
    if listens:
        store = server if server is not None else TCPStore(address, main_port, is_master=False, timeout=timeout)
        main_port = int(store.get(FREE_PORT))
        del store
    os.environ["MASTER_PORT"] = str(main_port)
    os.environ[SERVED] = "False"
    yield
    del server


def _current_port(agent: PrefixStore, address: str) -> int:
    """The port on which rank 0 listens; what a rank 0 that has died has left there is tried in vain."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if agent.check(["port"]):
            port = int(agent.get("port"))
            with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=5):
                return port
        time.sleep(0.05)
    raise ConfigurationError(
        f"{socket.gethostname()} has not reached rank 0 on {address} for {SECONDS:g} s: it has failed, or a firewall "
        "blocks the connection; allow TCP connections on all ports between the machines of the run"
    )
