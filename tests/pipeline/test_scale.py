"""What a step asks of other ranks, and what a rank computes for it, does not grow with the number of their pairs."""

import copy
import sys
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_threads import World, divided_once
from torch import nn

from cnnstrategies.pipeline.engine import Pipeline

PER_REPLICA = 4  # microbatches


def network_of(replicas: tuple[int, ...]) -> tuple[nn.Module, list[str]]:
    """A layer for each stage, and the cuts."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(2, 2) for _ in replicas)), [str(index) for index in range(len(replicas) - 1)]


def third_step(replicas: tuple[int, ...], **options: Any) -> list[Counter[Any]]:
    """For each rank what it called in a step of a kind that it has made before."""
    world = World(sum(replicas), "nccl")
    network, cuts = network_of(replicas)
    images, targets = torch.randn(2, 12 // replicas[0], 2)

    def main(rank: int) -> Counter[Any]:
        with Pipeline(copy.deepcopy(network), cuts, replicas, 6, bucket_bytes=10, **options) as pipeline:
            for _ in range(2):
                pipeline.step(images, targets, F.mse_loss)
            before = Counter(world.calls[rank])
            pipeline.train(pipeline.share(images, targets), F.mse_loss)
            return world.calls[rank] - before

    with divided_once(network, cuts):
        return world.run(main)


def test_a_step_makes_one_collective_on_the_host() -> None:
    """The one is for the sizes of the batch; then there are transfers, and all-reduces of targets and gradients.

    Over the host go with the gradients of a microbatch only those that tell which there are.
    """
    results = third_step((2, 1, 3), activation_checkpointing="always")
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


def test_groups_do_not_grow_with_the_replicas() -> None:
    """One for each stage, two ways for messages, two for the host; none is left."""
    replicas = (7, 5, 3)
    world = World(sum(replicas), "nccl")
    network, cuts = network_of(replicas)
    made = []

    def main(rank: int) -> None:
        with Pipeline(copy.deepcopy(network), cuts, replicas, 8):
            made.append(sum(count for (kind, _), count in world.calls[rank].items() if kind == "new_group"))
            assert len(world.groups[rank]) == 5, "of which a rank is in its own stage's"

    with divided_once(network, cuts):
        world.run(main)
    assert made == [7] * sum(replicas)
    assert not any(world.groups)


def lines_of_ranks(replicas: tuple[int, ...]) -> tuple[int, int]:
    """The most lines of the engine's code that a rank runs, each time counted: in its set-up, in a step."""
    network, cuts = network_of(replicas)
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
        with Pipeline(own, cuts, replicas, PER_REPLICA * max(replicas)) as pipeline:
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
