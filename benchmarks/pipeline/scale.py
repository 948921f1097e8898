"""Processor time that the engine takes on each of 512 ranks, with the transport faked.

python benchmarks/pipeline/scale.py

The ranks are threads of one process (tests/pipeline/rank_threads.py), and the network does next to nothing, so what a
rank's thread computes is the engine's own work and the faked transport's. Dividing the network is not counted: it does
not depend on the ranks.
"""

import copy
import gc
import itertools
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[2]))

from cnnstrategies.pipeline.engine import Pipeline
from tests.pipeline.rank_threads import World, divided_once

STEPS = 3


def seconds_of_ranks(replicas: tuple[int, ...], microbatches: int) -> list[tuple[float, float]]:
    """For each rank its processor time of the set-up, and the least of a step."""
    network = nn.Sequential(*(nn.Linear(2, 2) for _ in replicas))
    cuts = [str(index) for index in range(len(replicas) - 1)]
    images, targets = torch.randn(2, 2 * -(-microbatches // replicas[0]), 2)

    def main(rank: int) -> tuple[float, float]:
        copied = copy.deepcopy(network)
        start = time.thread_time()
        pipeline = Pipeline(copied, cuts, replicas, microbatches)
        steps = [time.thread_time()]
        for _ in range(STEPS):
            pipeline.step(images, targets, F.mse_loss)
            steps.append(time.thread_time())
        pipeline.close()
        return steps[0] - start, min(after - before for before, after in itertools.pairwise(steps))

    with divided_once(network, cuts):
        return World(sum(replicas), "nccl").run(main)


def main() -> None:
    """Print the page's table."""
    torch.set_num_threads(1)
    gc.disable()  # It would look through the objects of 512 ranks, in the name of one.
    print("| Replicas | Microbatches | Tasks of a rank, at most | Set-up, ms | Step, ms |\n|---|---|---|---|---|")
    for replicas, microbatches in (((256, 256), 2048), ((448, 64), 1792), ((64,) * 8, 256), ((8,) * 64, 64)):
        times_of_ranks = seconds_of_ranks(replicas, microbatches)
        cells = []
        for times in zip(*times_of_ranks, strict=True):
            ordered = sorted(1000 * time for time in times)
            cells.append(f"{statistics.median(ordered):.1f} ({ordered[-1]:.1f})")
        name = f"{len(replicas)} x {replicas[0]}" if len(set(replicas)) == 1 else str(list(replicas))
        print(f"| {name} | {microbatches} | {2 * microbatches // min(replicas)} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
