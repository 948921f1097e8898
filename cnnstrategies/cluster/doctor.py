"""What ``cnnstrategies doctor`` does on each host: find out about this one and try the connections to the others."""

import contextlib
import ipaddress
import json
import os
import platform
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import lightning
import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from cnnstrategies.cluster.addresses import Interface, choose_interface, interfaces, resolve
from cnnstrategies.cluster.doctor_host import Place, gpu_problems
from cnnstrategies.cluster.meeting import open_store
from cnnstrategies.cluster.probe import Probe, measure
from cnnstrategies.errors import ConfigurationError

POLL = 0.05  # seconds
POD = "JOB_COMPLETION_INDEX"  # Kubernetes sets it in the pods of an Indexed Job.
LINK_SECONDS = 5.0
SHARED_SECONDS = 5.0  # NFS shows a new file to other clients after a few seconds


@dataclass
class Facts:
    """One host.

    Attributes:
        node: Its number in the run.
        host: Its own name.
        interface: The network interface that leads to the others.
        address: Its address there.
        port: Where its probe answers.
        versions: Version of each program that must be the same everywhere.
        shared_memory: Bytes that fit into the memory through which its processes hand each other batches; None where
            that is not a file system.
        astray: In the first pod, where the main address leads, if not to itself.
        serves: Whether its probe answers where a server of parameters will listen; it then needs nothing else.
        gpus: What is wrong with its GPUs.
    """

    node: int
    host: str
    interface: str
    address: str
    port: int
    versions: dict[str, str]
    shared_memory: int | None = None
    astray: str | None = None
    serves: bool = False
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


@dataclass
class Report:
    """What all hosts found out.

    Attributes:
        nodes: Number of hosts that should be there.
        hosts: Those that are, by number.
        findings: Theirs.
        directory: The shared directory.
    """

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


def examine_alone() -> Report:
    """Examine this host, which no launcher has started with others."""
    me = Facts(0, socket.gethostname(), "", "", 0, versions(), shared_memory(), gpus=gpu_problems())
    return Report(1, {0: me}, {0: Findings()}, "")


def _astray(main_address: str) -> str | None:
    """Where a name that should lead to this host leads, if not to it."""
    address = resolve(main_address)
    if ipaddress.ip_address(address).is_loopback or address in [one.address for one in interfaces()]:
        return None
    return address


def examine(
    place: Place, directory: Path, interface: str | None, wait: float, listen: int | None = None
) -> Report | None:
    """Examine the cluster, together with the other hosts' processes.

    Args:
        place: Of this process.
        directory: Should be the same on all hosts.
        interface: Name or subnet of the network interface to use; by default the one on the route.
        wait: Seconds to wait for the other hosts.
        listen: Port of this host that the others try, where a server will listen; by default a free one.

    Returns:
        On the first host, what all of them found out; None on the others.

    Raises:
        ConfigurationError: This host does not reach the first one, has no such interface, or its port is taken.
    """
    astray = _astray(place.main_address) if POD in os.environ and place.node == 0 else None
    # By a name that leads elsewhere it would wait there for itself.
    address = place.main_address if astray is None else "127.0.0.1"
    store = open_store(address, place.main_port, place.node == 0, wait)
    mine = _choose(store, place, interface, wait)
    probe = _probe(mine.address, listen)
    own = (socket.gethostname(), mine.name, mine.address, probe.port)
    me = Facts(place.node, *own, versions(), shared_memory(), astray, listen is not None, gpu_problems())
    store.set(f"facts/{me.node}", json.dumps(asdict(me)))
    present = _present(store, place, wait)
    hosts = {node: Facts(**json.loads(store.get(f"facts/{node}"))) for node in present}
    findings = Findings()
    meetings = Meetings(store, place.node, present, wait)
    _try_links(hosts, me, findings, meetings)
    _try_directory(directory, hosts, me, findings, meetings)
    store.set(f"findings/{me.node}", json.dumps(asdict(findings)))
    meetings.all_here("found")
    if place.node != 0:
        store.set(f"end/{me.node}", "")
        return None
    everything = {node: _findings(json.loads(store.get(f"findings/{node}"))) for node in present}
    meetings.wait_for([f"end/{node}" for node in present if node != 0])
    probe.close()
    return Report(place.nodes, hosts, everything, str(directory))


def _probe(address: str, port: int | None) -> Probe:
    try:
        return Probe(address, port or 0)
    except OSError as error:
        raise ConfigurationError(
            f"{socket.gethostname()} cannot listen at {address} port {port}, where its server will: {error.strerror}: "
            "end what uses the port (`ss -ltnp`), or choose another one"
        ) from error


