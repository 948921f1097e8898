"""Where the processes of a session meet, and which of them a node starts."""

import atexit
import contextlib
import json
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from cnnstrategies.cluster.launchers import detected
from cnnstrategies.cluster.stores import own_store
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.coordinator.settings import SERVER, WORKER, Address, CoordinatorSettings
from cnnstrategies.paramserver.core.view import RunEnded
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

VARIABLE = "CNNSTRATEGIES_PARAMETER_SERVER"
INCARNATION = "CNNSTRATEGIES_INCARNATION"
WAIT = 300.0  # seconds for all processes to be there
LATER = 600.0  # seconds to wait for a later session: rank 0 may have something to do between two trainer functions
OF_A_LAUNCH = 1 << 16  # sessions, at most


@dataclass(frozen=True)
class Rendezvous:
    """Where a run's processes meet; the processes of a node read it from the environment.

    Attributes:
        directory: For sockets and keys; None where processes are on other machines, too.
        key_file: None for no encryption.
        wait: Seconds in which all must be there.
    """

    coordinator: str
    directory: str | None = None
    key_file: str | None = None
    supervised: bool = False
    session: int = 0
    wait: float = WAIT

    def publish(self) -> None:
        """Tell the processes that this one starts."""
        os.environ[VARIABLE] = json.dumps(asdict(self))

    @classmethod
    def published(cls) -> "Rendezvous | None":
        """What the process that started this one has told."""
        text = os.environ.get(VARIABLE)
        return None if text is None else cls(**json.loads(text))


@dataclass(frozen=True)
class NodeLayout:
    """The nodes of a run as Lightning knows them, and how long these are waited for."""

    nodes: int
    node: int
    processes: int
    main_address: str
    main_port: int
    wait: float = WAIT


def choose_rendezvous(
    options: ParameterServerOptions,
    layout: NodeLayout,
    session: int,
    supervised: bool = False,
    directory: str | None = None,
) -> Rendezvous:
    """Decide where the processes of a session meet, in the directory of whoever has started them if there is one."""
    if layout.nodes == 1 and options.coordinator is None:
        if directory is None:
            directory = str(make_run_directory() if supervised else machine_directory(layout))
        coordinator = f"ipc://{directory}/coordinator-{session}"
        key_file = options.key_file or (keys_in(Path(directory)) if options.encrypted(coordinator) else None)
        return Rendezvous(coordinator, directory, key_file, supervised, session, layout.wait)
    coordinator = options.coordinator or f"tcp://{layout.main_address}:{layout.main_port}"
    key_file = key_file_of(options, coordinator)
    return Rendezvous(coordinator, None, key_file, supervised, session, layout.wait)


def machine_directory(layout: NodeLayout) -> Path:
    """Where the ranks of one machine meet that something else has started; the last to end removes it."""
    # A job of the cluster may start several runs, which have the same port.
    step = [launcher.launch_id(os.environ) for launcher in detected(os.environ)]
    return _shared_directory(f"{layout.main_address}:{layout.main_port} {step}")


def _shared_directory(name: str) -> Path:
    """One that all processes of this user on this machine find by a name, until the last of them ends."""
    directory = shared_directory(name)
    atexit.register(let_go, directory)
    return directory


def key_file_of(options: ParameterServerOptions, coordinator: str) -> str | None:
    """The file with the keys of a run that meets at a TCP address; None for no encryption.

    Where all listen at this machine's own addresses and no file is named, its private directory has one.
    """
    if not options.encrypted(coordinator):
        return None
    if options.key_file is not None:
        return str(Path(options.key_file).resolve())
    return keys_in(_shared_directory(coordinator))


def open_supervision(
    options: ParameterServerOptions, layout: NodeLayout, place: Rendezvous, training: bool, method: StartMethod
) -> Supervision:
    """Start this node's coordinator and servers."""
    allow_threads(1 + layout.processes + options.servers_per_node)
    if layout.node == 0 and place.session == 0:  # A later session's waits for the one before to make room.
        _check_free(place.coordinator)
    servers = options.server_count(layout.nodes) if training else 0
    address = _address(options, place, "supervision", layout.node)
    restarts = options.max_restarts if options.replication > 1 and place.supervised and not options.endpoints else 0
    supervision = Supervision(address, load_keys(place.key_file))
    workers = layout.nodes * layout.processes
    max_joiners = options.max_joiners if training else 0
    if layout.node == 0:
        again = options.max_restarts if place.supervised else 0
        settings = CoordinatorSettings(
            _listening(place.coordinator),
            workers,
            servers,
            options.timeout,
            place.wait,
            survivable=options.replication - 1,
            supervised=again > 0,
            session=place.session,
            nodes=layout.nodes,
            supervisor=supervision.process,
            max_joiners=max_joiners,
        )
        service = CoordinatorProcess(settings, place.key_file, place.directory, _journal(place) if again else None)

        def start_coordinator(incarnation: int) -> Handle:
            return start(replace(service, follows=incarnation > 0), method)

        supervision.start(Watched(COORDINATOR, 0, start_coordinator, again))
    if servers and not options.endpoints:
        for index in range(options.servers_per_node):
            identity = layout.node * options.servers_per_node + index
            server = partial(_start_server, options, place, identity, method)
            supervision.start(Watched(SERVER, identity, server, restarts))
    return supervision


