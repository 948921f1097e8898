"""Checks of ``cnnstrategies doctor`` on all hosts: software versions, connections, and a shared directory."""

import contextlib
import json
import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from cnnstrategies.cluster.devices import measured_devices
from cnnstrategies.cluster.environment import DoctorPlace
from cnnstrategies.cluster.hosts import meet, wait_for
from cnnstrategies.cluster.probe import ProbedHost, measure
from cnnstrategies.cluster.rendezvous import Party, take_part
from cnnstrategies.cluster.run_identity import launch_of
from cnnstrategies.cluster.stores import POLL, serve
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.identity import Identity
from cnnstrategies.planning.measure_links import prices
from cnnstrategies.runtime.whole_file import whole_file

LINK_SECONDS = 5.0  # Time-out in seconds for connecting to another host.
SHARED_SECONDS = 5.0  # Longest time to wait for another host's file. With NFS a new file appears after a few seconds.
SHARED = (
    "checkpoints need a directory that all hosts share and can write to, such as an NFS mount: set it with --shared"
)
SHARED_MEMORY = 2**28  # Smallest sufficient size of /dev/shm in bytes. A container's default is a quarter of this size.
# Directory of the NVIDIA driver with an entry for each GPU, even if torch cannot use the GPU.
DRIVER = Path("/proc/driver/nvidia/gpus")


@dataclass
class HostReport:
    """Results of the checks on one host.

    Attributes:
        name: Name of the host.
        versions: Software versions that must be equal on all hosts; keys are the names of the software.
        problems: Problems of this host with their remedies, one line each.
        interface: Name of the network interface for the traffic to the other hosts.
        address: IP address of this interface.
        devices: A tuple for each device: name, bytes of memory, and measured convolutions per second.
        links: A tuple for each connection to another host: number of the other host, round-trip time in seconds, and
            bandwidth in bytes/s.
        prices: Seconds of a sum over this host and the next host, and seconds of an exchange, both by gloo; empty if
            they were not measured.
    """

    name: str
    versions: dict[str, str]
    problems: list[str]
    interface: str = ""
    address: str = ""
    devices: list[tuple[str, int, float]] = field(default_factory=list)
    links: list[tuple[int, float, float]] = field(default_factory=list)
    prices: tuple[float, ...] = ()


def versions() -> dict[str, str]:
    """Return the software versions that must be equal on all hosts. The keys are the names of the software."""
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
    """Return the size of ``/dev/shm`` in bytes. In a container this size is often limited.

    If ``/dev/shm`` does not exist, for example on macOS, the result is the sufficient size ``SHARED_MEMORY``.
    """
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return SHARED_MEMORY
    return status.f_frsize * status.f_blocks


def examine_alone(driver: Path = DRIVER) -> HostReport:
    """Make the checks that do not need the other hosts.

    Args:
        driver: Directory in which the NVIDIA driver has an entry for each GPU.
    """
    report = HostReport(socket.gethostname(), versions(), [])
    if (size := shared_memory()) < SHARED_MEMORY:
        report.problems.append(
            f"{size / 2**20:.0f} MiB of shared memory is not enough for data workers and NCCL: mount an emptyDir with "
            "`medium: Memory` at /dev/shm in a pod, or start the container with --shm-size=8g; without shared memory "
            "for data workers, set data.init_args.num_workers=0"
        )
    cards = len(list(driver.glob("*")))
    if cards and not torch.cuda.is_available():
        report.problems.append(
            f"torch {torch.__version__} cannot use the {cards} GPU(s) of this host: run python -c 'import torch; "
            "torch.cuda.init()' to see the reason"
        )
    report.devices = [astuple(device) for device in measured_devices()]
    return report