class Meetings:
    """Points that all hosts reach together.

    Args:
        store: Through which they meet.
        node: This host's number.
        present: All hosts' numbers.
        wait: Seconds to wait for each other.
    """

    def __init__(self, store: Store, node: int, present: list[int], wait: float) -> None:
        self._store = store
        self._node = node
        self._present = present
        self._wait = wait

    def all_here(self, point: str) -> None:
        """Wait until all hosts have come to a point."""
        self._store.set(f"{point}/{self._node}", "")
        self.wait_for([f"{point}/{node}" for node in self._present])

    def wait_for(self, keys: list[str]) -> None:
        """Wait until all of these keys are there.

        Raises:
            ConfigurationError: They are not in time.
        """
        deadline = time.monotonic() + self._wait
        while keys and not self._store.check(keys):
            if time.monotonic() > deadline:
                late = [key for key in keys if not self._store.check([key])]
                raise ConfigurationError(
                    f"{socket.gethostname()} has waited {self._wait:g} s for node {late[0].rpartition('/')[2]}, which "
                    "was there before: look at its output"
                )
            time.sleep(POLL)


def _choose(store: Store, place: Place, interface: str | None, wait: float) -> Interface:
    if place.node != 0:
        mine = choose_interface(interface, resolve(place.main_address))
        store.set("source", mine.address)
        return mine
    # The route to its own address would be the loopback's.
    deadline = time.monotonic() + wait
    while not store.check(["source"]):
        if time.monotonic() > deadline:
            raise ConfigurationError(
                f"no other host has come to {socket.gethostname()}, port {place.main_port}, within {wait:g} s: is the "
                f"doctor started on all {place.nodes} hosts, do they resolve {place.main_address}, and does a firewall "
                "block the port?"
            )
        time.sleep(POLL)
    return choose_interface(interface, store.get("source").decode())


def _present(store: Store, place: Place, wait: float) -> list[int]:
    """The numbers of the hosts that have come in time; the first host decides."""
    deadline = time.monotonic() + wait
    if place.node != 0:
        while not store.check(["present"]):
            if time.monotonic() > deadline + LINK_SECONDS:
                raise ConfigurationError(f"{socket.gethostname()}: the first host has not begun within {wait:g} s")
            time.sleep(POLL)
    else:
        keys = [f"facts/{node}" for node in range(place.nodes)]
        while not store.check(keys) and time.monotonic() < deadline:
            time.sleep(POLL)
        store.set("present", json.dumps([node for node, key in enumerate(keys) if store.check([key])]))
    present: list[int] = json.loads(store.get("present"))
    return present


def rounds(nodes: list[int]) -> list[list[tuple[int, int]]]:
    """Rounds in which every two hosts meet once, and each host is in one pair at most (the circle method)."""
    circle: list[int | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    half = len(circle) // 2
    result = []
    for _ in range(len(circle) - 1):
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        result.append([(a, b) for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return result


def _try_links(hosts: dict[int, Facts], me: Facts, findings: Findings, meetings: Meetings) -> None:
    """Measure the connections to the others, one at a time, and while no other measurement uses this host.

    Between servers, and to them, training uses the one port; a server connects to the trainer at the main port alone.
    """
    for number, pairs in enumerate(rounds(list(hosts))):
        for turn in (0, 1):
            meetings.all_here(f"round/{number}/{turn}")
            for pair in pairs:
                if pair[turn] != me.node:
                    continue
                other = hosts[pair[1 - turn]]
                if me.serves and not other.serves:
                    continue
                try:
                    found = measure(other.address, other.port, LINK_SECONDS)
                    findings.links[other.node] = (found.round_trip, found.bandwidth, found.clock)
                except OSError as error:
                    findings.failures[other.node] = error.strerror or str(error) or type(error).__name__


def _try_directory(directory: Path, hosts: dict[int, Facts], me: Facts, findings: Findings, meetings: Meetings) -> None:
    """Write a file as a checkpoint is written, and look for the other hosts' files."""
    token = f"{hosts[0].host}-{hosts[0].port}"
    mine = _file(directory, token, me.node)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        partial = mine.with_name(mine.name + ".partial")
        partial.write_text(str(me.node))
        partial.replace(mine)
    except OSError as error:
        findings.shared.append(f"cannot write there: {error.strerror}")
    meetings.all_here("written")
    files = {node: _file(directory, token, node) for node in hosts}
    deadline = time.monotonic() + SHARED_SECONDS
    unseen = [node for node in files if node != me.node]
    while unseen and time.monotonic() < deadline:
        unseen = [node for node in unseen if not _holds(files[node], str(node))]
        time.sleep(POLL)
    findings.shared += [f"does not see what {hosts[node].host} writes there" for node in unseen]
    meetings.all_here("seen")
    for path in (mine, mine.with_name(mine.name + ".partial")):
        with contextlib.suppress(OSError):  # Where it could not write.
            path.unlink(missing_ok=True)


def _file(directory: Path, token: str, node: int) -> Path:
    return directory / f".cnnstrategies-doctor-{token}-{node}"


def _holds(path: Path, text: str) -> bool:
    try:
        return path.read_text() == text
    except OSError:
        return False


def _findings(record: dict[str, Any]) -> Findings:
    links = {int(node): tuple(values) for node, values in record["links"].items()}
    failures = {int(node): reason for node, reason in record["failures"].items()}
    return Findings(links, failures, record["shared"])
