"""Any layout trains what one process trains, and no order of messages makes the ranks wait for each other."""

import itertools

import pytest
import torch
from random_layouts import Case, Trial, random_cases, run_as_threads
from rank_threads import DeadlockError, World
from ranks import run_ranks

PARTS = 3


@pytest.mark.parametrize("part", range(PARTS))
def test_random_layouts_equal_one_process(part: int) -> None:
    for case in itertools.islice(random_cases(0), part, 60, PARTS):
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


def test_threads_that_wait_for_each_other_are_found() -> None:
    """The tool itself: two sends that meet no receive, and a tensor that is given away while it is under way."""

    def both_send(rank: int) -> None:
        tensor = torch.zeros(1)
        torch.distributed.isend(tensor, 1 - rank).wait()

    with pytest.raises(DeadlockError, match="send to rank 1"):
        World(2).run(both_send)

    def sends_what_it_drops(rank: int) -> None:
        if rank == 0:
            work = torch.distributed.isend(torch.zeros(1), 1)
            torch.distributed.barrier()
            work.wait()
        else:
            torch.distributed.barrier()
            torch.distributed.irecv(torch.zeros(1), 0).wait()

    with pytest.raises(AssertionError, match="freed"):
        World(2).run(sends_what_it_drops)
