"""Any layout trains what one process trains, and no order of messages makes the ranks wait for each other."""

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from random_layouts import Case, Trial, random_cases, run_as_threads
from rank_threads import DeadlockError, World
from ranks import run_ranks

from cnnstrategies.pipeline.connections import connection_rounds
from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.pipeline.transport import unbound

PARTS = 3


@pytest.mark.parametrize("part", range(PARTS))
def test_random_layouts_equal_one_process(part: int) -> None:
    for case in itertools.islice(random_cases(0), part, 18, PARTS):
        try:
            run_as_threads(case)
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize("replicas", [(1, 3), (3, 2), (2, 1, 3)])
def test_uneven_layouts_equal_one_process_over_a_network(replicas: tuple[int, ...]) -> None:
    """The same as the threads do, with processes and gloo."""
    rows = tuple(tuple(size + replica for replica in range(replicas[0])) for size in (5, 1))
    case = Case(replicas, 7, rows, "1f1b", "never", "gloo", 100, seed=3)
    run_ranks(sum(replicas), Trial(case).train)


def as_nccl(trial: Trial) -> None:
    with mock.patch.object(dist, "get_backend", return_value="nccl"):
        trial.train()


def test_the_branch_for_nccl_runs_over_a_network() -> None:
    """Its groups, here made of gloo's, whose messages have to be in order, too."""
    case = Case((2, 1, 2), 5, ((5, 3), (1, 2)), "1f1b", "never", "nccl", 100, seed=4)
    run_ranks(5, as_nccl, Trial(case))


def make_ways() -> tuple[Any, Any, Any]:
    default = dist.group.WORLD
    assert default is not None
    default.bound_device_id = torch.device("cuda", 0)  # As after init_process_group("nccl", device_id=...).
    with unbound():
        group = dist.new_group([0])
    return group.bound_device_id, default.bound_device_id, dist.new_group([0]).bound_device_id


def test_groups_for_messages_are_not_bound_to_a_device() -> None:
    """A bound one would be made by splitting the default group, and have one stream for all pairs."""
    ((without, default, with_it),) = run_ranks(1, make_ways)
    assert without is None
    assert default == with_it == torch.device("cuda", 0)


@pytest.mark.parametrize("replicas", [(1, 1), (5, 1), (4, 4), (3, 2), (2, 1, 3), (6, 4, 9), (1,) * 12])
def test_connections_are_made_in_disjoint_rounds(replicas: tuple[int, ...]) -> None:
    placement = Placement(replicas)
    pairs = {
        (placement.rank_of(stage, m), placement.rank_of(later, m))
        for stage in range(len(replicas))
        for later in range(stage + 1, len(replicas))
        for m in range(36)
    }
    rounds = connection_rounds(pairs)
    edges = [edge for one in rounds for edge in one]
    assert sorted(edges) == sorted({*pairs, *((b, a) for a, b in pairs)}), "every edge, once"
    for one in rounds:
        ranks = [rank for edge in one for rank in edge]
        assert len(ranks) == len(set(ranks)), one
    busiest = max(sum(rank in edge for edge in edges) for rank in range(sum(replicas)))
    assert busiest <= len(rounds) < 2 * busiest


def test_ranks_are_numbered_by_stage_or_by_pipeline() -> None:
    """A node's ranks follow one another: those of two nodes of 3 send each other nothing but gradients to sum."""
    assert [Placement((4, 2)).ranks(stage) for stage in range(2)] == [[0, 1, 2, 3], [4, 5]]
    placement = Placement((4, 2), "replicas")
    for m in range(8):
        assert len({placement.rank_of(stage, m) // 3 for stage in range(2)}) == 1
    assert [(one.stage, one.replica) for one in map(Placement((2, 1, 3), "replicas").place, range(6))] == [
        *((0, 0), (1, 0), (2, 0)),
        *((0, 1), (2, 1)),
        (2, 2),
    ]


def test_threads_that_wait_for_each_other_are_found() -> None:
    """The tool itself: two sends that meet no receive, and a tensor that is given away while it is under way."""

    def both_send(rank: int) -> None:
        tensor = torch.zeros(1)
        dist.isend(tensor, 1 - rank).wait()

    with pytest.raises(DeadlockError, match="send to rank 1"):
        World(2).run(both_send)

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
