"""Our step against a hand-written loop over torch.distributed.pipelining's Schedule1F1B: two stages, the same cut.

Both run in the same two processes, one step each in turn. Target: at most 1.03 times the peer's time.
"""

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cutting import cut_between_children
from networks import images, resnet_like, vgg_like
from peer import Peer
from ranks import medians, report, run_ranks
from torch import nn

from cnnstrategies.pipeline.engine import Pipeline

NETWORKS = {"VGG-11 with BatchNorm": (vgg_like, 32, 100), "ResNet-20": (resnet_like, 32, 10)}
MICROBATCHES = 8
SAMPLES = 64


def race(rank: int, make: Callable[[], nn.Sequential], size: int, classes: int, name: str, child: int, rounds: int):
    """Times of our steps and of the peer's, and the losses of the first step of each."""
    warnings.simplefilter("ignore")
    torch.manual_seed(1)
    network = make()
    torch.manual_seed(1)
    peer = Peer(make(), child, rank, MICROBATCHES, F.cross_entropy)
    ours = Pipeline(network, [name], [1, 1], MICROBATCHES, batch_norm="microbatch")
    inputs, targets = images(size, SAMPLES, classes)

    def our_step() -> float:
        ours.module.zero_grad(set_to_none=True)
        return float(ours.step(inputs, targets, F.cross_entropy))

    steps = [our_step, lambda: peer.step(inputs, targets)]
    times: list[list[float]] = [[], []]
    losses = [step() for step in steps]
    for index in range(2 + rounds):
        for variant in (0, 1) if index % 2 else (1, 0):
            dist.barrier()
            start = time.perf_counter()
            steps[variant]()
            dist.barrier()
            if index >= 2:
                times[variant].append(time.perf_counter() - start)
    return times, losses


def main() -> None:
    """Race for each network."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    rows = [("network", "cut after", "ours, ms", "Schedule1F1B, ms", "ratio of medians", "median ratio of pairs")]
    for title, (make, size, classes) in NETWORKS.items():
        inputs, _ = images(size, SAMPLES // MICROBATCHES, classes)
        name, child = cut_between_children(make(), inputs, MICROBATCHES)
        results = run_ranks(2, race, make, size, classes, name, child, rounds)
        (ours, peer), losses = results[0][0], results[1][1]
        if abs(losses[0] - losses[1]) > 1e-4 * abs(losses[1]):
            raise SystemExit(f"{title}: the losses differ: {losses}")
        a, b = medians([ours, peer])
        pairs = medians([[x / y for x, y in zip(ours, peer, strict=True)]])[0]
        rows.append((title, name, f"{a * 1e3:.1f}", f"{b * 1e3:.1f}", f"{a / b:.3f}", f"{pairs:.3f}"))
    report(
        Path(__file__).with_suffix(".md"),
        "Our step against Schedule1F1B",
        f"{__doc__}\nA step is forward and backward of {SAMPLES} images of 32 x 32 in {MICROBATCHES} microbatches; "
        "ours also hands the targets to the last stage and gathers the outputs and the loss on every rank, which the "
        "peer does not. "
        f"{rounds} steps of each, in turn; the first loss of both is the same.",
        rows,
    )


if __name__ == "__main__":
    main()
