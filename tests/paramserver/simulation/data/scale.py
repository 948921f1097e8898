"""Many workers and servers, or many steps, without faults: `python -m simulation.data.scale`.

The real roles, each with a box of messages that it reads in one go, as its driver does. What is counted is the same on
every machine: messages for each process and step, and how much each process keeps.
"""

import argparse
import time
from collections import Counter, deque
from collections.abc import Generator
from typing import Any, NamedTuple

import torch

from cnnstrategies.paramserver.core.view import ServerInfo, View, WorkerInfo
from cnnstrategies.paramserver.messages import Effects, Header, Parcel
from cnnstrategies.paramserver.server.server import Server
from cnnstrategies.paramserver.server.store import Store
from cnnstrategies.paramserver.slicing import cut
from cnnstrategies.paramserver.specification import Group, ParameterInfo, Specification
from cnnstrategies.paramserver.worker.worker import Wait, WorkerRole

PLAIN = (str, bytes, bytearray, int, float, type(None), torch.Tensor, memoryview, torch.dtype)
OPTIONS: dict[str, Any] = {
    "lr": 0.1, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False, "maximize": False,
    "foreach": False, "differentiable": False, "fused": None,
}  # fmt: skip
Box = deque[tuple[int, Header, bytes]]


class Counted(NamedTuple):
    """What came of a run.

    Attributes:
        received: Messages that each server has received in each step, on average; the first leads.
        kept: What the process that keeps most keeps, after each tenth of the steps: no values, but all that is
            counted, noted or waits.
    """

    received: list[float]
    kept: list[int]


class Crowd:
    """Workers that train together with servers, each of which holds one slice."""

    def __init__(self, workers: int, servers: int) -> None:
        parameters = tuple(ParameterInfo(str(one), (1,), "float32") for one in range(servers))
        group = Group(tuple(range(servers)), dict(OPTIONS))
        self._specification = Specification(parameters, "torch.optim.sgd.SGD", (group,), workers, servers, session=1)
        slices = cut(self._specification)
        self._options = [group.options]
        self._gradient = torch.ones(1)
        self.servers = [
            Server(self._specification, one, Store(self._specification, [s for s in slices if one in s.servers]))
            for one in range(servers)
        ]
        self.workers = [
            WorkerRole(self._specification, slices, [torch.zeros(1) for _ in parameters], one, 0)
            for one in range(workers)
        ]
        self.received: Counter[int] = Counter()
        self._to_servers: list[Box] = [deque() for _ in self.servers]
        self._to_workers: list[Box] = [deque() for _ in self.workers]
        self._programs = [self._begin(worker) for worker in self.workers]
        self._waits: list[Wait | None] = [None for _ in self.workers]
        view = View(
            1,
            tuple(ServerInfo(one, "", since=1) for one in range(servers)),
            tuple(WorkerInfo(one) for one in range(workers)),
        )
        for server in self.servers:
            server.follow(0.0, view)
        for role in self.workers:
            role.follow(0.0, view)
        self._run()

    def train(self, steps: int) -> None:
        """Make some steps."""
        self._programs = [self._train(worker, steps) for worker in self.workers]
        self._run()

    def _begin(self, worker: WorkerRole) -> Generator[Wait]:
        yield from worker.initialise(0.0, None)
        yield from worker.join(0.0)

    def _train(self, worker: WorkerRole, steps: int) -> Generator[Wait]:
        for _ in range(steps):
            worker.begin_step(self._options, 1.0)
            for index in range(len(self.servers)):
                worker.push(index, self._gradient)
            worker.end_step()
            yield worker.all_here()

    def _run(self) -> None:
        """Hand over messages until every worker's program has come to its end."""
        now = 0.0
        for worker in range(len(self.workers)):
            self._go_on(worker)
        left = len(self.workers)
        while left:
            now += 0.05
            for one, server in enumerate(self.servers):
                self._serve(one, server, now)
            left = 0
            for one in range(len(self.workers)):
                left += self._work(one, now)

    def _serve(self, one: int, server: Server, now: float) -> None:
        box = self._to_servers[one]
        self.received[one] += len(box)
        while box:
            worker, header, payload = box.popleft()
            buffer = memoryview(bytearray(payload))
            route = header.sender.to_bytes(4, "big") if worker >= 0 else b""
            self._post(one, server.on_message(now, route, "", header, buffer))
        self._post(one, server.flush())
        while server.busy:
            self._post(one, server.work())
        self._post(one, server.on_time(now))

    def _post(self, sender: int, effects: Effects) -> None:
        for effect in effects:
            if isinstance(effect, Parcel):
                message = effect.header, bytes(effect.payload)
                if isinstance(effect.to, bytes):
                    self._to_workers[int.from_bytes(effect.to, "big")].append((sender, *message))
                else:
                    self._to_servers[effect.to].append((-1, *message))

    def _work(self, one: int, now: float) -> bool:
        """Hand a worker its messages; whether its program goes on."""
        worker, box, wait = self.workers[one], self._to_workers[one], self._waits[one]
        while box:
            server, header, payload = box.popleft()
            if worker.heard(now, server, header):
                worker.on_message(server, header, memoryview(bytearray(payload)))
        if wait is not None:
            worker.on_time(now)
            if not wait.waiting():
                self._go_on(one)
            self._send(one)
        return self._waits[one] is not None

    def _go_on(self, one: int) -> None:
        self._waits[one] = next((wait for wait in self._programs[one] if wait.waiting()), None)
        wait = self._waits[one]
        if wait is not None:
            self.workers[one].begin_waiting(0.0, wait)
        self._send(one)

    def _send(self, one: int) -> None:
        for parcel in self.workers[one].take():
            assert isinstance(parcel.to, int)
            self._to_servers[parcel.to].append((one, parcel.header, bytes(parcel.payload)))


def kept(thing: object, seen: set[int] | None = None) -> int:
    """How many things an object holds, and what it holds, and so on."""
    seen = set() if seen is None else seen
    if isinstance(thing, PLAIN) or id(thing) in seen:
        return 0
    seen.add(id(thing))
    if isinstance(thing, dict):
        held = [*thing.keys(), *thing.values()]
    elif isinstance(thing, list | tuple | set | frozenset | deque):
        held = list(thing)
    else:
        held = list(getattr(thing, "__dict__", {}).values())
    return len(held) + sum(kept(one, seen) for one in held)


def count(workers: int, servers: int, steps: int) -> Counted:
    """Train, and count."""
    crowd = Crowd(workers, servers)
    crowd.received.clear()
    most, part = [], max(1, steps // 10)
    for _ in range(steps // part):
        crowd.train(part)
        most.append(max(kept(one) for one in (*crowd.servers, *crowd.workers)))
    return Counted([crowd.received[one] / (steps // part * part) for one in range(servers)], most)


def main() -> None:
    """Print what is counted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--servers", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args()
    began = time.process_time()
    counted = count(arguments.workers, arguments.servers, arguments.steps)
    seconds = time.process_time() - began
    print(f"{arguments.workers:,} workers, {arguments.servers} servers, {arguments.steps:,} steps: {seconds:,.0f} s")
    first, *others = counted.received
    print(f"messages a step: {first:,.1f} to the leader, at most {max(others, default=0):,.1f} to another server")
    print(f"kept by the process that keeps most, after each tenth: {', '.join(f'{one:,}' for one in counted.kept)}")


if __name__ == "__main__":
    main()
