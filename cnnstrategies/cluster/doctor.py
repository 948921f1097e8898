"""What the hosts do together in ``cnnstrategies doctor``: tell about themselves, try connections and a directory."""

import contextlib
import json
import os
import platform
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import lightning
import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from cnnstrategies.cluster.environment import Place
from cnnstrategies.cluster.hosts import own_interface
from cnnstrategies.cluster.probe import Probe, measure
from cnnstrategies.cluster.stores import POLL, missing_after, open_store
from cnnstrategies.errors import ConfigurationError

LINK_SECONDS = 5.0
SHARED_SECONDS = 5.0  # NFS shows a new file to other clients after a few seconds
DRIVER = Path("/proc/driver/nvidia/gpus")  # Has an entry for each card, whatever torch can do with it.


@dataclass
class Facts:
    """One host.

    Attributes:
        node: Its number in the run.
        port: Where its probe answers.
        versions: Version of each program that must be the same everywhere.
        shared_memory: Bytes that fit into the memory through which its processes hand each other batches; None where
            that is not a file system.
        gpus: What is wrong with its GPUs.
    """

    node: int
    host: str
    interface: str
    address: str
    port: int
    versions: dict[str, str]
    shared_memory: int | None = None
    gpus: Sequence[str] = ()


@dataclass
class Findings:
    """What one host found out.

    Attributes:
        links: By the other host's number: round trip in seconds, bandwidth in bytes/s and clock difference in seconds.
        failures: By the other host's number: why there is no connection to it.
        shared: What is wrong with the shared directory here.
    """

    links: dict[int, tuple[float, float, float]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    shared: list[str] = field(default_factory=list)

    @classmethod
    def from_json(cls, text: bytes) -> "Findings":
        """Those that a host has written for the others."""
        found = json.loads(text)
        for name in ("links", "failures"):
            found[name] = {int(other): value for other, value in found[name].items()}
        return cls(**found)


@dataclass
class Report:
    """What all hosts found out, by their numbers; ``nodes`` should be there, and ``hosts`` are."""

    nodes: int
    hosts: dict[int, Facts]
    findings: dict[int, Findings]
    directory: str


def versions() -> dict[str, str]:
    """The versions that must be equal on all hosts."""
    try:
        own = version("cnnstrategies")
    except PackageNotFoundError:
        own = "not installed"
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None  # type: ignore[no-untyped-call]
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "cnnstrategies": own,
        "NCCL": ".".join(map(str, nccl)) if nccl else "none",
    }


