"""How soon threads that wait should sleep: a training step by what the environment tells torch's OpenMP of it.

    python benchmarks/overhead/threads.py [--rounds 7]

Its threads spin for some milliseconds when they have nothing to do, and a thread that spins on a core keeps another
process from it. `OMP_WAIT_POLICY=PASSIVE` has them sleep at once; `GOMP_SPINCOUNT=30000` after a tenth of the usual
turns. ResNet-20 with 32 images of 32 x 32 a process: alone with a thread for each of two cores; the same beside two
loading processes that never rest; as two ranks of DDP with a thread each, which is what Lightning's launchers choose;
and as two ranks with two threads each, as ranks have that something else started, where nobody binds them to cores. The
ways take turns.

No value is the best one everywhere, so the command line sets none. Where processes share cores, give each fewer
threads, or set `OMP_WAIT_POLICY=PASSIVE`; not where a process has its cores for itself.
"""

import argparse
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from cnnstrategies.networks import SmallResNet

sys.path.append(str(Path(__file__).parents[1] / "pipeline"))
from ranks import report

WAYS = {  # Ranks, threads of each, processes that load beside them.
    "alone, 2 threads": (1, 2, 0),
    "alone, 2 threads, 2 loaders": (1, 2, 2),
    "2 ranks, a thread each": (2, 1, 0),
    "2 ranks, 2 threads each": (2, 2, 0),
}
POLICIES: tuple[dict[str, str], ...] = ({}, {"OMP_WAIT_POLICY": "PASSIVE"}, {"GOMP_SPINCOUNT": "30000"})
STEPS, WARM = 25, 5


def load() -> None:
    """Work as a loading process does, without an end."""
    torch.set_num_threads(1)
    images = torch.rand(64, 3, 64, 64)
    while True:
        F.interpolate(images, size=32, mode="bilinear")


def rank(number: int, ranks: int, threads: int, store: str) -> None:
    """Train, and print the median seconds of a step."""
    torch.set_num_threads(threads)
    network: torch.nn.Module = SmallResNet(10)
    if ranks > 1:
        dist.init_process_group("gloo", f"file://{store}", rank=number, world_size=ranks)
        network = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(network.parameters(), 0.01)
    images, targets = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(network(images), targets).backward()
        optimizer.step()
        times.append(time.perf_counter() - began)
    if number == 0:
        print(statistics.median(times[WARM:]))


def train(ranks: int, threads: int, loaders: int) -> None:
    """Start all processes, and end with the ranks."""
    context = multiprocessing.get_context("fork")
    for _ in range(loaders):
        context.Process(target=load, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=rank, args=(n, ranks, threads, f"{folder}/store")) for n in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()


def measured(way: str, policy: dict[str, str]) -> float:
    """Seconds of a step."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
    command = [sys.executable, __file__, "--way", way]
    done = subprocess.run(command, env={**environment, **policy}, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    """Race, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        train(*WAYS[options.way])
        return
    times: dict[tuple[str, int], list[float]] = {(way, policy): [] for way in WAYS for policy in range(len(POLICIES))}
    for number in range(options.rounds):
        for way in WAYS:
            for policy in range(len(POLICIES))[:: 1 if number % 2 else -1]:
                times[way, policy].append(measured(way, POLICIES[policy]))
                print(way, POLICIES[policy], times[way, policy][-1], flush=True)
    rows = [("processes", "as it is, ms", "PASSIVE, ms", "ratio", "GOMP_SPINCOUNT=30000, ms", "ratio")]
    for way in WAYS:
        usual, *others = ([*times[way, policy]] for policy in range(len(POLICIES)))
        row = [way, f"{1e3 * statistics.median(usual):.0f}"]
        for other in others:
            ratios = [time / before for time, before in zip(other, usual, strict=True)]
            row.append(f"{1e3 * statistics.median(other):.0f}")
            row.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        rows.append(tuple(row))
    first, _, rest = (__doc__ or "").partition("\n\n")
    text = "\n\n".join((first, rest.partition("\n\n")[2]))
    text += "\nRatios are medians of those of the rounds, with the least and the most."
    report(Path(__file__).with_suffix(".md"), "Threads that wait", text, rows, "gloo")


if __name__ == "__main__":
    main()
