"""Simulation of nodes whose workers add up their gradients in shared memory, with the real roles of servers.

Each worker is a thread, and one thread runs at a time. The next thread is drawn whenever a worker waits or accesses a
mark in shared memory. At any such moment a worker may die, or be taken for dead and go on. The other workers learn of a
death after different delays. Messages arrive at once.
"""

import random
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from cnnstrategies.paramserver import api
from cnnstrategies.paramserver.combiner import shared_state as shared_state_module
from cnnstrategies.paramserver.combiner import worker as worker_module
from cnnstrategies.paramserver.combiner.shared_state import SharedState, size_of
from cnnstrategies.paramserver.combiner.worker import CombinedWorker
from cnnstrategies.paramserver.core.view import RemovedError, ServersUnreachableError, View, WorkerInfo
from cnnstrategies.paramserver.drivers.staging import StagedCopies, Staging
from cnnstrategies.paramserver.messages import Effects, Header, Parcel
from cnnstrategies.paramserver.specification import Specification
from tests.paramserver.data_world import Servers

SIZES = (3, 1, 2)
STEPS = 6
MOST_TURNS = 100_000
TURN = 0.001  # Virtual duration of a turn, in seconds.
DENSE = ("none", "none")
Arrived = tuple[int, Header, memoryview]


class Killed(BaseException):
    """Raised in the thread of a worker that dies."""


class LateEvent:
    """A copy that reads and writes as late as possible, after all copies that were begun before it."""

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


class LateCopies(StagedCopies):
    """Copies between a device and the host that happen as late as possible."""

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
        """Make the copies that the device's computations wait for."""
        for event in self._needed:
            event.synchronize()
        self._needed.clear()


def rate(step: int) -> float:
    """Return the learning rate of a step, which differs from the rates of the steps before and after it."""
    return 1.0 if step % 2 else 0.5


class NodeServers(Servers):
    """The servers, with a record of each version of the values and an inbox for each connection."""

    def __init__(self, specification: Specification) -> None:
        super().__init__(specification)
        self.inboxes: dict[bytes, deque[Arrived]] = {}
        self._versions: dict[tuple[int, int], Tensor] = {}

    def tell(self, route: bytes, server: int, header: Header, payload: memoryview) -> None:
        if route in self.inboxes:
            self.inboxes[route].append((server, header, payload))

    def hear(self, route: bytes, parcel: Parcel) -> None:
        """Deliver a worker's message to a server."""
        assert isinstance(parcel.to, int)
        payload = memoryview(bytearray(parcel.payload))
        self._act(parcel.to, self.roles[parcel.to].on_message(self.now, route, "", parcel.header, payload))

    def _act(self, server: int, effects: Effects) -> None:
        super()._act(server, effects)
        for role in self.roles.values():
            for key, version in role.store.versions.items():
                self._versions.setdefault((key, version), role.store.values[key].clone())

    @property
    def step(self) -> int:
        """Number of steps that all servers have made."""
        return max(0, min(version for role in self.roles.values() for version in role.store.versions.values()))

    def made(self, step: int) -> list[Tensor]:
        """Return the parameters after a number of steps."""
        values = [torch.zeros(info.shape, dtype=torch.float64) for info in self.specification.parameters]
        for slice_ in self.slices:
            flat = self._versions[slice_.key, step].split([part.numel for part in slice_.parts])
            for part, values_of_part in zip(slice_.parts, flat, strict=True):
                values[part.parameter].view(-1)[part.start : part.stop] = values_of_part
        return values


class FakeLinks:
    """Connections of a worker to the simulated servers, in place of sockets."""

    def __init__(self, world: "World", heard: Callable[[float, int, Header], bool]) -> None:
        self._world = world
        self._heard = heard
        self._route = str(len(world.servers.inboxes)).encode()
        self._inbox = world.servers.inboxes[self._route] = deque[Arrived]()

    def new_view(self) -> View:
        return self._world.servers.view

    def connect(self, view: View) -> None:
        pass

    def send(self, parcels: Iterable[Parcel]) -> None:
        for parcel in parcels:
            self._world.pause()
            self._world.servers.hear(self._route, parcel)

    def arrived(self) -> Iterator[Arrived]:
        while self._inbox:
            server, header, payload = self._inbox.popleft()
            if self._heard(self._world.now, server, header):
                yield server, header, payload

    def receive(self, seconds: float) -> Iterator[Arrived]:
        self._world.pause()
        yield from self.arrived()

    def close(self) -> None:
        del self._world.servers.inboxes[self._route]
        self._world.servers.inboxes[b"closed " + self._route] = deque()


