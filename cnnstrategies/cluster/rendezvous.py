"""Rendezvous of the ranks of a run: every rank finds its own rank 0, and nobody else.

Rank 0 serves the store of ``torch.distributed`` at a free port, which only the ranks of its run get to know: they knock
at rank 0's door (see :mod:`.door`), and the door tells them the port. A rank finds the door in one of four ways:

- The process that started it has passed it the address (environment variable `DOOR`).
- Under torchrun, rank 0 has published it in the store of torchrun's agent.
- The rank looks through a short list of ports, which begins with ``MASTER_PORT`` if the variable is set, or else with a
  hash of the launch's id. If a port of the list is in use, rank 0 listens at the next one.
- A forked or spawned rank needs no door, because its parent process serves the store (environment variable `MET`).
"""

import contextlib
import ipaddress
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies import Strategy
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from cnnstrategies._lightning_private import ranks_are_children, set_main_port
from cnnstrategies.cluster import launchers
from cnnstrategies.cluster.addresses import launch_port, main_port_of, resolve, use_interface
from cnnstrategies.cluster.door import OpenDoor, knock, listen
from cnnstrategies.cluster.handshake import Door, RankCredentials, Refused
from cnnstrategies.cluster.run_identity import FIRST_PORT, launch_secret, process_start, run_identity
from cnnstrategies.cluster.search import GRACE, RankZeroSearch
from cnnstrategies.cluster.stores import LOOPBACK, SERVED, serve, serve_on_loopback, served_by_parent
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.identity import LAUNCH, Identity
from cnnstrategies.strategies.protocol import facts_of

# Environment variable for the ranks that this process starts as programs: port of rank 0's door.
DOOR = "CNNSTRATEGIES_DOOR"
# Environment variable for the ranks that this process forks or spawns, and whose store it serves.
MET = "CNNSTRATEGIES_MET"
CANDIDATES = 8  # Number of ports through which a rank looks.
# Longest time in seconds to wait for rank 0 on the same host. Rank 0 may first download the data.
ON_ONE_HOST = 1800.0
ON_SEVERAL_HOSTS = 300.0
AGENT_SECONDS = 60.0  # Time-out in seconds for the store of torchrun's agent.


@dataclass(frozen=True)
class Meeting:
    """Result of a rendezvous.

    Attributes:
        address: The main address: address of rank 0's host.
        port: Port of rank 0's store, or the port that rank 0 has chosen for its coordinator.
        door: Port of rank 0's door; 0 if this is the only process.
        store: Rank 0's store; None on other ranks, and if rank 0 has no store.
    """

    address: str
    port: int
    door: int
    store: Store | None = None

    def shared_store(self, seconds: float) -> Store:
        """Return rank 0's store, for keys of this package."""
        store = self.store
        if store is None:
            store = TCPStore(self.address, self.port, is_master=False, timeout=timedelta(seconds=seconds))
        return PrefixStore("cnnstrategies", store)


@dataclass(frozen=True)
class Party:
    """Data with which a process takes part in a rendezvous.

    Attributes:
        environment: Lightning's cluster environment.
        hosts: Number of hosts of the run.
        rank: Number of the process among the processes that take part.
        world: Number of processes that take part.
        identity: Identity of the run.
        strategy: Name of the strategy's class.
        seconds: Longest time to wait for rank 0.
        exclusive: Whether each process takes part once, as the ranks of a process group. False for a run that replaces
            lost processes.
    """

    environment: ClusterEnvironment
    hosts: int
    rank: int
    world: int
    identity: Identity
    strategy: str
    seconds: float
    exclusive: bool = True


_meeting: Meeting | None = None  # The result of this process's rendezvous. A process takes part in one.
_doors: list[OpenDoor] = []  # Doors of this process, which stay open until it ends.


