"""A node pushes once: what its workers give is in each step once, whoever of them dies."""

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from node_simulation import STEPS, simulate
from roles import PlainRoles, until

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.combiner.board import Board, SharedMemory, StepSum, open_shared, size_of
from cnnstrategies.paramserver.combiner.worker import CombinedWorker
from cnnstrategies.paramserver.core.view import RemovedError, ServersUnreachableError, WorkerInfo
from cnnstrategies.paramserver.server import clocks
from cnnstrategies.paramserver.worker.codecs import ladder
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


class Node:
    """Two workers of a node, in threads, each with a connection to real servers when it leads."""

    def __init__(self, cluster: PlainRoles, first: int, gradient: float) -> None:
        self.cluster = cluster
        self.gradient = gradient
        self.dies_at: int | None = None  # step, of the first
        self.waits_at: int | None = None  # step, of both
        self.may_go_on = threading.Event()
        ranks = (first, first + 1)
        self.values = {rank: [parameter.detach().clone() for parameter in cluster.parameters] for rank in ranks}
        size = size_of(cluster.parameters)
        shared = {rank: SharedMemory(size) for rank in ranks}
        self.boards = boards = {
            rank: {other: self._board(shared, rank, other, size) for other in ranks} for rank in ranks
        }  # fmt: skip
        for one in shared.values():
            one.opened()
        self.workers = {rank: self._worker(rank, boards[rank]) for rank in ranks}
        self.threads = {rank: threading.Thread(target=self._train, args=(rank,), daemon=True) for rank in ranks}

    def _board(self, shared: dict[int, SharedMemory], rank: int, other: int, size: int) -> Board:
        where = {one: memory.where for one, memory in shared.items()}
        memory = shared[rank].own if rank == other else open_shared([other], where, size)[other]
        return Board(memory, self.cluster.parameters)

    def _worker(self, rank: int, boards: dict[int, Board]) -> CombinedWorker:
        def connect(came: Callable[[int, torch.Tensor], None]) -> Worker:
            return self.cluster.connect(rank, self.values[rank], came=came)

        self.cluster.show(f"worker-{rank}", self.cluster.view)
        alive = Alive(self.cluster.views(f"worker-{rank}").current, boards.keys())
        pause = partial(time.sleep, 1e-4)
        return CombinedWorker(
            rank, boards, self.values[rank], connect, alive, pause, ladder(self.cluster.specification)[0]
        )

    def _train(self, rank: int) -> None:
        worker = self.workers[rank]
        worker.initialise() if rank == 0 else worker.stand_in()
        worker.join()
        while worker.step < STEPS:
            worker.wait(0)
            assert not worker.late
            if worker.step == self.waits_at:
                self.may_go_on.wait()
            worker.begin_step(self.cluster.options, 1)
            for index, value in enumerate(self.values[rank]):
                worker.push(index, torch.full_like(value, self.gradient))
                if rank == min(self.workers) and worker.step == self.dies_at:
                    return  # It is as good as dead.
            worker.end_step()
        worker.wait_all()


def test_with_real_servers_a_dead_leaders_rest_is_pushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "PATIENCE_SECONDS", 1e3)  # For who is in the view, and does not say where it is.
    with PlainRoles(tmp_path, sizes=(40, 7), workers=2, servers=2, pipelined=True) as cluster:
        everyone = tuple(WorkerInfo(rank) for rank in range(4))
        cluster.publish(workers=everyone, begun=1)
        nodes = [Node(cluster, 0, 1.0), Node(cluster, 2, 3.0)]
        nodes[1].dies_at = nodes[0].waits_at = 3  # Else it may make the step alone before the next worker leads.
        threads = nodes[0].threads | nodes[1].threads
        for thread in threads.values():
            thread.start()
        threads[2].join(30)
        assert nodes[1].workers[2].leads
        assert nodes[1].workers[2].step == 3
        cluster.without_worker(2)
        until(lambda: nodes[1].boards[3][3].led == 3)
        nodes[0].may_go_on.set()
        for rank in (0, 1, 3):
            threads[rank].join(30)
            assert not threads[rank].is_alive(), rank
        assert nodes[1].workers[3].leads
        assert nodes[1].workers[3].counters.dropped == 0
        expected = [parameter.detach().clone().requires_grad_() for parameter in cluster.parameters]
        optimizer = torch.optim.SGD(expected, lr=0.5, momentum=0.5)
        for step in range(STEPS):
            for parameter in expected:  # The mean over the workers: a sample each, and one of them is dead.
                parameter.grad = torch.full_like(parameter, 2.0 if step < 3 else 5 / 3)
            optimizer.step()
        for node, rank in ((nodes[0], 0), (nodes[0], 1), (nodes[1], 3)):
            assert all(map(torch.allclose, node.values[rank], expected)), rank


