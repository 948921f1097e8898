"""What a step asks of the other ranks, besides what it is there for."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_threads import World, divided_once
from torch import nn

from cnnstrategies.pipeline.engine import Pipeline

CUTS = ["1", "3"]


def make_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(6))).double()


def third_step(replicas: tuple[int, ...], recompute: str) -> list[Counter[Any]]:
    """For each rank what it called in a step of a kind that it has made before."""
    world = World(sum(replicas), "nccl")
    network = make_network()
    images, targets = torch.randn(2, 12 // replicas[0], 3, dtype=torch.float64)

    def main(rank: int) -> Counter[Any]:
        options: Any = {"activation_checkpointing": recompute, "bucket_bytes": 100}
        with Pipeline(copy.deepcopy(network), CUTS, replicas, 6, **options) as pipeline:
            for _ in range(2):
                pipeline.step(images, targets, F.mse_loss)
            before = Counter(world.calls[rank])
            batch = pipeline.share(images, targets)
            pipeline.train(batch, F.mse_loss)
            return world.calls[rank] - before

    with divided_once(network, CUTS):
        return world.run(main)


def test_a_step_makes_one_collective_on_the_host() -> None:
    """The one is for the sizes of the batch; then there are transfers, and all-reduces of targets and gradients.

    Over the host go with the gradients of a microbatch only those that tell which there are.
    """
    replicas = (2, 1, 3)
    results = third_step(replicas, "always")
    for rank, calls in enumerate(results):
        host = {kind: count for (kind, backend), count in calls.items() if backend == "gloo"}
        assert {kind: host[kind] for kind in host.keys() - {"send", "receive"}} == {"all_gather": 1}, rank
        device = {kind for kind, backend in calls if backend == "nccl"}
        assert device <= {"send", "receive", "all_reduce"}, rank
        assert (calls["all_reduce", "nccl"] > 1) == (rank != 2), "of the two stages with replicas; one has the targets"
    sent = sum(calls["send", "nccl"] for calls in results)
    assert sent == sum(calls["receive", "nccl"] for calls in results)
    assert sent == 2 * 2 * 6, "activations and gradients over two cuts for each of 6 microbatches"
    assert sum(calls["send", "gloo"] for calls in results) == 2 * 6


@pytest.mark.parametrize("replicas", [(2, 2, 2), (7, 5, 3)])
def test_groups_do_not_grow_with_the_replicas(replicas: tuple[int, ...]) -> None:
    """One for each stage, two ways for messages, two for the host; none is left."""
    world = World(sum(replicas), "nccl")
    network = make_network()
    made = []

    def main(rank: int) -> None:
        with Pipeline(copy.deepcopy(network), CUTS, replicas, 8):
            made.append(sum(count for (kind, _), count in world.calls[rank].items() if kind == "new_group"))
            assert len(world.groups[rank]) == 5, "of which a rank is in its own stage's"

    with divided_once(network, CUTS):
        world.run(main)
    assert made == [7] * sum(replicas)
    assert not any(world.groups)
