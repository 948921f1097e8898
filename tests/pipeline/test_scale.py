"""What the engine itself computes on a rank does not grow with the number of ranks as their pairs do."""

import copy
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_threads import World, divided_once
from torch import nn

from cnnstrategies.pipeline.engine import Pipeline

PER_REPLICA = 4  # microbatches


def lines_of_ranks(replicas: tuple[int, ...]) -> tuple[int, int]:
    """The most lines of the engine's code that a rank runs, each time counted: in its set-up, in a step."""
    network = nn.Sequential(*(nn.Linear(2, 2) for _ in replicas))
    cuts = [str(index) for index in range(len(replicas) - 1)]
    microbatches = PER_REPLICA * max(replicas)
    images, targets = torch.randn(2, 2 * PER_REPLICA, 2)

    def main(rank: int) -> tuple[int, int]:
        lines = [0, 0]

        def count(frame: Any, event: str, argument: Any) -> Any:
            if "/cnnstrategies/pipeline/" not in frame.f_code.co_filename:
                return None
            lines[step] += 1
            return count

        own = copy.deepcopy(network)
        watched = rank in (0, sum(replicas) - 1)
        step = 0
        sys.settrace(count if watched else None)
        with Pipeline(own, cuts, replicas, microbatches) as pipeline:
            sys.settrace(None)
            pipeline.step(images, targets, F.mse_loss)
            step = 1
            sys.settrace(count if watched else None)
            pipeline.step(images, targets, F.mse_loss)
            sys.settrace(None)
        return lines[0], lines[1]

    with divided_once(network, cuts):
        found = World(sum(replicas), "nccl").run(main)
    return max(setup for setup, _ in found), max(step for _, step in found)


@pytest.mark.parametrize(("few", "many"), [((8, 8), (32, 32)), ((2,) * 4, (2,) * 16)], ids=["replicas", "stages"])
def test_a_rank_of_four_times_as_many_computes_little_more(few: tuple[int, ...], many: tuple[int, ...]) -> None:
    """What grows is a pass over the microbatches and replicas, not over the pairs of replicas."""
    for what, before, after in zip(("set-up", "step"), lines_of_ranks(few), lines_of_ranks(many), strict=True):
        assert after <= 2.5 * before, (what, before, after)
