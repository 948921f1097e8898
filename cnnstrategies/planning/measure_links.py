"""Measure the connection between two processes."""

import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from cnnstrategies.planning.cluster import Cluster, Host
from cnnstrategies.planning.costs import Link

SMALL = 1024
LARGE = 8 * 2**20
WARM_UP = 4
ROUNDS = 12
# In a run, whose network may be slow.
MEDIUM = 2**20
FEW_ROUNDS = 4
LEAST = 0.01  # of a large message's time: less than this is not told apart from noise


def measure_local_link(device: torch.device, backend: str) -> Link:
    """Latency and bandwidth between two processes of this machine, by messages that go there and back.

    Args:
        device: A device of the kind that will be used; with several GPUs the second process takes the next one.

    Returns:
        The link, from the fastest of 12 round trips of 1 KiB and of 8 MiB.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            start_processes(  # type: ignore[no-untyped-call]
                _ping_pong,
                (folder, device, backend),
                nprocs=2,
                start_method="fork" if device.type == "cpu" else "spawn",  # CUDA does not survive a fork.
            )
        except (ProcessExitedException, ProcessRaisedException) as error:
            said = str(error).strip().splitlines()[-1]
            raise RuntimeError(
                f"measuring the link with backend {backend!r} failed: {said}; give it instead"
            ) from error
        small, large = (float(line) for line in (Path(folder) / "times").read_text().split())
    return _link(small, large, LARGE)


def _ping_pong(rank: int, folder: str, device: torch.device, backend: str) -> None:
    torch.set_num_threads(1)
    os.environ |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo")  # This process ends with it.
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )
    fastest = round_trips(rank == 0, 1 - rank, (SMALL, LARGE), device, ROUNDS)
    if rank == 0:
        (Path(folder) / "times").write_text(" ".join(map(str, fastest)))
    dist.destroy_process_group()


def measure_cluster(nodes: int, device: torch.device) -> Cluster:
    """The devices of a run, as the ranks of the default group see each other; a collective.

    Returns:
        On rank 0 what it has measured to the next rank and to the next machine; on the others nothing to go by.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    inside = _between(rank, 1, device)
    if nodes == 1:
        return Cluster.flat(ranks, inside)
    each = ranks // nodes
    network = _between(rank, each, device) if each > 1 else inside
    return Cluster((Host(each, network, inside),) * nodes)


def _between(rank: int, peer: int, device: torch.device) -> Link:
    if rank not in (0, peer):
        return Link(1.0, 0.0)
    small, large = round_trips(rank == 0, peer if rank == 0 else 0, (SMALL, MEDIUM), device, FEW_ROUNDS)
    return _link(small, large, MEDIUM)


def _link(small: float, large: float, size: int) -> Link:
    """A link, from the seconds of a round trip of ``SMALL`` and of `size` bytes; one way is half of it."""
    return Link(bandwidth=(size - SMALL) / (max(large - small, LEAST * large) / 2), latency=small / 2)


def round_trips(first: bool, peer: int, sizes: tuple[int, ...], device: torch.device, rounds: int) -> list[float]:
    """Seconds of the fastest round trip of each size; the others were held up by what else the machine does.

    The sizes take turns, so that a while in which it does much else slows all of them.
    """
    buffers = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
    times: list[list[float]] = [[] for _ in sizes]
    for _ in range(WARM_UP + rounds):
        for buffer, taken in zip(buffers, times, strict=True):
            start = time.perf_counter()
            if first:
                dist.send(buffer, peer)
                dist.recv(buffer, peer)
            else:
                dist.recv(buffer, peer)
                dist.send(buffer, peer)
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            taken.append(time.perf_counter() - start)
    return [min(taken[WARM_UP:]) for taken in times]
