"""Measure the connection between two processes."""

import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from cnnstrategies.planning.costs import Link

SMALL = 1024
LARGE = 8 * 2**20
WARM_UP = 4
ROUNDS = 12


def measure_local_link(device: torch.device, backend: str) -> Link:
    """Latency and bandwidth between two processes of this machine, by messages that go there and back.

    Args:
        device: A device of the kind that will be used; with several GPUs the second process takes the next one.
        backend: Name of the torch.distributed backend.

    Returns:
        The link, from the fastest of 12 round trips of 1 KiB and of 8 MiB.

    Raises:
        RuntimeError: The processes did not finish.
    """
    # CUDA does not survive a fork.
    context: Any = mp.get_context("fork" if device.type == "cpu" else "spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_ping_pong, args=(rank, folder, device, backend), daemon=True) for rank in range(2)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=60)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        if codes != [0, 0]:
            raise RuntimeError(
                f"measuring the link with backend {backend!r} failed: exit codes {codes}; give it instead"
            )
        small, large = (float(line) for line in (Path(folder) / "times").read_text().split())
    # One way is half a round trip.
    bandwidth = (LARGE - SMALL) / max((large - small) / 2, 1e-9)
    return Link(bandwidth=bandwidth, latency=small / 2)


def _ping_pong(rank: int, folder: str, device: torch.device, backend: str) -> None:
    torch.set_num_threads(1)
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )
    fastest = []
    for size in (SMALL, LARGE):
        buffer = torch.zeros(size, dtype=torch.uint8, device=device)
        times = []
        for _ in range(WARM_UP + ROUNDS):
            start = time.perf_counter()
            if rank == 0:
                dist.send(buffer, 1)
                dist.recv(buffer, 1)
            else:
                dist.recv(buffer, 0)
                dist.send(buffer, 0)
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            times.append(time.perf_counter() - start)
        fastest.append(min(times[WARM_UP:]))  # The others were held up by what else the machine does.
    if rank == 0:
        (Path(folder) / "times").write_text(" ".join(map(str, fastest)))
    dist.destroy_process_group()