def shared_memory() -> int | None:
    """Size of ``/dev/shm``, which a container limits; None where there is none, as outside Linux."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    return found.f_frsize * found.f_blocks


def gpu_problems(driver: Path = DRIVER) -> list[str]:
    """What to mend, a line each."""
    cards = len(list(driver.glob("*")))
    if not cards or torch.cuda.is_available():
        return []
    return [
        f"torch {torch.__version__} cannot use its {cards} {'GPU' if cards == 1 else 'GPUs'}: python -c 'import torch; "
        "torch.cuda.init()' says why"
    ]


def _facts(node: int, interface: str = "", address: str = "", port: int = 0) -> Facts:
    return Facts(node, socket.gethostname(), interface, address, port, versions(), shared_memory(), gpu_problems())


def examine_alone() -> Report:
    """Examine this host, which no launcher has started with others."""
    return Report(1, {0: _facts(0)}, {0: Findings()}, "")


def examine(place: Place, directory: Path, interface: str | None, wait: float) -> Report | None:
    """Examine the cluster, together with the other hosts' processes.

    Args:
        directory: Should be the same on all hosts.
        interface: Name or subnet of the network interface to use; by default the one on the route.
        wait: Seconds to wait for the other hosts.

    Returns:
        On the first host, what all of them found out; None on the others.
    """
    store = open_store(place.main_address, place.main_port, place.node == 0, wait)
    if place.node == 0 and missing_after(store, ["source"], wait):
        raise ConfigurationError(
            f"no other host has come to {socket.gethostname()}, port {place.main_port}, within {wait:g} s: is the "
            f"doctor started on all {place.nodes} hosts, do they resolve {place.main_address}, and does a firewall "
            "block the port?"
        )
    mine = own_interface(store, place.node, place.main_address, interface)
    probe = Probe(mine.address)
    me = _facts(place.node, mine.name, mine.address, probe.port)
    store.set(f"facts/{me.node}", json.dumps(asdict(me)))
    present = _present(store, place, wait)
    hosts = {node: Facts(**json.loads(store.get(f"facts/{node}"))) for node in present}
    together = Examination(store, hosts, me, wait)
    together.try_links()
    together.try_directory(directory)
    store.set(f"findings/{me.node}", json.dumps(asdict(together.findings)))
    together.all_here("found")
    if place.node != 0:
        store.set(f"end/{me.node}", "")
        return None
    found = {node: Findings.from_json(store.get(f"findings/{node}")) for node in present}
    together.wait_for("end", [node for node in present if node != 0])
    probe.close()
    return Report(place.nodes, hosts, found, str(directory))


def _present(store: Store, place: Place, wait: float) -> list[int]:
    """The numbers of the hosts that have come in time; the first host decides."""
    if place.node == 0:
        keys = [f"facts/{node}" for node in range(place.nodes)]
        late = missing_after(store, keys, wait)
        store.set("present", json.dumps([node for node, key in enumerate(keys) if key not in late]))
    elif missing_after(store, ["present"], wait + LINK_SECONDS):
        raise ConfigurationError(f"{socket.gethostname()}: the first host has not begun within {wait:g} s")
    present: list[int] = json.loads(store.get("present"))
    return present


def others_in_turn(nodes: Sequence[int], me: int) -> list[int]:
    """The others, in an order by which no two hosts come to the same one at a time."""
    mine = nodes.index(me)
    return [*nodes[mine + 1 :], *nodes[:mine]]


class Examination:
    """What a host tries while all others do the same."""

    def __init__(self, store: Store, hosts: dict[int, Facts], me: Facts, wait: float) -> None:
        self._store = store
        self._hosts = hosts
        self._me = me
        self._wait = wait
        self.findings = Findings()

    def all_here(self, point: str) -> None:
        """Wait until all hosts have come to a point."""
        self._store.set(f"{point}/{self._me.node}", "")
        self.wait_for(point, self._hosts)

    def wait_for(self, point: str, nodes: Iterable[int]) -> None:
        """Wait until these hosts have come to a point."""
        late = missing_after(self._store, [f"{point}/{node}" for node in nodes], self._wait)
        if late:
            raise ConfigurationError(
                f"{socket.gethostname()} has waited {self._wait:g} s for node {late[0].rpartition('/')[2]}, which was "
                "there before: look at its output"
            )

    def try_links(self) -> None:
        """Measure the connections to the others, one at a time, while one other host measures that to this one."""
        for number, node in enumerate(others_in_turn(sorted(self._hosts), self._me.node)):
            self.all_here(f"round/{number}")
            try:
                self.findings.links[node] = measure(self._hosts[node].address, self._hosts[node].port, LINK_SECONDS)
            except OSError as error:
                self.findings.failures[node] = error.strerror or str(error) or type(error).__name__

    def try_directory(self, directory: Path) -> None:
        """Write a file as a checkpoint is written, and look for the other hosts' files."""
        first = self._hosts[0]
        files = {node: directory / f".cnnstrategies-doctor-{first.host}-{first.port}-{node}" for node in self._hosts}
        mine = files[self._me.node]
        partial = mine.with_name(f"{mine.name}.partial")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            partial.touch()
            partial.replace(mine)
        except OSError as error:
            self.findings.shared.append(f"cannot write there: {error.strerror}")
        self.all_here("written")
        deadline = time.monotonic() + SHARED_SECONDS
        unseen = [node for node in files if node != self._me.node]
        while unseen and time.monotonic() < deadline:
            unseen = [node for node in unseen if not files[node].exists()]
            time.sleep(POLL)
        self.findings.shared += [f"does not see what {self._hosts[node].host} writes there" for node in unseen]
        self.all_here("seen")
        for path in (mine, partial):
            with contextlib.suppress(OSError):  # Where it could not write.
                path.unlink(missing_ok=True)
