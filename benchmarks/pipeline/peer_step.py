"""Our step against a hand-written loop over torch.distributed.pipelining's Schedule1F1B, with two stages.

Each has two processes of its own, a step in turn while the others sleep. Target: at most 0.95 of the peer's time, and
at most 0.90 where a message takes 15 % of a stage's time.
"""

import argparse
import random
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from cutting import cuts_of_both
from emulated import FORWARD, delay_messages, two_slow_layers
from networks import images, resnet_blocks, vgg_like
from peer import Peer
from ranks import report, run_contest
from torch import Tensor, nn

from cnnstrategies.pipeline.engine import Pipeline

NETWORKS = {"VGG-11 with BatchNorm": (vgg_like, 32, 100), "ResNet-20": (resnet_blocks, 32, 10)}
MICROBATCHES = 8
SAMPLES = 64
Step = Callable[[], float | None]
Tensors = tuple[Tensor, Tensor]
Measured = list[tuple[list[float], list[float], float | None]]  # By rank.


def ours(make: Callable[[], nn.Sequential], data: Tensors, cut: str, delay: float = 0.0) -> Callable[[int], Step]:
    """Return a function that prepares our step on a rank, with messages that take a fixed time."""

    def on(rank: int) -> Step:
        torch.manual_seed(1)
        pipeline = Pipeline(make(), [cut], [1, 1], MICROBATCHES)
        if delay:
            delay_messages(delay)

        def step() -> float:
            pipeline.module.zero_grad(set_to_none=True)
            return float(pipeline.step(*data, F.cross_entropy))

        return step

    return on


def peers(make: Callable[[], nn.Sequential], data: Tensors, child: int, delay: float = 0.0) -> Callable[[int], Step]:
    """Return a function that prepares the peer's step on a rank."""

    def on(rank: int) -> Step:
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        peer = Peer(make(), child, rank, MICROBATCHES, F.cross_entropy)
        if delay:
            delay_messages(delay)
        return lambda: peer.step(*data)

    return on


def row(title: str, cut: str, contestant: Measured, peer: Measured) -> tuple[str, ...]:
    """Medians, the median ratio of a round with the interval of 95 % that a bootstrap gives, and processor time."""
    times, others = contestant[0][0], peer[0][0]
    worked = [sum(statistics.median(cpu_times) for _, cpu_times, _ in ranks) for ranks in (contestant, peer)]
    ratios = [a / b for a, b in zip(times, others, strict=True)]
    rng = random.Random(0)
    drawn = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
    a, b = statistics.median(times), statistics.median(others)
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
    data = torch.randn(32, 4), torch.randint(4, (32,))
    for share in (0.0, 0.15):
        delay = share * 3 * FORWARD
        contest = [peers(two_slow_layers, data, 1, delay), ours(two_slow_layers, data, "0", delay)]
        peer, our_ranks = run_contest(2, contest, rounds)
        rows.append(row(f"that sleep 30 ms a microbatch, a message {share:.0%} of it", "the same", our_ranks, peer))
    for title, (make, size, classes) in NETWORKS.items():
        data = images(size, SAMPLES, classes)
        name, child, ahead = cuts_of_both(make(), data[0][: SAMPLES // MICROBATCHES], MICROBATCHES)
        peer, same, other = run_contest(
            2, [peers(make, data, child), ours(make, data, name), ours(make, data, ahead)], rounds
        )
        losses = [float(measured[1][2] or 0.0) for measured in (peer, same, other)]
        if max(losses) - min(losses) > 1e-4 * abs(losses[0]):
            raise SystemExit(f"{title}: the losses differ: {losses}")
        rows.append(row(title, f"{name}, both", same, peer))
        rows.append(row(title, f"{ahead}, the peer after {name}", other, peer))
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
