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
# A run may have a slow network, so the measurement at its start uses smaller messages and fewer rounds.
MEDIUM = 2**20
FEW_ROUNDS = 4
LEAST = 0.01  # Smaller differences, as a part of the large message's time, cannot be distinguished from noise.


def measure_local_link(device: torch.device, backend: str) -> Link:
    """Measure latency and bandwidth between two processes of this machine by the round trips of messages.

    Args:
        device: Device of the kind that training will use. With several GPUs the two processes take the first two.
        backend: Backend of torch.distributed.

    Returns:
        The link, computed from the fastest of 12 round trips of 1 KiB and of 8 MiB.

    Raises:
        RuntimeError: One of the processes failed, for example because the backend is not available.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            start_processes(  # type: ignore[no-untyped-call]
                _ping_pong,
                (folder, device, backend),
                nprocs=2,
                start_method="fork" if device.type == "cpu" else "spawn",  # CUDA cannot be used after a fork.
            )
        except (ProcessExitedException, ProcessRaisedException) as error:
            reason = str(error).strip().splitlines()[-1]
            raise RuntimeError(
                f"measuring the link with backend {backend!r} failed: {reason}; give --bandwidth and --latency instead"
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
    """Measure the links between the ranks of the default process group; all ranks call this function together.

    Args:
        nodes: Number of machines.
        device: This rank's device.

    Returns:
        The cluster of all ranks. On rank 0 its links are measured, to the next rank and to the next machine. The links
        on other ranks are meaningless.
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
    """Return a link from the seconds of a round trip of ``SMALL`` and of ``size`` bytes; one way takes half of that."""
    return Link(bandwidth=(size - SMALL) / (max(large - small, LEAST * large) / 2), latency=small / 2)


def round_trips(first: bool, peer: int, sizes: tuple[int, ...], device: torch.device, rounds: int) -> list[float]:
    """Return the seconds of the fastest round trip of each size, since slower trips include other work of the machine.

    The sizes take turns, so that a busy period of the machine slows all sizes.

    Args:
        first: Whether this rank sends first.
        peer: The other rank.
        sizes: Sizes of the messages, in bytes.
        device: Device of the messages.
        rounds: Round trips of each size.
    """
    buffers = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
    times: list[list[float]] = [[] for _ in sizes]
    for _ in range(WARM_UP + rounds):
        for buffer, seconds in zip(buffers, times, strict=True):
            start = time.perf_counter()
            if first:
                dist.send(buffer, peer)
                dist.recv(buffer, peer)
            else:
                dist.recv(buffer, peer)
                dist.send(buffer, peer)
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            seconds.append(time.perf_counter() - start)
    return [min(seconds[WARM_UP:]) for seconds in times]
