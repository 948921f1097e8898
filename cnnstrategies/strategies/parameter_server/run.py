"""Sessions of a run: the coordinator's address, and the coordinator and the servers that each node starts.

A session is one call of a trainer function, such as ``fit``. Each session has its own coordinator and servers.
"""

import atexit
import json
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.coordinator.settings import SERVER, WORKER, Address, CoordinatorSettings
from cnnstrategies.paramserver.core.view import RunEnded
from cnnstrategies.paramserver.drivers.coordinator import JournalFile
from cnnstrategies.paramserver.drivers.sockets import allow_threads
from cnnstrategies.paramserver.private_directory import keys_in, let_go, make_run_directory, shared_directory
from cnnstrategies.paramserver.security import is_local
from cnnstrategies.paramserver.services import (
    CoordinatorProcess,
    Handle,
    ServerProcess,
    StartMethod,
    load_keys,
    start,
)
from cnnstrategies.paramserver.supervision import COORDINATOR, Supervision, Watched
from cnnstrategies.strategies.parameter_server.options import ParameterServerOptions

VARIABLE = "CNNSTRATEGIES_PARAMETER_SERVER"  # Environment variable with the rendezvous, as JSON.
INCARNATION = "CNNSTRATEGIES_INCARNATION"  # Environment variable with the number of earlier starts of a rank.
WAIT = 300.0  # Seconds within which all processes must register with the coordinator.
# Seconds within which the coordinator of a second or later session must reply. The time is long, because rank 0 starts
# this coordinator, and may do other work between two trainer functions.
LATER = 600.0
# Largest number of sessions after one launch of the ranks. The sessions of the next launch begin with a higher number.
SESSIONS_OF_LAUNCH = 1 << 16


@dataclass(frozen=True)
class Rendezvous:
    """The data with which the processes of a session find each other: the coordinator's address, keys and time-out.

    A launcher of this package passes the rendezvous to the ranks in an environment variable.

    Attributes:
        coordinator: Address of the coordinator.
        directory: Directory for socket files and keys; None if the run uses TCP.
        key_file: File with the run's keys; None without encryption.
        supervised: Whether a launcher of this package watches the processes.
        session: Number of the session.
        wait: Time within which all processes must register, in seconds.
        run: Identity of the run, as JSON.
    """

    coordinator: str
    directory: str | None = None
    key_file: str | None = None
    supervised: bool = False
    session: int = 0
    wait: float = WAIT
    run: str = ""

    def publish(self) -> None:
        """Write the rendezvous as JSON into an environment variable, for the processes that this process starts."""
        os.environ[VARIABLE] = json.dumps(asdict(self))

    @classmethod
    def published(cls) -> "Rendezvous | None":
        """Return the rendezvous from the environment variable. Return None if the variable is not set."""
        text = os.environ.get(VARIABLE)
        return None if text is None else cls(**json.loads(text))


@dataclass(frozen=True)
class NodeLayout:
    """Nodes and processes of a run, from Lightning's cluster environment.

    Attributes:
        nodes: Number of nodes.
        node: Index of this node, from 0.
        processes: Number of ranks on each node.
        main_address: Host name or address of rank 0's node (``MASTER_ADDR``).
        main_port: Port on rank 0's node (``MASTER_PORT``).
        wait: Time within which all processes must register with the coordinator, in seconds.
        run: Identity of the run, as JSON.
    """

    nodes: int
    node: int
    processes: int
    main_address: str
    main_port: int
    wait: float = WAIT
    run: str = ""


def choose_rendezvous(
    options: ParameterServerOptions,
    layout: NodeLayout,
    session: int,
    supervised: bool = False,
    directory: str | None = None,
) -> Rendezvous:
    """Return the rendezvous of a session.

    A run on one node uses socket files in a private directory, unless the option ``coordinator`` is set. All other runs
    use TCP.

    Args:
        options: The strategy's options.
        layout: The nodes and processes of the run.
        session: Number of the session.
        supervised: Whether a launcher of this package watches the processes.
        directory: The private directory, if the launcher has already made it; None otherwise.
    """
    if layout.nodes == 1 and options.coordinator is None:
        if directory is None:
            directory = str(make_run_directory() if supervised else machine_directory(layout))
        coordinator = f"ipc://{directory}/coordinator-{session}"
        key_file = options.key_file or (keys_in(Path(directory)) if options.encrypted(coordinator) else None)
        return Rendezvous(coordinator, directory, key_file, supervised, session, layout.wait, layout.run)
    coordinator = options.coordinator or f"tcp://{layout.main_address}:{layout.main_port}"
    key_file = key_file_of(options, coordinator)
    return Rendezvous(coordinator, None, key_file, supervised, session, layout.wait, layout.run)


