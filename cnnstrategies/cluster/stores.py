"""torch.distributed stores through which the processes of a run find each other."""

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
# Environment variable of torch: "True" if a process that is not a rank, such as torchrun's agent, serves the store.
SERVED = "TORCHELASTIC_USE_AGENT_STORE"
SECONDS = 60.0  # Longest time, in seconds, to wait for rank 0 under torchrun.
POLL = 0.05  # Seconds between two checks of a store or a file.
FREE_PORT = "free port"  # Key in rank 0's store. Its value is the number of a free port on rank 0's machine.


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
def on_loopback(strategy: Strategy) -> Iterator[None]:
    """Make torch listen only on the loopback interface during a run on one machine.

    A run on several machines is not changed. The environment variables ``MASTER_ADDR``, ``GLOO_SOCKET_IFNAME`` and
    ``NCCL_SOCKET_IFNAME`` are set unless they are already set. Use this before the ranks are connected, in a rank or in
    the process that will start all ranks.

    Args:
        strategy: The strategy of the run.
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
        # An error means that the port is in use, usually because the store is already served. If another program uses
        # the port, torch reports the error later.
        with contextlib.suppress(OSError):
            store = serve_on_loopback(address, environment.main_port)
    # Whether this process will fork or spawn all ranks. In a rank, `creates_processes_externally` is already true.
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
    """Make rank 0, instead of torchrun's agent, serve the store through which the ranks find each other.

    The agent's store still exists after a restart. Restarted ranks would read the addresses of dead ranks in it, gloo
    would try to connect to the dead ranks until its time-out, and the restart would fail (observed with torch 2.13 and
    2.15). With this function, rank 0 creates a new store at each start, and publishes the port of the new store in the
    agent's store. If no agent of torchrun serves a store, the function does nothing.

    Args:
        listens: Whether the strategy itself listens at the main port and does not open a torch.distributed store.
            ``MASTER_PORT`` is then set to a free port on rank 0's machine.
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
        # When torch.distributed later opens its own store in this process, that store also uses this server.
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
    """Return the port of the store that rank 0 serves.

    The agent's store may still have the port of a rank 0 that has died. The connection to this port fails, and the
    function then reads the port again.

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
        f"{socket.gethostname()} has not reached rank 0 on {address} for {SECONDS:g} s, because rank 0 has failed or a "
        "firewall blocks the connection: allow TCP connections on all ports between the machines of the run"
    )


def open_store(address: str, port: int, serve: bool, seconds: float) -> Store:
    """Return the store at the main address and the main port, through which the processes of a run find each other.

    If ``torch.distributed`` later opens a store at this port in rank 0's process, the new store uses the server of the
    store that this function returns.

    Args:
        address: The main address.
        port: The main port.
        serve: Whether this process serves the store. Rank 0 does so, and the other processes connect to it.
        seconds: Longest time to wait for the store.

    Raises:
        ConfigurationError: Rank 0 cannot listen at the port, or another process could not connect within ``seconds``.
    """
    if serve:
        # If the address cannot be resolved, this raises an error with a clear message. torch would retry, and then
        # print a stack trace.
        resolve(address)
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
            f"{socket.gethostname()} cannot listen at port {port} ({str(error).splitlines()[0]}): set MASTER_PORT to "
            "the same free port on every machine"
        ) from error
    return PrefixStore("cnnstrategies", store)


def _wait_for_port(address: str, port: int, seconds: float) -> None:
    """Wait until a process listens at the port.

    torch's own client also waits, but does not report why the connection fails.

    Raises:
        ConfigurationError: No process has listened at the port within ``seconds``. The error message has the reason.
    """
    deadline = time.monotonic() + seconds
    ip = resolve(address)
    reason = ""
    while (left := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((ip, port), timeout=min(left, 10)).close()
            return
        except TimeoutError:
            reason = "no answer; check that the machine is running and that no firewall blocks the port"
        except ConnectionRefusedError:
            reason = "no process listens at the port; check that rank 0 was started with the same MASTER_PORT"
        except OSError as error:
            reason = f"{error.strerror}; check the network between the two machines"
        time.sleep(min(0.2, max(0.0, left)))
        with contextlib.suppress(ConfigurationError):
            ip = resolve(address)  # A pod has a new address after a restart, so the name is resolved for each attempt.
    target = address if address == ip else f"{address} ({ip})"
    raise ConfigurationError(
        f"{socket.gethostname()} has not reached the main address {target} on port {port} for {seconds:g} s: {reason}"
    )


def missing_after(store: Store, keys: list[str], seconds: float) -> list[str]:
    """Wait until all keys exist in the store, for at most ``seconds``. Return the keys that are still missing."""
    deadline = time.monotonic() + seconds
    while keys and not store.check(keys):
        if time.monotonic() > deadline:
            return [key for key in keys if not store.check([key])]
        time.sleep(POLL)
    return []