@contextlib.contextmanager
def ranks_meet(strategy: Strategy, seconds: float = ON_SEVERAL_HOSTS) -> Iterator[Meeting | None]:
    """Let the ranks of a run find each other, before ``torch.distributed`` connects them inside this context.

    On one host, torch listens on the loopback interface only. The environment variables ``MASTER_PORT``,
    ``MASTER_ADDR``, ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME`` are set; the last three keep their values.

    Use this in each rank, or in the process that starts the ranks.

    Args:
        strategy: The strategy of the run.
        seconds: Longest time to wait for rank 0 of a run on several hosts.

    Yields:
        The result of the rendezvous; None if this process needs none.

    Raises:
        StrangerError: Another run listens at the main address, and this process has no rank 0 of its own.
        ConfigurationError: Rank 0 was not found in time, or no port is free.
    """
    facts = facts_of(strategy)
    environment = facts.environment
    if environment is None or facts.connects_hosts or dist.is_initialized():
        yield None
        return
    if facts.host_count == 1:
        use_interface("lo")
        os.environ.setdefault("MASTER_ADDR", LOOPBACK)
        seconds = max(seconds, ON_ONE_HOST)
    if MET in os.environ:
        yield None
        return
    if ranks_are_children(strategy.launcher) and not environment.creates_processes_externally:
        with _children_meet(environment) if facts.host_count == 1 else contextlib.nullcontext():
            yield None
        return
    mark_launch(strategy)
    facts.update_ranks()
    rank, world = environment.global_rank(), environment.world_size()
    identity = run_identity()
    party = Party(environment, facts.host_count, rank, world, identity, type(strategy).__name__, seconds)
    meeting = take_part(party, serve)
    starts = not environment.creates_processes_externally
    if starts:
        os.environ[DOOR] = str(meeting.door)
    try:
        yield meeting
    finally:
        if starts:
            os.environ.pop(DOOR, None)
        # Another store at this port is created for the next process group. Keys of this group must not be in it.
        del meeting


@contextlib.contextmanager
def _children_meet(environment: ClusterEnvironment) -> Iterator[None]:
    """Serve the store for ranks that this process will fork or spawn."""
    store = serve_on_loopback()
    before = os.environ.get("MASTER_PORT")
    set_main_port(environment, store.port)
    os.environ[MET] = str(store.port)
    try:
        with served_by_parent():
            yield
    finally:
        del os.environ[MET], os.environ["MASTER_PORT"]
        if before is not None:
            os.environ["MASTER_PORT"] = before


def take_part(party: Party, open_store: Callable[[str, int], tuple[int, Store | None]]) -> Meeting:
    """Take part in the rendezvous of a run, and make the cluster environment use its result as the main port.

    A process that has taken part before gets the same port again.

    Args:
        party: Data of this process.
        open_store: Function that rank 0 calls with the IP address at which it has to listen, and a port or 0. It
            returns the port that the other ranks get, and rank 0's store if there is one.

    Raises:
        StrangerError: Another run listens at the main address, and this process has no rank 0 of its own.
        ConfigurationError: Rank 0 was not found in time, or no port is free.
    """
    global _meeting
    if _meeting is not None:
        store = None
        if party.rank == 0:
            with contextlib.suppress(OSError):  # The store that this process has opened before may still be served.
                store = open_store(_listening(party, _meeting.address), _meeting.port)[1]
        return replace(_meeting, store=store)
    agent = _agent(party.identity) if is_under_torchrun() else None
    if agent is not None and os.environ.get("GROUP_WORLD_SIZE") == "1":
        os.environ["MASTER_ADDR"] = LOOPBACK
    address = party.environment.main_address
    store = None
    if party.rank == 0:
        # If the address cannot be resolved, this raises an error with a clear message. torch would print a stack trace.
        listening = _listening(party, address)
        port, store = open_store(listening, 0)
        door = _open_door(party, listening, port, agent)
    else:
        port, door = _find(party, address, agent)
    if agent is not None:
        os.environ[SERVED] = "False"
    if (first := os.environ.get("MASTER_PORT")) is not None:
        os.environ.setdefault(FIRST_PORT, first)
    set_main_port(party.environment, port)
    _meeting = Meeting(address, port, door)
    return replace(_meeting, store=store)


def is_under_torchrun() -> bool:
    """Whether torchrun has started this process, and this process has not taken part in a rendezvous yet."""
    return os.environ.get(SERVED) == "True" and MET not in os.environ


def _listening(party: Party, address: str) -> str:
    """Return the IP address at which rank 0 has to listen, so that the other ranks reach it at the main address.

    A machine's own name may resolve to a loopback address, which other machines cannot reach.
    """
    resolved = resolve(address)
    if party.hosts == 1 and ipaddress.ip_address(resolved).is_loopback:
        return resolved
    return "::" if ":" in resolved and not ipaddress.ip_address(resolved).is_loopback else "0.0.0.0"