def examine(place: DoctorPlace, directory: Path, interface: str | None, wait: float) -> list[HostReport] | None:
    """Make all checks of the cluster. One process on each host must call this.

    Args:
        place: Node and rank of this process.
        directory: Directory that should be shared by all hosts.
        interface: Name or subnet of the network interface to use; by default the interface on the route to the other
            hosts.
        wait: Longest time to wait for the other hosts, in seconds.

    Returns:
        On the first host, the reports of all hosts; on the other hosts None.
    """
    identity = Identity("doctor", launch=launch_of(os.environ))
    party = Party(place.environment, place.nodes, place.node, place.nodes, identity, "doctor", wait)
    meeting = take_part(party, serve)
    store = meeting.shared_store(wait)
    mine, probe, others = meet(store, place.node, place.nodes, meeting.address, interface, wait)
    report = examine_alone()
    report.interface, report.address = mine.name, mine.address

    def wait_for_all(point: str) -> None:
        store.set(f"{point}/{place.node}", "")
        wait_for(store, [f"{point}/{node}" for node in range(place.nodes)], place.node, place.nodes, wait)

    # In each round, a host measures one connection, and one other host measures its connection to this host. More
    # measurements at the same time would have to share the bandwidth.
    for number, peer in enumerate([*others[place.node :], *others[: place.node]]):
        wait_for_all(f"round/{number}")
        report.links.append((peer.node, *measure(peer.address, peer.port, LINK_SECONDS)))
    if place.node < 2:
        try:
            report.prices = prices_of_sums(PrefixStore("prices", store), place.node, mine.name, wait)
        except RuntimeError as error:
            report.problems.append(
                f"gloo fails over the interface {mine.name}: {str(error).splitlines()[0]}: training on CPUs needs "
                "gloo, choose another interface with --interface"
            )
    wait_for_all("prices")
    run = json.loads(store.get("host/0"))[2]  # The first host's port distinguishes the files of simultaneous runs.
    files = {node: directory / f".cnnstrategies-doctor-{run}-{node}" for node in range(place.nodes)}
    try:
        with whole_file(files[place.node], SHARED):  # Runs write checkpoints with this function, so it is tested here.
            pass
    except ConfigurationError as error:
        report.problems.append(str(error))
    wait_for_all("written")
    missing = unseen(others, files)
    report.problems += [
        f"{directory}: a file from {peer.host} does not appear on this host: {SHARED}" for peer in missing
    ]
    wait_for_all("seen")
    with contextlib.suppress(OSError):  # The file does not exist if this host failed to write it.
        files[place.node].unlink()
    store.set(f"report/{place.node}", json.dumps(asdict(report)))
    if place.node != 0:
        return None
    keys = [f"report/{node}" for node in range(place.nodes)]
    wait_for(store, keys, place.node, place.nodes, wait)
    probe.close()
    return [HostReport(**json.loads(store.get(key))) for key in keys]


def prices_of_sums(store: Store, node: int, interface: str, wait: float) -> tuple[float, float]:
    """Measure a sum and an exchange between the first two hosts by gloo. Both hosts must call this.

    Args:
        store: Store for the addresses of the two processes.
        node: Number of this host, 0 or 1.
        interface: Name of the network interface.
        wait: Longest time to wait for the other host, in seconds.

    Returns:
        Seconds of a sum and of an exchange, as :func:`cnnstrategies.planning.measure_links.prices` defines them.

    Raises:
        RuntimeError: Gloo cannot connect the hosts.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    dist.init_process_group("gloo", store=store, rank=node, world_size=2, timeout=timedelta(seconds=wait))
    try:
        return prices(1 - node, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def unseen(others: Sequence[ProbedHost], files: Mapping[int, Path]) -> list[ProbedHost]:
    """Wait for the other hosts' files, and return the hosts whose files this host does not see within `SHARED_SECONDS`.

    Args:
        others: The other hosts.
        files: Path of each host's file; keys are the numbers of the hosts.
    """
    deadline = time.monotonic() + SHARED_SECONDS
    missing = list(others)
    while missing and time.monotonic() < deadline:
        missing = [peer for peer in missing if not files[peer.node].exists()]
        time.sleep(POLL)
    return missing
