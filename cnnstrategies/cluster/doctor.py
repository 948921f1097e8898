"""What the hosts do together in ``cnnstrategies doctor``: tell about themselves, try connections and a directory."""

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
SHARED_SECONDS = 5.0  # NFS shows a new file to other clients after a few seconds
SHARED = "checkpoints need a directory that all hosts share and may write to, as an NFS mount; name it with --shared"
SHARED_MEMORY = 2**28  # bytes; a container has a quarter of it unless it is told otherwise
DRIVER = Path("/proc/driver/nvidia/gpus")  # Has an entry for each card, whatever torch can do with it.


@dataclass
class HostReport:
    """What one host has found out.

    Attributes:
        versions: Version of each program that must be the same everywhere.
        problems: What to mend there, a line each.
        links: To the others: their number, the round trip in seconds and the bandwidth in bytes/s.
    """

    name: str
    versions: dict[str, str]
    problems: list[str]
    interface: str = ""
    address: str = ""
    links: list[tuple[int, float, float]] = field(default_factory=list)


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


def shared_memory() -> int:
    """Bytes of ``/dev/shm``, which a container limits; where there is none, as outside Linux, nothing lacks."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return SHARED_MEMORY
    return found.f_frsize * found.f_blocks


def examine_alone(driver: Path = DRIVER) -> HostReport:
    """Examine this host by itself."""
    found = HostReport(socket.gethostname(), versions(), [])
    if (size := shared_memory()) < SHARED_MEMORY:
        found.problems.append(
            f"{size / 2**20:.0f} MiB of shared memory, through which data workers and NCCL hand over what they have: "
            "mount an emptyDir with `medium: Memory` at /dev/shm in a pod, or start the container with --shm-size=8g; "
            "data.init_args.num_workers=0 does without"
        )
    cards = len(list(driver.glob("*")))
    if cards and not torch.cuda.is_available():
        found.problems.append(
            f"torch {torch.__version__} cannot use its {cards} GPU(s): python -c 'import torch; torch.cuda.init()' "
            "says why"
        )
    return found


def examine(place: DoctorPlace, directory: Path, interface: str | None, wait: float) -> list[HostReport] | None:
    """Examine the cluster, together with the other hosts' processes.

    Args:
        directory: Should be the same on all hosts.
        interface: Name or subnet of the network interface to use; by default the one on the route.
        wait: Seconds to wait for the other hosts.

    Returns:
        On the first host, what each of them found out; None on the others.
    """
    store = open_store(place.main_address, place.main_port, place.node == 0, wait)
    mine, probe, others = meet(store, place.node, place.nodes, place.main_address, interface, wait)
    found = examine_alone()
    found.interface, found.address = mine.name, mine.address

    def all_here(point: str) -> None:
        store.set(f"{point}/{place.node}", "")
        wait_for(store, [f"{point}/{node}" for node in range(place.nodes)], place.node, place.nodes, wait)

    # One connection at a time, while one other host measures that to this one.
    for number, peer in enumerate([*others[place.node :], *others[: place.node]]):
        all_here(f"round/{number}")
        found.links.append((peer.node, *measure(peer.address, peer.port, LINK_SECONDS)))
    run = json.loads(store.get("host/0"))[2]  # The first host's port: files of another run have another.
    files = {node: directory / f".cnnstrategies-doctor-{run}-{node}" for node in range(place.nodes)}
    try:
        with whole_file(files[place.node], SHARED):  # As a checkpoint is written.
            pass
    except ConfigurationError as error:
        found.problems.append(str(error))
    all_here("written")
    missing = unseen(others, files)
    found.problems += [f"{directory}: does not see what {peer.host} writes there: {SHARED}" for peer in missing]
    all_here("seen")
    with contextlib.suppress(OSError):  # Where it could not write.
        files[place.node].unlink()
    store.set(f"found/{place.node}", json.dumps(asdict(found)))
    if place.node != 0:
        return None
    keys = [f"found/{node}" for node in range(place.nodes)]
    wait_for(store, keys, place.node, place.nodes, wait)
    probe.close()
    return [HostReport(**json.loads(store.get(key))) for key in keys]


def unseen(others: Sequence[ProbedHost], files: Mapping[int, Path]) -> list[ProbedHost]:
    """The other hosts whose files do not appear here."""
    deadline = time.monotonic() + SHARED_SECONDS
    left = list(others)
    while left and time.monotonic() < deadline:
        left = [peer for peer in left if not files[peer.node].exists()]
        time.sleep(POLL)
    return left
