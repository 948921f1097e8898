"""Nodes of workers that add up their gradients, one thread each, of which one runs at a time; and servers as a toy.

Who runs next is drawn whenever one waits, writes a mark or reads one. Workers die at any such moment, or are taken for
dead and go on; each hears of it in its own time.
"""

import random
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cnnstrategies.paramserver.combiner import board as board_module
from cnnstrategies.paramserver.combiner import worker as worker_module
from cnnstrategies.paramserver.combiner.board import Board, size_of
from cnnstrategies.paramserver.combiner.worker import CombinedWorker
from cnnstrategies.paramserver.core.view import RemovedError
from cnnstrategies.paramserver.drivers.staging import Copies, Staging
from cnnstrategies.paramserver.worker.connections import Counters

SIZES = (3, 1, 2)
STEPS = 6
MOST_TURNS = 100_000
DENSE = ("none", "none")


class Killed(BaseException):
    """The process ends here."""


class LateEvent:
    """A copy that reads and writes as late as it may, after all that were begun before."""

    def __init__(self, copies: "LateCopies", target: Tensor, source: Tensor) -> None:
        self._copies, self._target, self._source = copies, target, source
        self._asked = 0

    def query(self) -> bool:
        self._asked += 1
        if self._asked > 2:
            self.synchronize()
        return self._asked > 2

    def synchronize(self) -> None:
        while self in self._copies.queue:
            self._copies.queue.popleft().copy()

    def copy(self) -> None:
        self._target.copy_(self._source)


class LateCopies(Copies):
    """A device that copies to and from the host when it must."""

    def __init__(self) -> None:
        self.queue: deque[LateEvent] = deque()
        self._needed: list[LateEvent] = []

    def host(self, tensor: Tensor) -> Tensor:
        return torch.full_like(tensor, torch.nan)

    def begin(self, target: Tensor, source: Tensor) -> LateEvent:
        self.queue.append(LateEvent(self, target, source))
        return self.queue[-1]

    def before_use(self, event: LateEvent) -> None:
        self._needed.append(event)

    def compute(self) -> None:
        """The device goes on as far as something waits for copies."""
        for event in self._needed:
            event.synchronize()
        self._needed.clear()


class Servers:
    """Common steps as the servers make them: each is decided once all members that live have pushed it in full.

    A gradient has for each element of a parameter one for each rank: the `width`.
    """

    def __init__(self, nodes: int, width: int) -> None:
        self.values = [[torch.zeros(size, width, dtype=torch.float64) for size in SIZES]]  # of each step
        self.made: list[list[dict[int, Tensor]]] = []
        self.members: set[int] = set()
        self.gone: set[int] = set()
        self.pushes: dict[int, tuple[float, dict[int, Tensor]]] = {}
        self._seen: set[int] = set()
        self._nodes = nodes

    @property
    def step(self) -> int:
        return len(self.made)

    def join(self, worker: int) -> int:
        self._seen.add(worker)
        self.members.add(worker)
        return self.step

    def remove(self, worker: int) -> None:
        self.gone.add(worker)
        self._seen.add(worker)
        self.members.discard(worker)
        self.pushes.pop(worker, None)
        self.decide()

    def decide(self) -> None:
        complete = all(worker in self.pushes for worker in self.members)
        if not self.members or not complete or (not self.made and len(self._seen) < self._nodes):
            return
        total = sum(self.pushes[worker][0] for worker in self.members)
        step = []
        values = []
        for index, value in enumerate(self.values[-1]):
            given = {one: self.pushes[one][1][index] for one in self.members if index in self.pushes[one][1]}
            mean = sum((self.pushes[one][0] / total * gradient for one, gradient in given.items()), torch.zeros(()))
            step.append({one: self.pushes[one][0] * gradient for one, gradient in given.items()})
            values.append(value - mean)
        self.made.append(step)
        self.values.append(values)
        self.pushes.clear()


