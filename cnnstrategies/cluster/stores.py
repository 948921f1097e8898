"""The stores of torch's through which processes find each other: of hosts, of one machine, of torchrun's starts."""

import contextlib
import ipaddress
import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta

from lightning.pytorch.strategies import Strategy
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from cnnstrategies._lightning_private import ranks_are_children
from cnnstrategies.cluster.addresses import free_port, resolve, use_interface
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies.protocol import facts_of

LOOPBACK, INTERFACE = "127.0.0.1", "lo"
SERVED = "TORCHELASTIC_USE_AGENT_STORE"  # torch's: another process serves the store, and rank 0 only connects to it.
SECONDS = 60.0
POLL = 0.05  # seconds
FREE_PORT = "free port"


def serve_on_loopback(address: str = LOOPBACK, port: int = 0) -> TCPStore:
    """A store of torch's that listens on the loopback alone; by itself it listens on all interfaces.

    ``torch.distributed`` opens it again later: within a process both share one server. Port 0 takes a free one.

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
    facts = facts_of(strategy)
    environment = facts.environment
    if facts.host_count > 1 or environment is None:
        yield
        return
    use_interface(INTERFACE)
    os.environ.setdefault("MASTER_ADDR", LOOPBACK)
    address, store = resolve(environment.main_address), None
    if environment.local_rank() == 0 and ipaddress.ip_address(address).is_loopback:
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
        time.sleep(POLL)
    raise ConfigurationError(
        f"{socket.gethostname()} has not reached rank 0 on {address} for {SECONDS:g} s: it has failed, or a firewall "
        "blocks the connection; allow TCP connections on all ports between the machines of the run"
    )


def open_store(address: str, port: int, serve: bool, seconds: float) -> Store:
    """The store at the main address, through which the processes of a run find each other; rank 0 serves it.

    ``torch.distributed`` opens it again later: within a process both share one server.
    """
    if serve:
        resolve(address)  # torch's own client would retry, and print a stack.
    else:
        _wait_for_port(address, port, seconds)
    try:
        store = TCPStore(
            address,
            port,
            is_master=serve,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        raise ConfigurationError(
            f"{socket.gethostname()} cannot serve port {port}: {str(error).splitlines()[0]}; set MASTER_PORT to a free "
            "one on every machine"
        ) from error
    return PrefixStore("cnnstrategies", store)


def _wait_for_port(address: str, port: int, seconds: float) -> None:
    """Return when something listens there: torch's own client retries without saying why it fails."""
    deadline = time.monotonic() + seconds
    ip = resolve(address)
    reason = ""
    while (left := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((ip, port), timeout=min(left, 10)).close()
            return
        except TimeoutError:
            reason = "no answer: is the machine up, and does a firewall block the port?"
        except ConnectionRefusedError:
            reason = "it answers, but nothing listens there: has rank 0 been started, with the same MASTER_PORT?"
        except OSError as error:
            reason = f"{error.strerror}"
        time.sleep(min(0.2, max(0.0, left)))
        with contextlib.suppress(ConfigurationError):
            ip = resolve(address)  # A pod that was started again has another one.
    where = address if address == ip else f"{address} ({ip})"
    raise ConfigurationError(
        f"{socket.gethostname()} has not reached the main address {where} on port {port} for {seconds:g} s: {reason}"
    )


def missing_after(store: Store, keys: list[str], seconds: float) -> list[str]:
    """Wait until all of these keys are there; those that are not after so many seconds."""
    deadline = time.monotonic() + seconds
    while keys and not store.check(keys):
        if time.monotonic() > deadline:
            return [key for key in keys if not store.check([key])]
        time.sleep(POLL)
    return []