def machine_directory(layout: NodeLayout) -> Path:
    """Return the private directory that the ranks on one machine share if a launcher of another package started them.

    The last rank that ends removes the directory.
    """
    # A cluster job may start several runs with the same address and port.
    return _shared_directory(f"{layout.main_address}:{layout.main_port} {layout.run}")


def _shared_directory(name: str) -> Path:
    """Return the private directory that this user's processes on this machine share under a name.

    The last process that uses the directory removes it when it ends.
    """
    directory = shared_directory(name)
    atexit.register(let_go, directory)
    return directory


def key_file_of(options: ParameterServerOptions, coordinator: str) -> str | None:
    """Return the path of the file with a run's keys. Return None if connections are not encrypted.

    If ``key_file`` is not set and all processes run on this machine, the file is created in a private directory.

    Args:
        options: The strategy's options.
        coordinator: TCP address of the coordinator.
    """
    if not options.encrypted(coordinator):
        return None
    if options.key_file is not None:
        return str(Path(options.key_file).resolve())
    return keys_in(_shared_directory(coordinator))


def open_supervision(
    options: ParameterServerOptions, layout: NodeLayout, place: Rendezvous, training: bool, method: StartMethod
) -> Supervision:
    """Start the servers of this node, and on node 0 also the coordinator; return the supervision of these processes.

    Args:
        options: The strategy's options.
        layout: The nodes and processes of the run.
        place: The session's rendezvous.
        training: Whether the session trains, and so needs servers.
        method: ``fork`` or ``program``: how to start the processes; see :func:`.services.start`.
    """
    allow_threads(1 + layout.processes + options.servers_per_node)
    # Only the first session checks the port. In later sessions the previous coordinator may still use the port, and the
    # new coordinator waits until the port is free.
    if layout.node == 0 and place.session == 0:
        _check_free(place.coordinator)
    servers = options.server_count(layout.nodes) if training else 0
    address = _address(options, place, "supervision", layout.node)
    restarts = options.max_restarts if options.replication > 1 and place.supervised and not options.endpoints else 0
    supervision = Supervision(address, load_keys(place.key_file))
    workers = layout.nodes * layout.processes
    max_joiners = options.max_joiners if training else 0
    if layout.node == 0:
        coordinator_restarts = options.max_restarts if place.supervised else 0
        settings = CoordinatorSettings(
            _listening(place.coordinator),
            workers,
            servers,
            options.timeout,
            place.wait,
            survivable=options.replication - 1,
            supervised=coordinator_restarts > 0,
            session=place.session,
            nodes=layout.nodes,
            supervisor=supervision.process,
            max_joiners=max_joiners,
            run=place.run,
        )
        journal = _new_journal(place) if coordinator_restarts else None
        service = CoordinatorProcess(settings, place.key_file, place.directory, journal)

        def start_coordinator(incarnation: int) -> Handle:
            return start(replace(service, follows=incarnation > 0), method)

        supervision.start(Watched(COORDINATOR, 0, start_coordinator, coordinator_restarts))
    if servers and not options.endpoints:
        for index in range(options.servers_per_node):
            identity = layout.node * options.servers_per_node + index
            server = partial(_start_server, options, place, identity, method)
            supervision.start(Watched(SERVER, identity, server, restarts))
    return supervision


def worker_address(options: ParameterServerOptions, place: Rendezvous, rank: int) -> Address:
    """Return the data with which a rank registers with the coordinator.

    The data are the coordinator's address, the rank's id and incarnation, and time-outs.
    """
    incarnation = int(os.environ.get(INCARNATION, "0"))
    later = place.session > 0 and not place.supervised
    appear = LATER if later else place.wait
    return replace(_address(options, place, WORKER, rank, incarnation), appear=appear)


def _address(
    options: ParameterServerOptions, place: Rendezvous, role: str, identity: int, incarnation: int = 0
) -> Address:
    return Address(
        place.coordinator,
        role,
        identity,
        incarnation,
        options.heartbeat,
        options.timeout,
        session=place.session,
        run=place.run,
    )


def _new_journal(place: Rendezvous) -> str:
    """Create the file on this machine from which a restarted coordinator reads its earlier state.

    Return the path of the file.
    """
    directory = place.directory or _shared_directory(place.coordinator)
    path = f"{directory}/coordinator-{place.session}.journal"
    JournalFile(Path(path)).create()
    return path


