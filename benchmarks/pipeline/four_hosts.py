"""Hybrid [3, 1] against data parallel, and against Schedule1F1B with DDP: AlexNet on four hosts over 1 Gbit/s.

The hosts are network namespaces. All three run in the same processes, one step each in turn. The hybrid runs with its
defaults and hands the outputs to every rank, which the others do not. Schedule1F1B with DDP is what torch has for
stages with replicas: as many of each, here two pipelines of two stages. Bytes are what the hosts' network devices
count; the link's rate is that of a message from one host to another before the steps.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hosts import hosts, missing, run_on
from networks import alexnet, images
from ranks import TIMEOUT, report
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from cnnstrategies.pipeline.engine import Pipeline

REPLICAS = [3, 1]
SAMPLES = 24
MICROBATCH = 2  # images, in both pipelines
SIZE = 224
MESSAGE = 32_000_000  # bytes
COUNTERS = [Path(f"/sys/class/net/eth0/statistics/{way}_bytes") for way in ("tx", "rx")]
TITLES = {"hybrid [3, 1]": "hybrid", "DDP on 4 hosts": "DDP", "Schedule1F1B + DDP, [2, 2]": "1F1B"}


def counted() -> torch.Tensor:
    """Bytes that this host has sent and received so far, and its processor time."""
    return torch.tensor([*(int(each.read_text()) for each in COUNTERS), time.process_time()], dtype=torch.float64)


class Pipelines:
    """Two pipelines of two stages, each stage under DDP.

    Args:
        network: AlexNet.
    """

    def __init__(self, network: nn.Module) -> None:
        rank = dist.get_rank()
        self.stage, self.pipeline = rank % 2, rank // 2
        groups = [dist.new_group(ranks, timeout=TIMEOUT) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
        parts = (nn.Sequential(network.features, network.avgpool), nn.Sequential(nn.Flatten(), network.classifier))
        self.module = DistributedDataParallel(
            parts[self.stage], process_group=groups[2 + self.stage], gradient_as_bucket_view=True
        )
        stage = PipelineStage(self.module, self.stage, 2, torch.device("cpu"), group=groups[self.pipeline])
        self.schedule = Schedule1F1B(stage, SAMPLES // 2 // MICROBATCH, loss_fn=F.cross_entropy)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Forward, backward and the sum over the replicas."""
        self.module.zero_grad(set_to_none=True)
        if self.stage:
            self.schedule.step(target=targets[self.pipeline :: 2], losses=[])
        else:
            self.schedule.step(inputs[self.pipeline :: 2])


def link_rate() -> float:
    """Mbit/s from the first host to the second; of three messages the last."""
    message = torch.zeros(MESSAGE, dtype=torch.uint8)
    for _ in range(3):
        dist.barrier()
        start = time.perf_counter()
        if dist.get_rank() == 0:
            dist.send(message, 1)
        elif dist.get_rank() == 1:
            dist.recv(message, 0)
        dist.barrier()
    return MESSAGE * 8e-6 / (time.perf_counter() - start)


def worker(steps: int) -> None:
    """One host: steps of all three in turn.

    Rank 0 prints as JSON the link's rate (Mbit/s) and for each kind of step its seconds, the bytes that all hosts
    have sent, the bytes on the fullest way of a link, and the processor time of all hosts.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank, world = dist.get_rank(), dist.get_world_size()
    inputs, targets = images(SIZE, SAMPLES, 1000)
    torch.manual_seed(1)
    replicated = DistributedDataParallel(alexnet(), gradient_as_bucket_view=True)
    torch.manual_seed(1)
    hybrid = Pipeline(alexnet(), ["flatten"], REPLICAS, SAMPLES // MICROBATCH)
    torch.manual_seed(1)
    pipelines = Pipelines(alexnet())

    def hybrid_step() -> None:
        rows = slice(rank, None, REPLICAS[0])
        batch = hybrid.share(inputs[rows], targets[rows])
        _, outputs = hybrid.train(batch, F.cross_entropy)
        assert len(hybrid.gather(batch, outputs)) == SAMPLES

    def data_parallel_step() -> None:
        replicated.zero_grad(set_to_none=True)
        F.cross_entropy(replicated(inputs[rank::world]), targets[rank::world]).backward()

    variants = {"hybrid": hybrid_step, "DDP": data_parallel_step, "1F1B": lambda: pipelines.step(inputs, targets)}
    link = link_rate()
    results: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in variants}
    order = random.Random(0)  # The same on all ranks.
    for index in range(1 + steps):
        for name in order.sample(list(variants), len(variants)):
            dist.barrier()
            before, start = counted(), time.perf_counter()
            variants[name]()
            dist.barrier()
            seconds = time.perf_counter() - start
            counters = counted() - before
            used = [torch.empty_like(counters) for _ in range(world)]
            dist.all_gather(used, counters)
            sent, received, worked = zip(*(each.tolist() for each in used), strict=True)
            if index:
                results[name].append((seconds, sum(sent), max(sent + received), sum(worked)))
    if rank == 0:
        print(json.dumps({"link": link, "steps": results}))
    hybrid.close()
    dist.destroy_process_group()


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rate", type=int, default=1000, help="Mbit/s")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.steps)
        return
    if (reason := missing()) is not None:
        print(f"skipped: {reason}")
        return
    rows = [
        (
            "step of",
            "s (least to most)",
            "time of hybrid / its",
            "MB sent",
            "fullest link alone, s",
            "processor time, s",
        )
    ]
    with hosts(sum(REPLICAS), options.rate) as names:
        command = [sys.executable, __file__, "--worker", "--steps", str(options.steps)]
        result = json.loads(run_on(names, command, timeout=900).splitlines()[-1])
    measured = {name: list(zip(*steps, strict=True)) for name, steps in result["steps"].items()}
    hybrid_times = measured["hybrid"][0]
    for title, name in TITLES.items():
        times, sent, fullest, worked = measured[name]
        ratios = sorted(a / b for a, b in zip(hybrid_times, times, strict=True))
        ratio = f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        spread = f"{median(times):.2f} ({min(times):.2f} to {max(times):.2f})"
        transfer = median(fullest) * 8e-6 / result["link"]
        rows.append((title, spread, ratio, f"{median(sent) / 1e6:.0f}", f"{transfer:.2f}", f"{median(worked):.2f}"))
    report(
        Path(__file__).with_suffix(".md"),
        "Hybrid [3, 1] on four hosts",
        f"{__doc__}\nA step is forward, backward and the reduction of gradients for {SAMPLES} images of "
        f"{SIZE} x {SIZE} without the optimizer's update; microbatches of {MICROBATCH} images in both pipelines. "
        f"Medians of {options.steps} rounds; ratios of a round's steps, with the least and the most. A message of "
        f"{MESSAGE / 1e6:.0f} MB went at {result['link']:.0f} Mbit/s: the fullest link alone is the time that the "
        "bytes of the host with the most take at that rate, in the fuller of both directions. The processor time is "
        "that of all hosts, which share two cores here: half of it is the least that a step takes whatever the link. "
        "So DDP's steps are limited by the link, and the hybrid's are not.",
        rows,
    )


if __name__ == "__main__":
    main()