def worker_address(options: ParameterServerOptions, place: Rendezvous, rank: int) -> Address:
    """Who a rank is to the coordinator."""
    incarnation = int(os.environ.get(INCARNATION, "0"))
    later = place.session > 0 and not place.supervised
    appear = LATER if later else place.wait
    return replace(_address(options, place, WORKER, rank, incarnation), appear=appear)


def _address(
    options: ParameterServerOptions, place: Rendezvous, role: str, identity: int, incarnation: int = 0
) -> Address:
    return Address(
        place.coordinator, role, identity, incarnation, options.heartbeat, options.timeout, session=place.session
    )


def _journal(place: Rendezvous) -> str:
    """The file of a coordinator that may be started again, which goes on with it: in a directory of this machine."""
    directory = place.directory or _shared_directory(place.coordinator)
    return f"{directory}/coordinator-{place.session}.journal"


def _start_server(
    options: ParameterServerOptions, place: Rendezvous, identity: int, method: StartMethod, incarnation: int
) -> Handle:
    known_as = None
    if place.directory is not None:
        endpoint = f"ipc://{place.directory}/server-{place.session}-{identity}-{incarnation}"
    elif is_local(place.coordinator) or not is_local(f"tcp://{own_address(place.coordinator)}:1"):
        endpoint = f"tcp://{own_address(place.coordinator)}:*"
    else:
        # The machine of the coordinator, whose name leads to loopback there.
        endpoint, known_as = "tcp://0.0.0.0:*", place.coordinator.removeprefix("tcp://").rpartition(":")[0]
    address = _address(options, place, SERVER, identity, incarnation)
    service = ServerProcess(address, endpoint, place.key_file, options.security == "none", known_as, os.getpid())
    return start(service, method)


def _listening(coordinator: str) -> str:
    """The endpoint to bind for one that others connect to: a name may resolve to loopback on its own machine."""
    if coordinator.startswith("ipc://"):
        return coordinator
    host, _, port = coordinator.removeprefix("tcp://").rpartition(":")
    return (
        coordinator.replace("localhost", "127.0.0.1") if host in ("localhost", "127.0.0.1") else f"tcp://0.0.0.0:{port}"
    )


def _check_free(coordinator: str) -> None:
    """Refuse a place for the coordinator that another program has, or that has no address."""
    endpoint = _listening(coordinator)
    if endpoint.startswith("ipc://"):
        return
    own_address(coordinator)  # libzmq would ask for the address again and again.
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with socket.socket(socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            raise ConfigurationError(
                f"coordinator {coordinator}: it cannot listen at port {port} of this machine ({error.strerror}): end "
                "what does (`ss -ltnp`), or give another port"
            ) from error


def own_address(coordinator: str) -> str:
    """The address of this machine from which it reaches the coordinator."""
    host, _, port = coordinator.removeprefix("tcp://").rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, int(port)))  # Sends nothing.
        except OSError as error:
            raise ConfigurationError(
                f"coordinator {coordinator}: no way leads there from this machine ({error.strerror}): give the name or "
                "IPv4 address of rank 0's machine by which the others reach it"
            ) from error
        return str(probe.getsockname()[0])


class Sessions:
    """Numbers the sessions of this process, which are the same on all ranks.

    Attributes:
        lost: Ranks that were there at the beginning of the last session and not at its end.
    """

    def __init__(self) -> None:
        self.lost: list[int] = []
        self._launches = 0
        self._opened = 0
        self._store = contextlib.ExitStack()

    def launch(self) -> int:
        """Number of the first session of ranks that this process is about to start."""
        self._launches += 1
        return (self._launches - 1) * OF_A_LAUNCH

    def open(self, options: ParameterServerOptions, layout: Callable[[], NodeLayout], training: bool) -> Rendezvous:
        """Where this rank's next session meets; the nodes are asked for once torchrun's store is out of the way."""
        published = Rendezvous.published()
        opened, self._opened = self._opened, self._opened + 1
        if published is not None and opened == 0:
            return published
        if self.lost:
            ranks = ", ".join(f"rank {rank}" for rank in self.lost)
            raise RunEnded(f"{ranks} died before, and every rank is needed here: run this part as a script of its own")
        if opened and training and options.endpoints:
            raise ConfigurationError(
                f"endpoints: dedicated servers end with the first function of a script, and this is number "
                f"{opened + 1}: start them and a script of its own for it, or leave endpoints out"
            )
        first = 0 if published is None else published.session
        directory = None if published is None else published.directory
        if published is None:
            self._store.enter_context(own_store(listens=True))  # torchrun's own store has the main port.
        return choose_rendezvous(options, layout(), first + opened, directory=directory)


SESSIONS = Sessions()