def _start_server(
    options: ParameterServerOptions, place: Rendezvous, identity: int, method: StartMethod, incarnation: int
) -> Handle:
    known_as = None
    if place.directory is not None:
        endpoint = f"ipc://{place.directory}/server-{place.session}-{identity}-{incarnation}"
    elif is_local(place.coordinator) or not is_local(f"tcp://{own_address(place.coordinator)}:1"):
        endpoint = f"tcp://{own_address(place.coordinator)}:*"
    else:
        # On the coordinator's machine, the coordinator's host name resolves to a loopback address, which other machines
        # cannot reach. The server therefore listens on all interfaces, and workers use the coordinator's host name.
        endpoint, known_as = "tcp://0.0.0.0:*", place.coordinator.removeprefix("tcp://").rpartition(":")[0]
    address = _address(options, place, SERVER, identity, incarnation)
    service = ServerProcess(address, endpoint, place.key_file, options.security == "none", known_as, os.getpid())
    return start(service, method)


def _listening(coordinator: str) -> str:
    """Return the endpoint to which the coordinator binds its socket.

    If the coordinator's address is a TCP address other than localhost, the coordinator listens on all interfaces: on
    the coordinator's own machine, the host name may resolve to a loopback address, which other machines cannot reach.
    """
    if coordinator.startswith("ipc://"):
        return coordinator
    host, _, port = coordinator.removeprefix("tcp://").rpartition(":")
    return (
        coordinator.replace("localhost", "127.0.0.1") if host in ("localhost", "127.0.0.1") else f"tcp://0.0.0.0:{port}"
    )


def _check_free(coordinator: str) -> None:
    """Raise a ConfigurationError if the coordinator's port is taken, or if its host name cannot be resolved."""
    endpoint = _listening(coordinator)
    if endpoint.startswith("ipc://"):
        return
    # This call raises an error if the name cannot be resolved. libzmq would retry without an error.
    own_address(coordinator)
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with socket.socket(socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            raise ConfigurationError(
                f"coordinator {coordinator}: port {port} of this machine cannot be used ({error.strerror}): end the "
                "program that listens there (`ss -ltnp` shows it), or choose another port"
            ) from error


def own_address(coordinator: str) -> str:
    """Return the IP address of this machine on the network interface that leads to the coordinator.

    Raises:
        ConfigurationError: The coordinator's host name cannot be resolved, or there is no route to it.
    """
    host, _, port = coordinator.removeprefix("tcp://").rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, int(port)))  # On a UDP socket, this chooses the interface and sends nothing.
        except OSError as error:
            raise ConfigurationError(
                f"coordinator {coordinator}: the address cannot be reached from this machine ({error.strerror}): set "
                "the name or IPv4 address by which other machines reach rank 0's machine"
            ) from error
        return str(probe.getsockname()[0])


class Sessions:
    """Counter of this process's sessions. All ranks count alike, so a session has the same number on all ranks.

    Attributes:
        lost: Ranks that died during the previous session.
    """

    def __init__(self) -> None:
        self.lost: list[int] = []
        self._launches = 0
        self._opened = 0

    def launch(self) -> int:
        """Return the number of the first session of a new launch. A launcher calls this before it starts ranks."""
        self._launches += 1
        return (self._launches - 1) * SESSIONS_OF_LAUNCH

    def open(self, options: ParameterServerOptions, layout: Callable[[], NodeLayout], training: bool) -> Rendezvous:
        """Return the rendezvous of the next session of this rank.

        Args:
            options: The strategy's options.
            layout: Function that returns the nodes and processes of the run. If no launcher of this package has
                published the rendezvous, the function first finds the main port, for which it waits for rank 0.
            training: Whether the session trains.

        Raises:
            RunEnded: A rank has died in an earlier session, and a new session needs all ranks.
            ConfigurationError: The session would train with dedicated servers, which ended with the first session.
        """
        published = Rendezvous.published()
        opened, self._opened = self._opened, self._opened + 1
        if published is not None and opened == 0:
            return published
        if self.lost:
            ranks = ", ".join(f"rank {rank}" for rank in self.lost)
            raise RunEnded(
                f"{ranks} died in an earlier trainer function, but this function needs all ranks: run it in a separate "
                "script"
            )
        if opened and training and options.endpoints:
            raise ConfigurationError(
                "endpoints: dedicated servers end with a script's first trainer function, but this is trainer function "
                f"number {opened + 1}: start the servers again and run this function in a separate script, or leave "
                "endpoints out"
            )
        first = 0 if published is None else published.session
        directory = None if published is None else published.directory
        return choose_rendezvous(options, layout(), first + opened, directory=directory)


SESSIONS = Sessions()