class Engine:
    """A worker's connection to the toy."""

    def __init__(self, world: "World", rank: int, came: Callable[[int, Tensor], None]) -> None:
        self.step = 0
        self.counters = Counters()
        self.codecs = DENSE
        self._world = world
        self._servers = world.servers
        self._rank = rank
        self._came = came
        self._open: set[int] = set()
        self._push: dict[int, Tensor] = {}
        self._samples = 0.0

    def initialise(self, optimizer_state: Any = None) -> None:
        self._pause()

    meet = initialise

    def join(self) -> int:
        self._pause()
        self.step = self._servers.join(self._rank)
        self._open = set(range(len(SIZES)))
        self.wait_all()
        return self.step

    def begin_step(self, groups: Sequence[Mapping[str, Any]], samples: float) -> None:
        assert not self._push
        assert groups == (self.step,), "hyper-parameters of another step"
        self.wait_all()
        self._samples = samples

    def push(self, index: int, gradient: Tensor) -> None:
        self._pause()
        assert index not in self._push
        self._push[index] = gradient.clone()

    def end_step(self) -> None:
        self._pause()
        assert self._servers.step == self.step or self._rank not in self._servers.members
        if self._rank in self._servers.members:
            self._servers.pushes[self._rank] = self._samples, self._push
            self._servers.decide()
        self._push = {}
        self.step += 1
        self._open = set(range(len(SIZES)))

    def wait(self, index: int) -> None:
        while index in self._open:
            self._pause()
            if self._servers.step >= self.step:
                self._take(self._world.random.choice(sorted(self._open)))

    def wait_all(self) -> None:
        for index in range(len(SIZES)):
            self.wait(index)

    def refresh(self) -> None:
        self._open = set(range(len(SIZES)))
        self.wait_all()

    def optimizer_state(self) -> dict[str, Any]:
        return {}

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _take(self, index: int) -> None:
        self._open.discard(index)
        self._world.parameters[self._rank][index].copy_(self._servers.values[self.step][index])
        self._came(index, self._world.parameters[self._rank][index])

    def _pause(self) -> None:
        self._world.pause()
        if self._rank in self._servers.gone:
            raise RemovedError(str(self._rank))


