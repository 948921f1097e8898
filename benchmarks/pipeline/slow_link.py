"""Hybrid [2, 1] against data parallel on three hosts, for AlexNet and VGG-16 over a slow link.

The hosts are network namespaces with links of 100 Mbit/s and 1 Gbit/s. Both variants run in the same processes, one
step each in turn. Bytes are what the hosts' network devices count.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hosts import hosts, missing, run_on
from networks import alexnet, images, vgg16
from ranks import TIMEOUT, report
from torch.nn.parallel import DistributedDataParallel

from cnnstrategies.pipeline.engine import Pipeline

REPLICAS = [2, 1]
SAMPLES = 12
MICROBATCHES = 4
# Network, name of the cut (before the first fully connected layer), side of the images.
NETWORKS = {"AlexNet": (alexnet, "flatten", 224), "VGG-16": (vgg16, "flatten", 64)}
COUNTERS = ("/sys/class/net/eth0/statistics/tx_bytes",)


def sent_bytes() -> int:
    """Bytes that this host has sent."""
    return sum(int(Path(counter).read_text()) for counter in COUNTERS)


def worker(network: str, steps: int) -> None:
    """One host: steps of both variants in turn; rank 0 prints seconds and bytes per step of all hosts as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    make, cut, size = NETWORKS[network]
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    inputs, targets = images(size, SAMPLES, 1000)
    whole = make()
    replicated = DistributedDataParallel(whole, gradient_as_bucket_view=True)
    hybrid = Pipeline(make(), [cut], REPLICAS, MICROBATCHES)
    first = REPLICAS[0]

    def hybrid_step() -> None:
        hybrid.module.zero_grad(set_to_none=True)
        hybrid.step(inputs[rank::first], targets[rank::first], F.cross_entropy)

    def data_parallel_step() -> None:
        replicated.zero_grad(set_to_none=True)
        F.cross_entropy(replicated(inputs[rank::world]), targets[rank::world]).backward()

    results: dict[str, list[float]] = {}
    for index in range(1 + steps):
        for name, step in (("hybrid", hybrid_step), ("ddp", data_parallel_step)):
            dist.barrier()
            before, start = sent_bytes(), time.perf_counter()
            step()
            dist.barrier()
            seconds = time.perf_counter() - start
            count = torch.tensor([sent_bytes() - before], dtype=torch.float64)
            dist.all_reduce(count)
            if index:
                results.setdefault(f"{name} seconds", []).append(seconds)
                results.setdefault(f"{name} bytes", []).append(float(count))
    if rank == 0:
        print(json.dumps({name: sorted(values)[len(values) // 2] for name, values in results.items()}))
    dist.destroy_process_group()


def crossover(rows: list[tuple[float, float, float]]) -> str:
    """The bandwidth at which both take as long, from times that are ``compute + bytes / bandwidth``."""
    (slow, hybrid_slow, ddp_slow), (fast, hybrid_fast, ddp_fast) = rows
    difference_slow, difference_fast = ddp_slow - hybrid_slow, ddp_fast - hybrid_fast
    # difference = a + b / rate through both points.
    b = (difference_slow - difference_fast) / (1 / slow - 1 / fast)
    a = difference_slow - b / slow
    if a >= 0:
        return "hybrid is faster at any bandwidth"
    return f"about {-b / a / 1000:.1f} Gbit/s"


def main() -> None:
    """Measure both networks over both links."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rates", type=int, nargs=2, default=[100, 1000], help="Mbit/s")
    parser.add_argument("--worker", choices=list(NETWORKS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.steps)
        return
    if (reason := missing()) is not None:
        print(f"skipped: {reason}")
        return
    rows = [("network", "link, Mbit/s", "hybrid, s", "DDP, s", "DDP / hybrid", "hybrid, MB", "DDP, MB", "DDP / hybrid")]
    ends = []
    for network in NETWORKS:
        times = []
        for rate in options.rates:
            with hosts(sum(REPLICAS), rate) as names:
                command = [sys.executable, __file__, "--worker", network, "--steps", str(options.steps)]
                results = json.loads(run_on(names, command, timeout=1800).splitlines()[-1])
            hybrid, ddp = results["hybrid seconds"], results["ddp seconds"]
            sent, reduced = results["hybrid bytes"] / 1e6, results["ddp bytes"] / 1e6
            times.append((float(rate), hybrid, ddp))
            rows.append(
                (
                    network,
                    str(rate),
                    f"{hybrid:.2f}",
                    f"{ddp:.2f}",
                    f"{ddp / hybrid:.1f}",
                    f"{sent:.1f}",
                    f"{reduced:.1f}",
                    f"{reduced / sent:.0f}",
                )
            )
        ends.append(f"{network}: {crossover(times)}")
    report(
        Path(__file__).with_suffix(".md"),
        "Hybrid [2, 1] against data parallel over a slow link",
        f"{__doc__}\nA step is forward, backward and the reduction of gradients for {SAMPLES} images (AlexNet 224 x "
        f"224, VGG-16 64 x 64, both with all their parameters), in {MICROBATCHES} microbatches for the hybrid; without "
        f"the optimizer's update. MB are sent by all hosts together per step. Medians of {options.steps} steps.\n\n"
        f"Where both would take as long, from these times: {'; '.join(ends)}.",
        rows,
    )


if __name__ == "__main__":
    main()
