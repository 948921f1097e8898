"""Our step against a hand-written loop over torch.distributed.pipelining's Schedule1F1B, with two stages.

Both run in the same two processes, a step each in turn. Target: at most 0.95 of the peer's time, and at most 0.90 where
a message takes 15 % of a stage's time.
"""

import argparse
import random
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cutting import cuts_of_both
from emulated import FORWARD, delay_messages, two_slow_layers
from networks import images, resnet_blocks, vgg_like
from peer import Peer
from ranks import report, run_ranks
from torch import nn

from cnnstrategies.pipeline.engine import Pipeline

NETWORKS = {"VGG-11 with BatchNorm": (vgg_like, 32, 100), "ResNet-20": (resnet_blocks, 32, 10)}
MICROBATCHES = 8
SAMPLES = 64
Times = list[list[float]]


def race(steps: Sequence[Callable[[], object]], rounds: int) -> tuple[Times, Times]:
    """Seconds, and this rank's processor time, of each kind of step, in turn and in another order each time."""
    rng = random.Random(0)  # The same on both ranks.
    times: Times = [[] for _ in steps]
    worked: Times = [[] for _ in steps]
    for index in range(2 + rounds):
        for variant in rng.sample(range(len(steps)), len(steps)):
            dist.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            steps[variant]()
            cpu = time.process_time() - cpu
            dist.barrier()
            if index >= 2:
                times[variant].append(time.perf_counter() - start)
                worked[variant].append(cpu)
    return times, worked


def networks(rank: int, make: Callable[[], nn.Sequential], size: int, classes: int, cuts, child: int, rounds: int):
    """Times of the peer's steps and of ours with each cut, and the losses of the first step of each."""
    warnings.simplefilter("ignore")
    inputs, targets = images(size, SAMPLES, classes)

    def ours(cut: str) -> Callable[[], float]:
        torch.manual_seed(1)
        pipeline = Pipeline(make(), [cut], [1, 1], MICROBATCHES, batch_norm="microbatch")

        def step() -> float:
            pipeline.module.zero_grad(set_to_none=True)
            return float(pipeline.step(inputs, targets, F.cross_entropy))

        return step

    torch.manual_seed(1)
    peer = Peer(make(), child, rank, MICROBATCHES, F.cross_entropy)
    steps = [lambda: peer.step(inputs, targets), *(ours(cut) for cut in cuts)]
    losses = [step() for step in steps]
    return race(steps, rounds), losses


def sleepers(rank: int, share: float, rounds: int):
    """Times of the peer's steps and of ours where stages sleep, and a message takes a share of a microbatch."""
    warnings.simplefilter("ignore")
    torch.manual_seed(1)
    inputs, targets = torch.randn(32, 4), torch.randint(4, (32,))
    peer = Peer(two_slow_layers(), 1, rank, MICROBATCHES, F.cross_entropy)
    pipeline = Pipeline(two_slow_layers(), ["0"], [1, 1], MICROBATCHES)
    if share:
        delay_messages(share * 3 * FORWARD)
    steps = [lambda: peer.step(inputs, targets), lambda: pipeline.step(inputs, targets, F.cross_entropy)]
    return race(steps, rounds)


def row(title: str, cut: str, races: Sequence[tuple[Times, Times]], variant: int) -> tuple[str, ...]:
    """Medians, the median ratio of a round with the interval of 95 % that a bootstrap gives, and processor time."""
    ours, peer = races[0][0][variant], races[0][0][0]
    worked = [sum(statistics.median(own[kind]) for _, own in races) for kind in (variant, 0)]
    ratios = [a / b for a, b in zip(ours, peer, strict=True)]
    rng = random.Random(0)
    drawn = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
    a, b = statistics.median(ours), statistics.median(peer)
    interval = f"{drawn[50]:.3f} to {drawn[-51]:.3f}"
    ratio = f"{statistics.median(ratios):.3f}"
    return title, cut, f"{a * 1e3:.1f}", f"{b * 1e3:.1f}", ratio, interval, f"{worked[0] / worked[1]:.3f}"


def main() -> None:
    """Race for each network, and for stages that sleep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    rows = [("stages", "cut after", "ours, ms", "Schedule1F1B, ms", "ratio", "95 % interval", "processor time")]
    for share in (0.0, 0.15):
        races = run_ranks(2, sleepers, share, rounds)
        rows.append(row(f"that sleep 30 ms a microbatch, a message {share:.0%} of it", "the same", races, 1))
    for title, (make, size, classes) in NETWORKS.items():
        inputs, _ = images(size, SAMPLES // MICROBATCHES, classes)
        name, child, ahead = cuts_of_both(make(), inputs, MICROBATCHES)
        cuts = [name, ahead]
        results = run_ranks(2, networks, make, size, classes, cuts, child, rounds)
        losses = [*results[0][1][1:], results[1][1][0]]
        if max(losses) - min(losses) > 1e-4 * abs(losses[0]):
            raise SystemExit(f"{title}: the losses differ: {losses}")
        races = [one for one, _ in results]
        rows.append(row(title, f"{name}, both", races, 1))
        rows.append(row(title, f"{cuts[1]}, the peer after {name}", races, 2))
    report(
        Path(__file__).with_suffix(".md"),
        "Our step against Schedule1F1B",
        f"{__doc__}\nA step is forward and backward in {MICROBATCHES} microbatches; that of the networks takes "
        f"{SAMPLES} images of 32 x 32. Ours also hands the targets to the last stage and the loss to every rank, which "
        "the peer does not. The peer is cut where its own schedule is predicted to be fastest; ours there, too, and "
        "where the planner cuts for a schedule that runs ahead. The sleeping stages show the schedules alone: a "
        "message leaves so much later, whoever sends it.\n\n"
        f"{rounds} rounds of a step each, in an order that changes; medians, the median ratio of a round, "
        "and the ratio of the processor time of both ranks together, in which waiting does not count.",
        rows,
    )


if __name__ == "__main__":
    main()
