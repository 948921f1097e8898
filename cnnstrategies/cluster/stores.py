"""Stores of torch, through which processes find each other: across hosts, on one machine, and under torchrun."""

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
SERVED = "TORCHELASTIC_USE_AGENT_STORE"  # torch's variable: a process that is not a rank serves the store.
SECONDS = 60.0
POLL = 0.05  # seconds
FREE_PORT = "free port"


def serve_on_loopback(address: str = LOOPBACK, port: int = 0) -> TCPStore:
    """Return a store of torch that listens only on the loopback.

    By default torch's stores listen on all interfaces. When ``torch.distributed`` later opens a store at this port in
    this process, both stores use one server.

    Args:
        address: An address of the loopback.
        port: Port to listen on; 0 chooses a free port.

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
    """Make torch listen only on the loopback for a run on one machine; for several machines do nothing.

    The function keeps the values of ``MASTER_ADDR``, ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME`` if they are set.

    Args:
        strategy: The strategy of the run. This process is either a rank that is not connected yet, or the process that
            will start all ranks.
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
        # The port is taken if the store is served already. If another program has the port, torch will report it.
        with contextlib.suppress(OSError):
            store = serve_on_loopback(address, environment.main_port)
    # In a child, whose number is set, the environment counts all processes as created externally.
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
    """Let rank 0 serve the store through which the ranks find each other, instead of torchrun's agent.

    The agent's store outlives a restart, so restarted ranks would read the addresses of dead ranks. gloo would try to
    connect to the dead ranks until its time-out, and the restart would fail (seen with torch 2.13 and 2.15). With this
    function each start has a new store, and the agent's store only holds the new store's port. Nothing happens if
    torchrun's agent serves no store.

    Args:
        listens: Whether the run listens at the main port itself and opens no store of torch. The main port then becomes
            another port, which is free on rank 0's machine.
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
        # The store that torch.distributed opens later in this process uses the same server.
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
    """Return the port on which rank 0 listens.

    The agent's store may still hold the port of a dead rank 0. Then the connection fails, and the port is read again.

    Raises:
        ConfigurationError: Rank 0 was not reached within `SECONDS`.
    """
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
    """Return the store at the main address, through which the processes of a run find each other.

    When ``torch.distributed`` later opens a store at this port in rank 0's process, both stores use one server.

    Args:
        address: The main address.
        port: The main port.
        serve: Whether this process is rank 0, which serves the store.
        seconds: How long to wait for the store.

    Raises:
        ConfigurationError: The port cannot be served, or nothing has listened at it within `seconds`.
    """
    if serve:
        resolve(address)  # torch's own client would retry and print a stack.
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
    """Wait until a process listens at the port.

    torch's own client would retry as well, but would not report why the connection fails.

    Raises:
        ConfigurationError: Nothing has listened at the port within `seconds`; the error message gives the reason.
    """
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
            reason = "it answers, but nothing listens at the port: has rank 0 been started, with the same MASTER_PORT?"
        except OSError as error:
            reason = f"{error.strerror}"
        time.sleep(min(0.2, max(0.0, left)))
        with contextlib.suppress(ConfigurationError):
            ip = resolve(address)  # A pod that was started again has another address.
    target = address if address == ip else f"{address} ({ip})"
    raise ConfigurationError(
        f"{socket.gethostname()} has not reached the main address {target} on port {port} for {seconds:g} s: {reason}"
    )


def missing_after(store: Store, keys: list[str], seconds: float) -> list[str]:
    """Wait until all keys have been written; return the keys that are missing after `seconds`."""
    deadline = time.monotonic() + seconds
    while keys and not store.check(keys):
        if time.monotonic() > deadline:
            return [key for key in keys if not store.check([key])]
        time.sleep(POLL)
    return []
