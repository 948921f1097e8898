"""Tests of layouts: each layout trains the values of one process, and no order of messages leads to a deadlock."""

import copy
import itertools
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cnnstrategies.pipeline.engine import Pipeline
from cnnstrategies.pipeline.timetable import Placement
from tests.pipeline.random_layouts import Case, Trial, random_cases, run_as_threads
from tests.pipeline.rank_threads import World, divided_once
from tests.runner.ranks import run_ranks

PARTS = 3


def equals_one_process(case: Case) -> None:
    try:
        run_as_threads(case)
    except Exception as error:
        raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize("part", range(PARTS))
def test_random_layouts_equal_one_process(part: int) -> None:
    for case in itertools.islice(random_cases(0), part, 9, PARTS):
        equals_one_process(case)


# In this order, the cases test: whether sends or receives start first, how early receives start, replicas that end one
# after the other, first messages, and a replica that runs the last two microbatches after another replica's last one.
DRAINED = [
    Case((1, 1), 4, ((8,), (8,)), "1f1b", "never", "nccl", 100, seed=5),
    Case((1, 3, 1), 9, ((9,), (9,)), "1f1b", "never", "nccl", 100, seed=6, run_ahead=True),
    Case((2, 1, 3), 7, ((9, 2), (4, 0)), "gpipe", "except_last", "nccl", 30, seed=6, placement="replicas"),
    Case((1,) * 6, 4, ((19,), (1,)), "1f1b", "always", "nccl", 10**6, seed=789511750),
    Case((1, 3), 7, ((14,), (14,)), "1f1b", "never", "nccl", 30, seed=5, shares=(1.0, 5.0, 1.0, 1.0)),
]


@pytest.mark.parametrize("case", DRAINED, ids=lambda case: str(case.replicas))
def test_a_device_may_be_drained_at_any_moment(case: Case) -> None:
    equals_one_process(case)


def train_over_a_network(gloo: Trial, nccl: Trial) -> None:
    gloo.train()
    with mock.patch.object(dist, "get_backend", return_value="nccl"):
        nccl.train()


def test_uneven_layouts_equal_one_process_over_a_network() -> None:
    """Layouts are trained by processes in place of threads; the groups for NCCL are replaced by groups of gloo."""
    gloo = Case((2, 1, 3), 7, ((5, 6), (1, 2)), "1f1b", "never", "gloo", 100, seed=3)
    nccl = Case((2, 1, 3), 7, ((5, 3), (1, 2)), "1f1b", "never", "nccl", 100, seed=4)
    run_ranks(6, train_over_a_network, Trial(gloo), Trial(nccl))


def third_step(replicas: tuple[int, ...]) -> list[Counter[Any]]:
    """Return each rank's calls in the third of three equal steps."""
    world = World(sum(replicas), "nccl")
    network, cuts = nn.Sequential(*(nn.Linear(2, 2) for _ in replicas)), list(map(str, range(len(replicas) - 1)))
    images, targets = torch.randn(2, 12 // replicas[0], 2)

    def main(rank: int) -> Counter[Any]:
        options: Any = {"bucket_bytes": 10, "activation_checkpointing": "always"}
        with Pipeline(copy.deepcopy(network), cuts, replicas, 6, **options) as pipeline:
            for _ in range(2):
                pipeline.step(images, targets, F.mse_loss)
            before = Counter(world.calls[rank])
            pipeline.train(pipeline.share(images, targets), F.mse_loss)
            return world.calls[rank] - before

    with divided_once(network, cuts):
        return world.run(main)


def test_a_step_runs_one_collective_on_the_host() -> None:
    """The collective shares the sizes of the batch. The device runs transfers and all-reduces of targets and gradients.

    The only other messages over the host say which gradients of a microbatch exist.
    """
    results = third_step((2, 1, 3))
    for rank, calls in enumerate(results):
        host = {kind: count for (kind, backend), count in calls.items() if backend == "gloo"}
        assert {kind: host[kind] for kind in host.keys() - {"send", "receive"}} == {"all_gather": 1}, rank
        device = {kind for kind, backend in calls if backend == "nccl"}
        assert device <= {"send", "receive", "all_reduce"}, rank
    sent = sum(calls["send", "nccl"] for calls in results)
    assert sent == 2 * 2 * 6, "activations and gradients over two cuts for each of 6 microbatches"
    assert sum(calls["send", "gloo"] for calls in results) == 2 * 6


def test_ranks_are_numbered_by_stage_or_by_pipeline() -> None:
    """A node's ranks are consecutive. With placement `replicas`, two nodes of 3 only exchange gradients to sum."""
    assert [Placement((4, 2)).ranks(stage) for stage in range(2)] == [[0, 1, 2, 3], [4, 5]]
    placement = Placement((4, 2), "replicas", microbatches=8)
    for m in range(8):
        assert len({placement.rank_of(stage, m) // 3 for stage in range(2)}) == 1
    assert [(place.stage, place.replica) for place in map(Placement((2, 1, 3), "replicas").place, range(6))] == [
        *((0, 0), (1, 0), (2, 0)),
        *((0, 1), (2, 1)),
        (2, 2),
    ]


def test_a_tensor_freed_during_its_transfer_is_an_error() -> None:
    """This tests the simulated `torch.distributed` itself."""

    def sends_what_it_drops(rank: int) -> None:
        if rank == 0:
            work = dist.isend(torch.zeros(1), 1)
            dist.barrier()
            work.wait()
        else:
            dist.barrier()
            dist.irecv(torch.zeros(1), 0).wait()

    with pytest.raises(AssertionError, match="freed"):
        World(2).run(sends_what_it_drops)
