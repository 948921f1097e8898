"""A node pushes once: what its workers give is in each step once, whoever of them dies."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from node_simulation import DENSE, STEPS, simulate
from roles import PlainRoles, join, until

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.combiner.board import Board, SharedMemory, open_shared, size_of
from cnnstrategies.paramserver.combiner.worker import CombinedWorker
from cnnstrategies.paramserver.core.view import RemovedError, ServersUnreachableError, WorkerInfo
from cnnstrategies.paramserver.server import clocks
from cnnstrategies.strategies.parameter_server.start import Alive


def test_each_gradient_is_once_in_its_step_weighted_by_samples() -> None:
    for seed in range(5):
        world = simulate(seed, faults=False)
        assert all(len(steps) == STEPS for steps in world.worked.values())
        assert not any(world.left_out.values())


@pytest.mark.parametrize("first", range(0, 30, 15))
def test_nothing_of_the_living_is_lost_or_counts_twice(first: int) -> None:
    for seed in range(first, first + 15):
        simulate(seed)


def test_a_node_alone_leaves_out_no_step_when_its_leader_dies() -> None:
    deaths = 0
    for seed in range(10):
        world = simulate(seed, nodes=1)
        deaths += 0 in world.dead
        assert not any(world.left_out[rank] for rank in range(world.count) if rank not in world.dead)
    assert deaths > 2


def test_with_real_servers_a_dead_leaders_rest_is_pushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node of two, whose leader dies within a step, and a worker that is none of them."""
    monkeypatch.setattr(clocks, "PATIENCE_SECONDS", 1e3)  # For who is in the view, and does not say where it is.
    with PlainRoles(tmp_path, sizes=(40, 7), workers=2, servers=2, pipelined=True) as cluster:
        values = [[parameter.detach().clone() for parameter in cluster.parameters] for _ in range(3)]
        size = size_of(cluster.parameters)
        shared = {rank: SharedMemory(size) for rank in range(2)}
        where = {rank: memory.where for rank, memory in shared.items()}
        own: dict[int, Board] = {}

        def work(rank: int) -> None:
            others = open_shared([1 - rank], where, size)
            boards = {one: Board(memory, cluster.parameters) for one, memory in others.items()}
            own[rank] = boards[rank] = Board(shared[rank].own, cluster.parameters)

            def connect(came: Callable[[int, torch.Tensor], None]) -> Worker:
                return cluster.connect(rank, values[rank], came=came)

            def pause() -> None:
                time.sleep(1e-4)

            cluster.show(f"worker-{rank}", cluster.view)
            alive = Alive(cluster.views(f"worker-{rank}").current, boards.keys())
            worker = CombinedWorker(rank, boards, values[rank], connect, alive, pause, DENSE)
            worker.initialise()
            worker.join()
            for step in range(STEPS):
                worker.wait_all()
                assert worker.step == step
                assert not worker.late
                worker.begin_step(cluster.options, 1)
                for index, value in enumerate(values[rank]):
                    worker.push(index, torch.full_like(value, 1.0 + 2 * rank))
                    if (rank, step) == (0, 3):
                        return  # It is as good as dead.
                worker.end_step()
            worker.wait_all()

        cluster.publish(workers=tuple(map(WorkerInfo, range(3))), begun=1)
        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(2)]
        for thread in threads:
            thread.start()
        third = cluster.connect(2, values[2])
        join([third])
        for step in range(STEPS):
            if step == 3:  # Else it may make the step alone before the next worker leads.
                threads[0].join(30)
                cluster.without_worker(0)
                until(lambda: own[1].led == 3)
            cluster.step(third, 2.0)
        threads[1].join(30)
        assert not threads[1].is_alive()
        expected = [parameter.detach().clone().requires_grad_() for parameter in cluster.parameters]
        optimizer = torch.optim.SGD(expected, lr=0.5, momentum=0.5)
        for step in range(STEPS):  # The mean over the workers: a sample each, and one of them is dead.
            for parameter in expected:
                parameter.grad = torch.full_like(parameter, 2.0 if step < 3 else 2.5)
            optimizer.step()
        for rank in (1, 2):
            assert all(map(torch.allclose, values[rank], expected)), rank


def test_who_leads_may_have_died_or_forgotten_steps_and_all_hear_of_it() -> None:
    parameters, alive = [torch.zeros(2)], {0, 1, 2}
    boards = {rank: Board(memoryview(bytearray(size_of(parameters))), parameters) for rank in range(3)}
    worker = CombinedWorker(2, boards, parameters, lambda came: Mock(), lambda: alive, lambda: None, DENSE)
    boards[0].show(0, torch.ones(2), 2 * 7)
    boards[0].lead(7)
    assert worker.join() == 7
    assert parameters[0].tolist() == [1.0, 1.0]
    alive.discard(2)
    with pytest.raises(RemovedError, match="worker 2 was taken for dead"):
        worker.begin_step((), 1)
    alive.symmetric_difference_update({0, 2})
    boards[1].lead(5)
    with pytest.raises(ServersUnreachableError, match="at step 5 again, and this node had begun step 7"):
        worker.begin_step((), 1)


def test_memory_of_another_nodes_process_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"combine: true: worker 3 \(process 1 on other\) counts as one"):
        open_shared([3], {3: ["other", 1, 99]}, 64)