def _agent(identity: Identity) -> PrefixStore:
    """Return the store of torchrun's agent, for keys of this run.

    Several runs may use one store, if their torchruns have the same rendezvous endpoint.
    """
    port = main_port_of(os.environ)
    assert port is not None, "torchrun has set MASTER_PORT"
    timeout = timedelta(seconds=AGENT_SECONDS)
    return PrefixStore(identity.text(), TCPStore(os.environ["MASTER_ADDR"], port, is_master=False, timeout=timeout))


def _open_door(party: Party, address: str, port: int, agent: PrefixStore | None) -> int:
    """Open rank 0's door, and return its port. Return 0 if no other process takes part."""
    if party.world == 1:
        return 0
    passes_port = agent is not None or (not party.environment.creates_processes_externally and party.hosts == 1)
    ports = [0] if passes_port else candidates(party.environment)
    listener = listen(address, ports)
    if listener is None:
        raise ConfigurationError(
            f"{socket.gethostname()} cannot listen at a port from {ports[0]} to {ports[-1]}, because other programs "
            "use these ports: set MASTER_PORT to the same free port on every machine"
        )
    rank = _rank(party)
    _doors.append(OpenDoor(listener, Door(rank, port, exclusive=party.exclusive)))
    if agent is not None:
        agent.set(DOOR, str(_doors[-1].port))
    if _doors[-1].port != ports[0] and not passes_port:
        print(
            f"Port {ports[0]} is in use, so the ranks of {party.identity} meet at port {_doors[-1].port}",
            file=sys.stderr,
            flush=True,
        )
    return _doors[-1].port


def _rank(party: Party) -> RankCredentials:
    return RankCredentials(
        party.identity, party.strategy, party.rank, party.world, process_start(), launch_secret(os.environ)
    )


def candidates(environment: ClusterEnvironment) -> list[int]:
    """Return the ports at which rank 0 may listen, the preferred port first. All ranks get the same list."""
    if (first := main_port_of(os.environ)) is None:
        launch = run_identity().launch
        first = launch_port(launch) if launch else environment.main_port
    return [port for port in range(first, first + CANDIDATES) if port < 2**16]


def _find(party: Party, address: str, agent: PrefixStore | None) -> tuple[int, int]:
    """Return the port of rank 0's store, and the port of rank 0's door."""
    started = time.monotonic()
    certain = LAUNCH in os.environ or launchers.rank_launcher(os.environ) is not None
    rank, host = _rank(party), socket.gethostname()
    ip, noted = resolve(address), False
    where = address if address == ip else f"{address} ({ip})"
    search = RankZeroSearch(party.identity, rank.since, certain, where, host, started, party.seconds)
    exact = os.environ.get(DOOR)
    fixed = [int(exact)] if exact is not None else candidates(party.environment) if agent is None else []
    while True:
        known: Sequence[int] = fixed
        if agent is not None:
            known = [int(agent.get(DOOR))] if agent.check([DOOR]) else []
        left = max(0.1, started + party.seconds - time.monotonic())
        answers = knock(ip, search.ports(known), rank, left)
        now = time.monotonic()
        port = search.decide(now, answers)
        if port is not None:
            return port, next(door for door, answer in answers.items() if answer == port)
        refused = next((answer for answer in answers.values() if isinstance(answer, Refused)), None)
        if refused is not None and not noted and now > started + GRACE and rank.rank == 1:
            noted = True
            print(
                f"{party.identity} waits for its rank 0; its port is used by {refused.run}", file=sys.stderr, flush=True
            )
        time.sleep(search.pause)
        with contextlib.suppress(ConfigurationError):
            ip = resolve(address)  # A pod has a new address after a restart.


def mark_launch(strategy: Strategy) -> None:
    """Give the ranks that this process will start a secret and an id in the environment variable `LAUNCH`.

    The function has no effect if another program starts the ranks, or if the run has several hosts.

    Raises:
        ConfigurationError: ``MASTER_PORT`` is not a port.
    """
    main_port_of(os.environ)  # This call refuses a value that is not a port. Lightning would raise a ValueError.
    environment = facts_of(strategy).environment
    if environment is None or environment.creates_processes_externally or facts_of(strategy).host_count > 1:
        return
    os.environ[LAUNCH] = f"{secrets.token_hex(16)} process {os.getpid()} on {socket.gethostname()}"
