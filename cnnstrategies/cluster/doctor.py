"""The examination of hosts in ``cnnstrategies doctor``: versions, connections and a shared directory."""

import contextlib
import json
import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import lightning
import torch

from cnnstrategies.cluster.environment import DoctorPlace
from cnnstrategies.cluster.hosts import meet, wait_for
from cnnstrategies.cluster.probe import ProbedHost, measure
from cnnstrategies.cluster.stores import POLL, open_store
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.runtime.whole_file import whole_file

LINK_SECONDS = 5.0
SHARED_SECONDS = 5.0  # NFS shows a new file to other clients after a few seconds.
SHARED = "checkpoints need a directory that all hosts share and may write to, as an NFS mount; name it with --shared"
SHARED_MEMORY = 2**28  # bytes; a container has a quarter of this by default
DRIVER = Path("/proc/driver/nvidia/gpus")  # The driver has an entry for each card, also if torch cannot use the card.


@dataclass
class HostReport:
    """Results of one host's examination.

    Attributes:
        name: Name of the host.
        versions: Version of each program that must be the same on all hosts.
        problems: Problems of this host with their remedies, one line each.
        interface: Name of the network interface that leads to the other hosts.
        address: IP address of this interface.
        links: Connections to the other hosts: number of the host, round trip in seconds, bandwidth in bytes/s.
    """

    name: str
    versions: dict[str, str]
    problems: list[str]
    interface: str = ""
    address: str = ""
    links: list[tuple[int, float, float]] = field(default_factory=list)


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all hosts, by program."""
    try:
        package = version("cnnstrategies")
    except PackageNotFoundError:
        package = "not installed"
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None  # type: ignore[no-untyped-call]
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "cnnstrategies": package,
        "NCCL": ".".join(map(str, nccl)) if nccl else "none",
    }


def shared_memory() -> int:
    """Return the bytes of ``/dev/shm``, which a container limits; without it, as outside Linux, return enough."""
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return SHARED_MEMORY
    return status.f_frsize * status.f_blocks


def examine_alone(driver: Path = DRIVER) -> HostReport:
    """Examine this host without the others.

    Args:
        driver: Directory with an entry for each GPU.
    """
    report = HostReport(socket.gethostname(), versions(), [])
    if (size := shared_memory()) < SHARED_MEMORY:
        report.problems.append(
            f"{size / 2**20:.0f} MiB of shared memory, which data workers and NCCL need for their data: mount an "
            "emptyDir with `medium: Memory` at /dev/shm in a pod, or start the container with --shm-size=8g; "
            "data.init_args.num_workers=0 needs none for data"
        )
    cards = len(list(driver.glob("*")))
    if cards and not torch.cuda.is_available():
        report.problems.append(
            f"torch {torch.__version__} cannot use its {cards} GPU(s): python -c 'import torch; torch.cuda.init()' "
            "says why"
        )
    return report


def examine(place: DoctorPlace, directory: Path, interface: str | None, wait: float) -> list[HostReport] | None:
    """Examine the cluster, together with the other hosts' processes.

    Args:
        place: This process among those of ``doctor``.
        directory: Directory that should be the same on all hosts.
        interface: Name or subnet of the network interface to use; by default the interface on the route.
        wait: Seconds to wait for the other hosts.

    Returns:
        The reports of all hosts on the first host; None on the others.
    """
    store = open_store(place.main_address, place.main_port, place.node == 0, wait)
    mine, probe, others = meet(store, place.node, place.nodes, place.main_address, interface, wait)
    report = examine_alone()
    report.interface, report.address = mine.name, mine.address

    def wait_for_all(point: str) -> None:
        store.set(f"{point}/{place.node}", "")
        wait_for(store, [f"{point}/{node}" for node in range(place.nodes)], place.node, place.nodes, wait)

    # In each round a host measures one connection, while one other host measures the connection to it.
    for number, peer in enumerate([*others[place.node :], *others[: place.node]]):
        wait_for_all(f"round/{number}")
        report.links.append((peer.node, *measure(peer.address, peer.port, LINK_SECONDS)))
    run = json.loads(store.get("host/0"))[2]  # The first host's port tells files of this run from another run's files.
    files = {node: directory / f".cnnstrategies-doctor-{run}-{node}" for node in range(place.nodes)}
    try:
        with whole_file(files[place.node], SHARED):  # Checkpoints are written in the same way.
            pass
    except ConfigurationError as error:
        report.problems.append(str(error))
    wait_for_all("written")
    missing = unseen(others, files)
    report.problems += [f"{directory}: files that {peer.host} writes do not appear here: {SHARED}" for peer in missing]
    wait_for_all("seen")
    with contextlib.suppress(OSError):  # The file does not exist if this host could not write it.
        files[place.node].unlink()
    store.set(f"report/{place.node}", json.dumps(asdict(report)))
    if place.node != 0:
        return None
    keys = [f"report/{node}" for node in range(place.nodes)]
    wait_for(store, keys, place.node, place.nodes, wait)
    probe.close()
    return [HostReport(**json.loads(store.get(key))) for key in keys]


def unseen(others: Sequence[ProbedHost], files: Mapping[int, Path]) -> list[ProbedHost]:
    """Return the other hosts whose files do not appear on this host.

    Args:
        others: The other hosts.
        files: File of each host, by its number.
    """
    deadline = time.monotonic() + SHARED_SECONDS
    missing = list(others)
    while missing and time.monotonic() < deadline:
        missing = [peer for peer in missing if not files[peer.node].exists()]
        time.sleep(POLL)
    return missing
