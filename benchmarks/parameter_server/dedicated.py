"""Dedicated servers against gloo's all-reduce where the link is the bottleneck: gradients and parameters of 40 MB.

    python benchmarks/parameter_server/dedicated.py

Each worker, and each of as many servers, has a host of its own with a link of 100 Mbit/s: network namespaces. A ring
all-reduce of n hosts sends 2 (n - 1) / n times the gradients over each link in each direction. A parameter server sends
them once, and the parameters once, in the other direction: at the same time where steps are pipelined, as they are with
dedicated servers. Nothing is computed beside. Target: faster than gloo.
"""

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fits import TIME_LIMIT  # First: it makes the pipeline's benchmarks importable.
from hosts import hosts, missing, run_on
from pieces import Pieces, parser
from ranks import report
from torch import nn

from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.core.view import ServerInfo, View, WorkerInfo
from cnnstrategies.paramserver.drivers.server import ServerService
from cnnstrategies.paramserver.membership import Views, unchanging
from cnnstrategies.paramserver.specification import Specification, hyperparameters
from cnnstrategies.strategies.parameter_server.options import PIPELINED_BYTES

SIZES = (4, 8)  # workers, and as many servers
MEGABITS = 100
TENSORS, NUMBERS = 10, 1_000_000
STEPS, FIRST = 6, 2  # the first do not count
GLOO = "gloo, all-reduce"
VARIANTS: dict[str, dict[str, Any]] = {
    "parameter server": {},
    "parameter server, pipelined": {"pipelined": True, "slice_bytes": PIPELINED_BYTES},
}


def specification(name: str, workers: int) -> tuple[Specification, torch.optim.Optimizer]:
    """Return the specification of the trained parameters, and their optimizer."""
    parameters = [nn.Parameter(torch.zeros(NUMBERS)) for _ in range(TENSORS)]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    named = [(str(number), parameter) for number, parameter in enumerate(parameters)]
    options = VARIANTS[name]
    return Specification.of(named, optimizer, workers, servers=workers, session=1, timeout=120, **options), optimizer


def all_reduce() -> list[float]:
    """Seconds of each."""
    dist.init_process_group("gloo")
    values = torch.ones(TENSORS * NUMBERS)
    times = []
    for _ in range(STEPS):
        dist.barrier()
        begun = time.perf_counter()
        dist.all_reduce(values)
        times.append(time.perf_counter() - begun)
    dist.destroy_process_group()
    return times


def serve(folder: Path, workers: int, rank: int, name: str) -> None:
    """A server, until the workers are through."""
    made, _ = specification(name, workers)
    server = ServerService(made, views(workers), rank - workers, endpoint(rank), insecure=True)
    thread = threading.Thread(target=server.run)
    thread.start()
    while len(list(folder.glob("through-*"))) < workers:
        time.sleep(0.05)
    server.stop()
    thread.join()


def push_and_pull(folder: Path, workers: int, rank: int, name: str) -> list[float]:
    """Seconds of each step of a worker."""
    made, optimizer = specification(name, workers)
    values = [torch.zeros(NUMBERS) for _ in range(TENSORS)]
    gradients = [torch.ones(NUMBERS) for _ in range(TENSORS)]
    worker = Worker(made, values, views(workers), rank)
    if rank == 0:
        worker.initialise()
    worker.join()
    times = []
    for _ in range(STEPS):
        begun = time.perf_counter()
        worker.begin_step(hyperparameters(optimizer), 1)
        for index in reversed(range(TENSORS)):
            worker.push(index, gradients[index])
        worker.end_step()
        worker.wait_all()
        times.append(time.perf_counter() - begun)
    worker.leave()
    (folder / f"through-{rank}").touch()
    worker.close()
    return times


def endpoint(rank: int) -> str:
    """Where a server listens."""
    return f"tcp://10.77.0.{rank + 1}:7700"


def views(workers: int) -> Views:
    """Return the view with the addresses of all servers and workers, which every role gets."""
    servers = tuple(ServerInfo(number, endpoint(workers + number)) for number in range(workers))
    return unchanging(View(1, servers, tuple(WorkerInfo(number) for number in range(workers))))


def host(folder: Path, name: str, workers: int) -> None:
    """One host's part."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if rank >= workers:
        serve(folder, workers, rank, name)
        return
    times = all_reduce() if name == GLOO else push_and_pull(folder, workers, rank, name)
    if rank == 0:
        print("seconds", statistics.median(times[FIRST:]))


def measure(piece: str) -> float:
    """Seconds of an all-reduce, or of a push and pull: the median of some."""
    number, name = piece.split(": ")[1:]
    workers = int(number)
    with tempfile.TemporaryDirectory() as folder, hosts(workers * (1 if name == GLOO else 2), MEGABITS) as names:
        command = [sys.executable, sys.argv[0], "--folder", folder, "--name", name, "--workers", number]
        return float(run_on(names, command, TIME_LIMIT).split("seconds ")[1].split()[0])


def main() -> None:
    """Measure each with each number of hosts, and write the page."""
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=3)
    for name, kind in (("--folder", str), ("--name", str), ("--workers", int)):
        made.add_argument(name, type=kind, help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.folder:
        host(Path(options.folder), options.name, options.workers)
        return
    if (reason := missing()) is not None:
        print(f"skipped: {reason}")
        return
    names = (GLOO, *VARIANTS)
    wanted = [f"{turn}: {size}: {name}" for turn in range(options.rounds) for size in SIZES for name in names]
    pieces = Pieces(options)
    if not pieces.measure(wanted, measure):
        return
    rows = [("workers, and servers", "what", "seconds", "times gloo's, of each round")]
    for size in SIZES:
        for name in names:
            seconds, base = (
                [pieces.known[f"{turn}: {size}: {contestant}"] for turn in range(options.rounds)]
                for contestant in (name, GLOO)
            )
            times = ", ".join(f"{time / base_time:.2f}" for time, base_time in zip(seconds, base, strict=True))
            rows.append((str(size), name, f"{statistics.median(seconds):.2f}", times))
    text = f"{__doc__}\n{TENSORS} tensors of {NUMBERS:,} float32 numbers; SGD with momentum on the servers."
    report(Path(__file__).with_suffix(".md"), "Dedicated servers over slow links", text, rows)


if __name__ == "__main__":
    main()