class World:
    """One run with a drawn or given number of nodes. `patch` replaces devices and links with simulated ones.

    Each parameter has one element for each rank and step. A rank's gradient of a step is 1 there and 0 elsewhere.
    """

    def __init__(self, seed: int, patch: pytest.MonkeyPatch, nodes: int | None = None) -> None:
        self.random = random.Random(seed)
        self._patch = patch
        self.nodes = nodes or self.random.randint(1, 3)
        self.per_node = self.random.randint(2, 4)
        self.count = self.nodes * self.per_node
        ranks = range(self.count)
        first = [nn.Parameter(torch.zeros(size, self.count, STEPS, dtype=torch.float64)) for size in SIZES]
        named = [(str(index), parameter) for index, parameter in enumerate(first)]
        options = {"servers": self.random.randint(1, 2), "pipelined": self.random.random() < 0.5, "timeout": 30.0}
        options["per_node"] = self.per_node
        self.specification = Specification.of(named, torch.optim.SGD(first, lr=1.0), self.nodes, **options)
        self.servers = NodeServers(self.specification)
        for server in range(self.specification.servers):
            self.servers.serve(server)
        self.servers.follow(replace(self.servers.view, number=2, workers=tuple(map(WorkerInfo, ranks)), begun=1))
        self.parameters = {rank: [value.detach().clone() for value in first] for rank in ranks}
        memory = {rank: memoryview(bytearray(size_of(first))) for rank in ranks}
        self.shared_states = {rank: SharedState(memory[rank], first) for rank in ranks}
        self.copies = [LateCopies() for _ in ranks] if self.random.random() < 0.3 else []  # Empty without devices.
        patch.setattr(api, "Links", lambda specification, slices, views, heard, keys: FakeLinks(self, heard))
        patch.setattr(api, "staging_for", lambda parameters: None)
        patch.setattr(api, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.workers = {rank: self._worker(rank) for rank in ranks}
        self.views = [frozenset(ranks)]
        self.seen = dict.fromkeys(ranks, 0)
        self.samples = {rank: float(self.random.randint(1, 4)) for rank in ranks}
        self.absent = {
            (rank, step, index)
            for rank in ranks for step in range(STEPS) for index in range(len(SIZES)) if self.random.random() < 0.1
        }  # fmt: skip
        self.worked: dict[int, set[int]] = {rank: set() for rank in ranks}  # By rank: steps with its gradients.
        self.left_out: dict[int, int] = dict.fromkeys(ranks, 0)
        self.finished: dict[int, int] = {}
        self.errors: list[BaseException] = []
        deaths = self.random.sample(list(ranks), self.random.randint(0, self.count - 1))
        last = self.random.choice((40, 120)) * self.count
        self._deaths = sorted((self.random.randint(0, last), rank) for rank in deaths)
        self.dead: set[int] = set()
        self._killed: set[int] = set()
        self._speeds = {rank: self.random.choice((0.1, 1.0, 1.0)) for rank in ranks}
        self._turns = {rank: threading.Semaphore(0) for rank in ranks}
        self._over = threading.Semaphore(0)
        self._running: int | None = None
        self.turn = 0

    @property
    def now(self) -> float:
        """Virtual time."""
        return TURN * self.turn

    def _worker(self, rank: int) -> CombinedWorker:
        first = rank // self.per_node * self.per_node
        shared_states = {other: self.shared_states[other] for other in range(first, first + self.per_node)}
        copies = self.copies[rank] if self.copies else None
        self._patch.setattr(worker_module, "staging_for", lambda values: copies and Staging(values, copies))
        parameters, views = self.parameters[rank], SimpleNamespace()
        return CombinedWorker(
            rank, shared_states, parameters,
            lambda call: api.Worker(self.specification, parameters, views, rank, on_arrival=call),  # type: ignore[arg-type]
            lambda: self._alive(rank), self.pause, DENSE,
        )  # fmt: skip

    def _alive(self, rank: int) -> Collection[int]:
        """Return the living ranks as a rank knows them: late, but never older than before."""
        self.seen[rank] = self.random.randint(self.seen[rank], len(self.views) - 1)
        return self.views[self.seen[rank]]

    # Threads

    def pause(self) -> None:
        """Let other threads run."""
        rank = self._running
        assert rank is not None
        self._over.release()
        self._turns[rank].acquire()
        if rank in self._killed:
            raise Killed

    def run(self) -> None:
        """Run until all threads have ended."""
        threads = {rank: threading.Thread(target=self._run_rank, args=(rank,)) for rank in self.workers}
        for thread in threads.values():
            thread.start()
        while left := [rank for rank, thread in threads.items() if rank not in self.finished and thread.is_alive()]:
            self.turn += 1
            self._let_ranks_die(self.turn)
            over = self.turn > MOST_TURNS or self.errors
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
        assert self.turn <= MOST_TURNS, f"a worker still waits after {MOST_TURNS} turns"

    def _let_ranks_die(self, turn: int) -> None:
        while self._deaths and self._deaths[0][0] <= turn:
            _, rank = self._deaths.pop(0)
            if rank in self.finished:
                continue
            self.dead.add(rank)
            if self.random.random() < 0.7:  # Otherwise the worker was stopped, counts as dead, and goes on.
                self._killed.add(rank)
            self.views.append(self.views[-1] - {rank})
            view = self.servers.view
            others = tuple(worker for worker in view.workers if worker.id != rank)
            self.servers.follow(replace(view, number=view.number + 1, workers=others))

    def _run_rank(self, rank: int) -> None:
        self._turns[rank].acquire()
        try:
            if rank not in self._killed:
                self._train(rank)
        except Killed:
            pass
        except (RemovedError, ServersUnreachableError):  # Servers do not answer a worker that counts as dead.
            if rank not in self.dead:
                self.errors.append(AssertionError(f"rank {rank} ends, but was not removed"))
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
            (group,) = self.specification.groups
            worker.begin_step([{**group.options, "lr": rate(worker.step)}], self.samples[rank])
            step, before = worker.step, worker.late
            if not before and rank not in self.dead:
                self._check_values(rank, step)
            order = list(range(len(SIZES)))
            self.random.shuffle(order)
            for index in order:
                if (rank, step, index) not in self.absent:
                    gradient = torch.zeros_like(self.parameters[rank][index])
                    gradient[:, rank, min(step, STEPS - 1)] = 1.0  # A rank that counts as dead may train longer.
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
            assert batches + left_out == worker.step == STEPS, (
                f"rank {rank} does not count the same steps as its trainer"
            )
            self._check_values(rank, STEPS)

    def _check_values(self, rank: int, step: int) -> None:
        if self.copies:
            self.copies[rank].compute()
        for parameter, value in zip(self.parameters[rank], self.servers.made(step), strict=True):
            assert torch.equal(parameter, value), f"rank {rank} does not have the values of step {step}"

    # Checks

    def lost_a_leader(self, rank: int) -> bool:
        """Whether a leader of a rank's node has died while other nodes go on: the node may then leave out steps."""
        first = rank // self.per_node * self.per_node
        return self.nodes > 1 and any(other in self.dead for other in range(first, rank))

    def contributors(self, step: int, index: int) -> set[int]:
        """Return the ranks whose gradients are in a step, after a check of the gradients' weights."""
        change = (self.servers.made(step)[index] - self.servers.made(step + 1)[index]) / rate(step)
        assert torch.equal(change, change[:1].expand_as(change)), "a gradient is torn"
        shares = change[0, :, step].tolist()
        assert change[0].count_nonzero() == sum(map(bool, shares)), "a gradient of a different step is in the step"
        ranks = {rank for rank, share in enumerate(shares) if share}
        total = sum(self.samples.values())  # If no rank dies, a rank without a gradient counts with zeros.
        assert sum(shares) < 1 + 1e-9, "a gradient counts twice"
        for node in range(self.nodes):
            of_node = [rank for rank in ranks if rank // self.per_node == node]
            share = sum(shares[rank] for rank in of_node) / (sum(self.samples[rank] for rank in of_node) or 1.0)
            for rank in of_node:
                each = share if self.dead else 1 / total
                assert shares[rank] == pytest.approx(each * self.samples[rank]), "a gradient has the wrong weight"
        return ranks


def simulate(seed: int, nodes: int | None = None) -> World:
    """Simulate a run, check what must hold in every run, and return the run."""
    with pytest.MonkeyPatch.context() as patch:
        world = World(seed, patch, nodes)
        patch.setattr(shared_state_module, "fence", world.pause)
        world.run()
    alive = set(range(world.count)) - world.dead
    assert not any(world.left_out[rank] for rank in alive if not world.lost_a_leader(rank)), "a step is left out"
    assert world.servers.step >= STEPS or not alive
    for step in range(world.servers.step):
        for index in range(len(SIZES)):
            ranks = world.contributors(step, index)
            for rank in alive:
                gave = step in world.worked[rank] and (rank, step, index) not in world.absent
                assert gave or rank not in ranks, f"step {step} has a gradient that rank {rank} did not give"
                assert rank in ranks or not gave or world.lost_a_leader(rank), (
                    f"step {step} lacks the gradient of rank {rank}"
                )
    return world
