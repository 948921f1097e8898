"""Measure the connection between two processes: latency, bandwidth, and the prices of sums and exchanges."""

import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from cnnstrategies.planning.cluster import Cluster, Host
from cnnstrategies.planning.costs import Link
from cnnstrategies.runtime.processes import temporary_folder

# Sizes in bytes of the two messages whose round trips are measured.
SMALL = 1024
LARGE = 8 * 2**20
WARM_UP = 4
ROUNDS = 12
# Size in bytes and number of rounds for the links of a training run. They are smaller than `LARGE` and `ROUNDS`,
# because connections between machines may be slow.
MEDIUM = 2**20
FEW_ROUNDS = 4
# The large message is assumed to take longer than the small message by at least this fraction of the large message's
# time, because a smaller difference cannot be distinguished from noise.
LEAST = 0.01
# Messages and computations of a round in which the prices of sums and exchanges are measured, and the largest and the
# smallest number of rounds.
MEETINGS = 8
PRICE_ROUNDS = 10, 3
PRICE_SECONDS = 2.0  # Over slow connections, fewer rounds are measured, so that they take about this time.
# Shape of the images whose convolution is the computation between two messages. It takes about 0.3 ms on a CPU core.
WORK = 1, 8, 128, 128


def measure_local_link(device: torch.device, backend: str) -> Link:
    """Measure the connection between two processes on this machine.

    Latency and bandwidth are computed from two durations: the duration of the fastest of 12 round trips with 1 KiB, and
    the duration of the fastest of 12 round trips with 8 MiB. For sums and exchanges see :func:`prices`.

    Args:
        device: Device of the type that training will use. If it is a GPU, the two processes use the first two GPUs.
        backend: Backend of torch.distributed, such as ``gloo`` or ``nccl``.

    Raises:
        RuntimeError: One of the processes failed, for example because the backend is not available.
    """
    with temporary_folder("cnnstrategies_links_") as folder:
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
        small, large, *measured = (float(text) for text in (Path(folder) / "times").read_text().split())
    return _link(small, large, LARGE, *measured)


def _ping_pong(rank: int, folder: str, device: torch.device, backend: str) -> None:
    torch.set_num_threads(1)
    # Both processes use the loopback interface. The environment variables are not restored, because this process ends
    # after the measurement.
    os.environ |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo")
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )
    fastest = round_trips(rank == 0, 1 - rank, (SMALL, LARGE), device, ROUNDS)
    measured = prices(1 - rank, device)
    if rank == 0:
        (Path(folder) / "times").write_text(" ".join(map(str, (*fastest, *measured))))
    dist.destroy_process_group()