class Taken:
    """What a step gives."""

    def __init__(self) -> None:
        self.samples = 0.0
        self.pushed: dict[int, list[float]] = {}

    def begin_step(self, groups: object, samples: float) -> None:
        self.samples = samples

    def push(self, index: int, gradient: torch.Tensor) -> None:
        self.pushed[index] = gradient.tolist()


def boards_of(parameters: list[torch.Tensor], ranks: range) -> dict[int, Board]:
    return {rank: Board(memoryview(bytearray(size_of(parameters))), parameters) for rank in ranks}


def test_a_step_is_the_mean_of_those_alive_weighted_by_samples() -> None:
    parameters = [torch.zeros(2), torch.zeros(1), torch.zeros(1)]
    boards = boards_of(parameters, range(1, 4))
    alive = {0, 1, 2, 3}
    taken = Taken()
    step = StepSum(5, (), 1.0, {0: torch.tensor([1.0, 2.0])}, boards, lambda: alive, [None] * 3)
    for rank, samples in ((1, 1.0), (2, 2.0)):
        boards[rank].begin(5, samples)
    assert not step.advance(taken)
    assert not taken.samples, "the weight is known when all have begun"
    boards[3].begin(5, 4.0)
    boards[1].give(0, torch.tensor([3.0, 2.0]), 5)
    boards[3].give(0, torch.tensor([9.0, 9.0]), 4)  # Of the step before.
    step.advance(taken)
    assert taken.samples == 8
    assert not taken.pushed
    boards[1].end(5)
    boards[2].end(5)  # It has no gradient of the first, which counts as zeros.
    alive.discard(3)  # It has given none, and never will.
    step.add(1, torch.tensor([8.0]))
    step.advance(taken)
    assert taken.pushed == {0: [1.0, 1.0], 1: [2.0]}
    boards[2].give(2, torch.tensor([1.0]), 5)
    assert step.advance(taken)
    step.end()
    assert step.advance(taken)
    assert taken.pushed[2] == [0.5]


def test_who_was_taken_for_dead_hears_of_it_in_any_wait() -> None:
    parameters = [torch.zeros(2)]
    boards = boards_of(parameters, range(2))
    alive = {0, 1}
    worker = CombinedWorker(1, boards, parameters, lambda came: Mock(), lambda: alive, lambda: None, ("none", "none"))
    boards[0].show(0, torch.ones(2), 0)
    boards[0].lead(0)
    worker.join()
    assert parameters[0].tolist() == [1.0, 1.0]
    alive.discard(1)
    with pytest.raises(RemovedError, match="worker 1 was taken for dead"):
        worker.begin_step((), 1)


def test_a_node_stops_where_servers_have_forgotten_steps() -> None:
    parameters = [torch.zeros(2)]
    boards = boards_of(parameters, range(3))
    alive = {0, 1, 2}
    worker = CombinedWorker(2, boards, parameters, lambda came: Mock(), lambda: alive, lambda: None, ("none", "none"))
    boards[0].show(0, torch.ones(2), 2 * 7)
    boards[0].lead(7)
    assert worker.join() == 7
    alive.discard(0)
    boards[1].lead(5)
    with pytest.raises(ServersUnreachableError, match="at step 5 again, and this node had begun step 7"):
        worker.begin_step((), 1)


def test_memory_of_another_nodes_process_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"combine: true: worker 3 \(process 1 on other\) counts as one"):
        open_shared([3], {3: ["other", 1, 99]}, 64)