class World:
    """One run, with as many nodes as the seed says, or some; `patch` puts simulated devices in their place."""

    def __init__(self, seed: int, patch: pytest.MonkeyPatch, faults: bool = True, nodes: int | None = None) -> None:
        self.random = random.Random(seed)
        self._patch = patch
        self.nodes = nodes or self.random.randint(1, 3)
        self.per_node = self.random.randint(2, 4)
        self.count = self.nodes * self.per_node
        self.servers = Servers(self.nodes, self.count)
        ranks = range(self.count)
        self.parameters = {rank: [value.clone() for value in self.servers.values[0]] for rank in ranks}
        size = size_of(self.parameters[0])
        memory = {rank: memoryview(bytearray(size)) for rank in ranks}
        self.boards = {rank: Board(memory[rank], self.parameters[rank]) for rank in ranks}
        self.copies = [LateCopies() for _ in ranks] if self.random.random() < 0.3 else []  # Else there are no devices.
        self.workers = {rank: self._worker(rank) for rank in ranks}
        self.views = [frozenset(ranks)]
        self.seen = dict.fromkeys(ranks, 0)
        self.samples = {rank: float(self.random.randint(1, 4)) for rank in ranks}
        self.absent = {
            (rank, step, index)
            for rank in ranks for step in range(STEPS) for index in range(len(SIZES)) if self.random.random() < 0.1
        }  # fmt: skip
        self.worked: dict[int, set[int]] = {rank: set() for rank in ranks}  # steps
        self.left_out: dict[int, int] = dict.fromkeys(ranks, 0)
        self.finished: dict[int, int] = {}
        self.errors: list[BaseException] = []
        deaths = self.random.randint(0, self.count - 1) if faults else 0
        self._deaths = sorted(
            (self.random.randint(0, 150 * self.count), rank) for rank in self.random.sample(list(ranks), deaths)
        )
        self.dead: set[int] = set()
        self._killed: set[int] = set()
        self._speeds = {rank: self.random.choice((0.1, 1.0, 1.0)) for rank in ranks}
        self._turns = {rank: threading.Semaphore(0) for rank in ranks}
        self._over = threading.Semaphore(0)
        self._running: int | None = None

    def _worker(self, rank: int) -> CombinedWorker:
        first = rank // self.per_node * self.per_node
        boards = {other: self.boards[other] for other in range(first, first + self.per_node)}
        copies = self.copies[rank] if self.copies else None
        self._patch.setattr(worker_module, "staging_for", lambda own: copies and Staging(own, copies))
        return CombinedWorker(
            rank, boards, self.parameters[rank], lambda came: Engine(self, rank, came), lambda: self._alive(rank),
            self.pause, DENSE,
        )  # fmt: skip

    def _alive(self, rank: int) -> Collection[int]:
        """What one knows of who lives: late, and never less than before."""
        self.seen[rank] = self.random.randint(self.seen[rank], len(self.views) - 1)
        return self.views[self.seen[rank]]

    # Threads

    def pause(self) -> None:
        """Let others run."""
        rank = self._running
        assert rank is not None
        self._over.release()
        self._turns[rank].acquire()
        if rank in self._killed:
            raise Killed

    def run(self) -> None:
        """Run until all have ended."""
        threads = {rank: threading.Thread(target=self._main, args=(rank,)) for rank in self.workers}
        for thread in threads.values():
            thread.start()
        turn = 0
        while left := [rank for rank, thread in threads.items() if rank not in self.finished and thread.is_alive()]:
            turn += 1
            self._play(turn)
            over = turn > MOST_TURNS or self.errors
            speeds = [self._speeds[rank] for rank in left]
            self._running = left[0] if over else self.random.choices(left, speeds)[0]
            if over:
                self._killed.add(self._running)
            self._turns[self._running].release()
            self._over.acquire()
            if self._running in self.finished or self._running in self._killed:
                threads[self._running].join()
        if self.errors:
            raise self.errors[0]
        assert turn <= MOST_TURNS, "somebody waits for ever"

    def _play(self, turn: int) -> None:
        while self._deaths and self._deaths[0][0] <= turn:
            _, rank = self._deaths.pop(0)
            if rank in self.finished:
                continue
            self.dead.add(rank)
            if self.random.random() < 0.7:  # Else it was stopped, was taken for dead, and goes on.
                self._killed.add(rank)
            self.views.append(self.views[-1] - {rank})
            self.servers.remove(rank)

    def _main(self, rank: int) -> None:
        self._turns[rank].acquire()
        try:
            if rank not in self._killed:
                self._train(rank)
        except Killed:
            pass
        except RemovedError:
            if rank not in self.dead:
                self.errors.append(AssertionError(f"{rank} was not removed"))
        except BaseException as error:
            self.errors.append(error)
        self.finished[rank] = self.workers[rank].step
        self._over.release()

    # Training

    def _train(self, rank: int) -> None:
        worker = self.workers[rank]
        worker.initialise()
        worker.join()
        batches = 0
        while batches < STEPS:
            worker.wait(0)
            if worker.late:
                left_out = worker.catch_up()
                batches += left_out
                self.left_out[rank] += left_out
                continue
            for index in range(1, len(SIZES)):
                worker.wait(index)
            worker.begin_step((worker.step,), self.samples[rank])
            step, before = worker.step, worker.late
            if not before and rank not in self.dead:
                self._check_values(rank, step)
            order = list(range(len(SIZES)))
            self.random.shuffle(order)
            for index in order:
                if (rank, step, index) not in self.absent:
                    gradient = torch.zeros(SIZES[index], self.count, dtype=torch.float64)
                    gradient[:, rank] = step + 1
                    worker.push(index, gradient)
            worker.end_step()
            batches += 1
            self.left_out[rank] += before
            if not before:
                self.worked[rank].add(step)
        worker.wait_all()
        left_out = worker.catch_up()
        self.left_out[rank] += left_out
        if rank not in self.dead:
            assert batches + left_out == worker.step == STEPS, "steps are no longer those of the trainer"
            self._check_values(rank, STEPS)

    def _check_values(self, rank: int, step: int) -> None:
        if self.copies:
            self.copies[rank].compute()
        for own, value in zip(self.parameters[rank], self.servers.values[step], strict=True):
            assert torch.equal(own, value), f"rank {rank} has other values than those of step {step}"

    # Checks

    def lost_a_leader(self, rank: int) -> bool:
        """Whether one has died that has led a worker's node, where there are others."""
        first = rank // self.per_node * self.per_node
        return self.nodes > 1 and any(other in self.dead for other in range(first, rank))

    def contributors(self, step: int, index: int) -> set[int]:
        """The ranks whose gradients are in a step, each with the weight that it should have."""
        found: set[int] = set()
        for worker, pushed in self.servers.made[step][index].items():
            node = worker // self.per_node
            shares = pushed[0] / (step + 1)
            assert torch.equal(pushed, pushed[:1].expand_as(pushed)), "a gradient is torn"
            ranks = {rank for rank in range(self.count) if shares[rank]}
            assert all(rank // self.per_node == node for rank in ranks), "a gradient of another node"
            # Where nobody dies, who has no gradient counts as one of zeros.
            share = shares.sum() / sum(self.samples[rank] for rank in ranks)
            total = share if self.dead else torch.ones_like(share)
            for rank in ranks:
                assert torch.isclose(shares[rank], total * self.samples[rank]), "a gradient counts for another weight"
            assert not ranks & found, "a gradient counts twice"
            found |= ranks
        return found


def simulate(seed: int, faults: bool = True, nodes: int | None = None) -> World:
    """Run one, and check what holds in each."""
    with pytest.MonkeyPatch.context() as patch:
        world = World(seed, patch, faults, nodes)
        patch.setattr(board_module, "fence", world.pause)
        world.run()
    alive = set(range(world.count)) - world.dead
    assert world.servers.step >= STEPS or not alive
    for step in range(world.servers.step):
        for index in range(len(SIZES)):
            found = world.contributors(step, index)
            for rank in alive:
                gave = step in world.worked[rank] and (rank, step, index) not in world.absent
                assert gave or rank not in found, f"rank {rank} is in step {step} with what it has not given"
                # The servers make steps without a node whose leader has just died.
                assert rank in found or not gave or world.lost_a_leader(rank), f"rank {rank} is not in step {step}"
    return world