def measure_cluster(nodes: int, device: torch.device) -> Cluster:
    """Measure the links between the ranks of the default process group. All ranks must call this.

    Rank 0 measures the link to rank 1, and the link to the first rank of the next machine. All links inside machines
    are assumed to be equal to the link to rank 1. All links between machines are assumed to be equal to the link to the
    next machine. Sums and exchanges are not measured: two of several ranks would need a process group of their own,
    which takes memory of GPUs.

    Args:
        nodes: Number of machines.
        device: This rank's device.

    Returns:
        The cluster of all ranks. Only rank 0 may use the result: on the other ranks, the links have meaningless values.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    inside = _between(rank, 1, device)
    if nodes == 1:
        return Cluster.flat(ranks, inside)
    each = ranks // nodes
    network = _between(rank, each, device) if each > 1 else inside
    return Cluster((Host(each, network, inside),) * nodes)


def _between(rank: int, peer: int, device: torch.device) -> Link:
    """Measure the link between rank 0 and another rank. On all other ranks, return a link with meaningless values."""
    if rank not in (0, peer):
        return Link(1.0, 0.0)
    small, large = round_trips(rank == 0, peer if rank == 0 else 0, (SMALL, MEDIUM), device, FEW_ROUNDS)
    return _link(small, large, MEDIUM)


def measure_pair(device: torch.device) -> Link:
    """Measure the link between the two ranks of the default process group, with sums and exchanges.

    Both ranks must call this, and may use the result. The bandwidth is measured with 1 MiB, because the connection may
    be slow.
    """
    rank = dist.get_rank()
    small, large = round_trips(rank == 0, 1 - rank, (SMALL, MEDIUM), device, FEW_ROUNDS)
    return _link(small, large, MEDIUM, *prices(1 - rank, device))


def prices(peer: int, device: torch.device) -> tuple[float, float]:
    """Measure how much longer two ranks take to compute if they also sum, or exchange messages. Both must call this.

    In a step, ranks compute between two messages. Then their threads sleep and wake, and ranks wait for each other. So
    messages that follow each other, as in :func:`round_trips`, are faster than in a step. The prices are differences of
    medians of 3 to 10 rounds, each with 8 computations and 8 messages.

    Args:
        peer: Rank of the other process. The default process group must have no further ranks.
        device: Device that computes, and that holds the messages.

    Returns:
        Seconds of a sum of 256 numbers, and seconds of an exchange of 1 KiB in both directions.
    """
    images, weights = torch.zeros(WORK, device=device), torch.zeros(8, 8, 3, 3, device=device)
    numbers, received = (torch.zeros(SMALL // 4, device=device) for _ in range(2))

    def exchange() -> None:
        posted = [dist.P2POp(dist.isend, numbers, peer), dist.P2POp(dist.irecv, received, peer)]
        for work in dist.batch_isend_irecv(posted):
            work.wait()

    def seconds(message: Callable[[], object]) -> float:
        dist.all_reduce(numbers)  # Both ranks begin at the same time.
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        start = time.perf_counter()
        for _ in range(MEETINGS):
            torch.conv2d(images, weights)
            message()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return (time.perf_counter() - start) / MEETINGS

    messages: tuple[Callable[[], object], ...] = (lambda: None, lambda: dist.all_reduce(numbers), exchange)
    # The first round starts connections, so its times are left out.
    duration = torch.tensor([MEETINGS * sum(seconds(message) for message in messages)], device=device)
    dist.all_reduce(duration, dist.ReduceOp.MAX)  # Both ranks measure the same number of rounds.
    most, least = PRICE_ROUNDS
    count = min(most, max(least, int(PRICE_SECONDS / duration.item())))
    rounds = [[seconds(message) for message in messages] for _ in range(count)]
    computing, *others = (statistics.median(times) for times in zip(*rounds, strict=True))
    sums, exchanges = (max(0.0, other - computing) for other in others)
    return sums, exchanges


def _link(small: float, large: float, size: int, sums: float = 0.0, exchanges: float = 0.0) -> Link:
    """Compute a link's bandwidth and latency from two round trips. A message takes half the time of a round trip.

    Args:
        small: Seconds of a round trip with `SMALL` bytes.
        large: Seconds of a round trip with `size` bytes.
        size: Size of the large message in bytes.
        sums: Seconds of a sum of a few numbers; 0 if not measured.
        exchanges: Seconds of an exchange of small messages; 0 if not measured.
    """
    bandwidth = (size - SMALL) / (max(large - small, LEAST * large) / 2)
    return Link(bandwidth, latency=small / 2, sum=sums, exchange=exchanges)


def round_trips(first: bool, peer: int, sizes: tuple[int, ...], device: torch.device, rounds: int) -> list[float]:
    """Return the seconds of the fastest round trip with each message size.

    Slower round trips are left out because other work on the machine may have delayed them. Each round has one round
    trip with each size, so that a busy period of the machine affects all sizes.

    Args:
        first: Whether this rank sends first.
        peer: Rank of the other process.
        sizes: Sizes of the messages in bytes.
        device: Device that holds the messages.
        rounds: Number of measured round trips with each size.
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
