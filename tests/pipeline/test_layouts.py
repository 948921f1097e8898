"""Any layout trains what one process trains, and no order of messages makes the ranks wait for each other."""

import itertools
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from random_layouts import Case, Trial, random_cases, run_as_threads
from rank_threads import DeadlockError, World
from ranks import run_ranks

from cnnstrategies.pipeline.timetable import Placement

PARTS = 3


def equals_one_process(case: Case) -> None:
    try:
        run_as_threads(case)
    except Exception as error:
        raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize("part", range(PARTS))
def test_random_layouts_equal_one_process(part: int) -> None:
    for case in itertools.islice(random_cases(0), part, 18, PARTS):
        equals_one_process(case)


# Whether sends or receives come first, how early these do, replicas that end one after the other, and first messages.
DRAINED = [
    Case((1, 1), 4, ((8,), (8,)), "1f1b", "never", "nccl", 100, seed=5),
    Case((1, 3, 1), 9, ((9,), (9,)), "1f1b", "never", "nccl", 100, seed=6, run_ahead=True),
    Case((2, 1, 3), 7, ((9, 6), (4, 0)), "gpipe", "except_last", "nccl", 30, seed=567689171, placement="replicas"),
    Case((1,) * 6, 4, ((19,), (1,)), "1f1b", "always", "nccl", 10**6, seed=789511750),
]


@pytest.mark.parametrize("case", DRAINED, ids=lambda case: str(case.replicas))
def test_a_device_may_be_drained_at_any_moment(case: Case) -> None:
    equals_one_process(case)


def test_uneven_layouts_equal_one_process_over_a_network() -> None:
    """The same as the threads do, with processes and gloo."""
    case = Case((2, 1, 3), 7, ((5, 6), (1, 2)), "1f1b", "never", "gloo", 100, seed=3)
    run_ranks(6, Trial(case).train)


def as_nccl(trial: Trial) -> None:
    with mock.patch.object(dist, "get_backend", return_value="nccl"):
        trial.train()


def test_the_branch_for_nccl_runs_over_a_network() -> None:
    """Its groups, here made of gloo's, whose messages have to be in order, too."""
    case = Case((2, 1, 2), 5, ((5, 3), (1, 2)), "1f1b", "never", "nccl", 100, seed=4)
    run_ranks(5, as_nccl, Trial(case))


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
    """The tool itself: two sends that meet no receive, and receives that a drained device waits for before them; a
    tensor that is given away while it is under way, and one that is written to.
    """

    def both_send(rank: int) -> None:
        tensor = torch.zeros(1)
        dist.isend(tensor, 1 - rank).wait()

    with pytest.raises(DeadlockError, match="send to rank 1"):
        World(2).run(both_send)

    def receives_first(rank: int) -> None:
        there, back = dist.new_group([0, 1]), dist.new_group([0, 1])
        tensors = [torch.zeros(1), torch.zeros(1)]
        for turned in (False, True):
            transfers = [
                partial(dist.irecv if rank else dist.isend, tensors[0], 1 - rank, there),
                partial(dist.isend if rank else dist.irecv, tensors[1], 1 - rank, back),
            ]
            for work in [begin() for begin in transfers[:: -1 if turned and not rank else 1]]:
                work.wait()

    with pytest.raises(DeadlockError, match="receive from rank 1, tag 0, group 2, before isend"):
        World(2, "nccl", drained=True).run(receives_first)
    World(2, "nccl").run(receives_first)

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

    def adds_to_what_is_summed(rank: int) -> None:
        tensor = torch.ones(1)
        work = dist.all_reduce(tensor, async_op=True)
        tensor += 1
        assert work is not None
        work.wait()

    with pytest.raises(AssertionError, match="written to"):
        World(2).run(adds_to_what_is_summed)
