"""Servers and workers as threads of the test's own process: a fault is played where it happens, and costs no start."""

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import patience
import torch
from torch import Tensor, nn

from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.core.view import ServerInfo, View, WorkerInfo
from cnnstrategies.paramserver.drivers.server import ServerService
from cnnstrategies.paramserver.membership import Views
from cnnstrategies.paramserver.security import KeyPair
from cnnstrategies.paramserver.specification import Specification, hyperparameters


class Roles:
    """Some servers, each with a file of views of its own, and workers with theirs.

    Attributes:
        servers: Those that live.
        view: The last that all were told.
        keys: By role and number.
    """

    def __init__(self, directory: Path, specification: Specification, encrypted: bool = False) -> None:
        self.directory = directory
        self.specification = specification
        self.servers: dict[int, ServerService] = {}
        self.keys: dict[str, KeyPair] = {}
        self._encrypted = encrypted
        self._threads: dict[str, threading.Thread] = {}
        self._workers: list[Worker] = []
        self._shown: dict[str, View] = {}
        self._views: list[tuple[str, Views]] = []
        self._results: dict[str, Any] = {}
        numbers = range(specification.servers)
        servers = tuple(ServerInfo(one, f"ipc://{directory}/{one}", self._public(f"server-{one}")) for one in numbers)
        workers = tuple(WorkerInfo(one, 0, self._public(f"worker-{one}")) for one in range(specification.workers))
        self.view = View(1, servers, workers)
        for number in numbers:
            self.serve(number)

    def _public(self, who: str) -> str:
        if not self._encrypted:
            return ""
        return self.keys.setdefault(who, KeyPair.create()).public

    # Membership

    def views(self, who: str) -> Views:
        """What one role is told."""
        views = Views(lambda: (self._shown.get(who, View(-1, (), ())), None), lambda: None)
        self._views.append((who, views))
        return views

    def show(self, who: str, view: View) -> None:
        """Tell one role of a view."""
        self._shown[who] = view
        for listens, views in self._views:
            if listens == who:
                views.ring()

    def publish(self, **changes: Any) -> None:
        """Tell all of another view; servers that others have copies of may be lost."""
        view = replace(self.view, number=self.view.number + 1, **changes)
        gone = set(range(self.specification.servers)) - {info.id for info in view.servers}
        lost = tuple(sorted(gone)) if len(gone) < self.specification.replication else ()
        self.view = replace(view, lost=lost)
        for who in list(self._shown):
            self.show(who, self.view)

    def lose(self, number: int) -> None:
        """A server dies, and all hear of it."""
        self.kill(number)
        self.publish(servers=tuple(info for info in self.view.servers if info.id != number))

    def with_worker(self, number: int) -> None:
        """Tell all that a worker has come."""
        self.publish(workers=(*self.view.workers, WorkerInfo(number, 0, self._public(f"worker-{number}"))))

    # Servers

    def serve(self, number: int) -> None:
        """Start a server that the view names."""
        who = f"server-{number}"
        self.show(who, self.view)
        (endpoint,) = (info.endpoint for info in self.view.servers if info.id == number)
        server = ServerService(self.specification, self.views(who), number, endpoint, self.keys.get(who))
        self.servers[number] = server
        self._start(who, server.run)

    def kill(self, number: int) -> None:
        """Have a server answer no more."""
        self.servers.pop(number).stop()
        self._threads.pop(f"server-{number}").join()

    def serve_again(self, number: int) -> None:
        """Another server takes the place of one that has died, and all hear of it."""
        since = self.view.number + 1
        others = tuple(info for info in self.view.servers if info.id != number)
        endpoint, public = f"ipc://{self.directory}/{number}-{since}", self._public(f"server-{number}")
        self.publish(servers=(*others, ServerInfo(number, endpoint, public, since)))
        self.serve(number)

    # Workers

    def connect(self, number: int, values: Sequence[Tensor], incarnation: int = 0, **more: Any) -> Worker:
        """A worker with parameters of its own."""
        who = f"worker-{number}"
        self.show(who, self.view)
        worker = Worker(self.specification, values, self.views(who), number, incarnation, self.keys.get(who), **more)
        self._workers.append(worker)
        return worker

    def worker(self, number: int = 0) -> tuple[Worker, list[Tensor]]:
        """A worker, and its parameters: zeros."""
        infos = self.specification.parameters
        values = [torch.zeros(info.shape, dtype=getattr(torch, info.dtype)) for info in infos]
        return self.connect(number, values), values

    def joined(self) -> tuple[Worker, list[Tensor]]:
        """A worker that trains from now on, alone, and its parameters."""
        worker, values = self.worker()
        join([worker])
        return worker, values

    def all_joined(self) -> list[tuple[Worker, list[Tensor]]]:
        """All workers, which train from now on, with their parameters."""
        found = [self.worker(number) for number in range(self.specification.workers)]
        join([worker for worker, _ in found])
        return found

    def step(self, worker: Worker, gradient: float | Sequence[Tensor | None] = 1.0) -> None:
        """One step, to its end."""
        self.begin(worker, gradient)
        worker.wait_all()

    def begin(self, worker: Worker, gradient: float | Sequence[Tensor | None] = 1.0) -> None:
        """One step without the answers: with the same gradient of all elements, or with one of some parameters."""
        worker.begin_step(self.options, 1)
        for index, info in enumerate(self.specification.parameters):
            if isinstance(gradient, float):
                worker.push(index, torch.full(info.shape, gradient, dtype=getattr(torch, info.dtype)))
            elif (own := gradient[index]) is not None:
                worker.push(index, own)
        worker.end_step()

    @property
    def options(self) -> list[dict[str, Any]]:
        """The hyper-parameters of a step."""
        return [dict(group.options) for group in self.specification.groups]

    def train(self, work: Callable[..., Any], *args: Any) -> list[Any]:
        """What all workers return at once; each is given what connects its parameters, its number and more."""
        for number in range(self.specification.workers):
            self._start(f"worker-{number}", partial(work, partial(self.connect, number), number, *args))
        names = [f"worker-{number}" for number in range(self.specification.workers)]
        running = names
        while running:  # One that fails is waited for by others.
            time.sleep(0.005)
            running = [who for who in names if self._threads[who].is_alive()]
            for who in names:
                assert who in running or who in self._results, f"{who} has failed"
        return [self._results[who] for who in names]

    def _start(self, who: str, run: Callable[[], Any]) -> None:
        def keep() -> None:
            try:
                self._results[who] = run()
            except BaseException:
                traceback.print_exc()

        self._threads[who] = threading.Thread(target=keep, name=who, daemon=True)
        self._threads[who].start()

    def __enter__(self) -> "Roles":
        return self

    def __exit__(self, *error: object) -> None:
        for number in list(self.servers):
            self.kill(number)
        for worker in self._workers:
            worker.close()


class PlainRoles(Roles):
    """Roles that train zeros.

    Attributes:
        parameters: The zeros.
        optimizer: Of the servers.
    """

    def __init__(
        self, directory: Path, sizes: tuple[int, ...] = (40,), workers: int = 1, encrypted: bool = False, **options: Any
    ) -> None:
        self.parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.5, momentum=0.5)
        named = [(str(number), parameter) for number, parameter in enumerate(self.parameters)]
        specification = Specification.of(named, self.optimizer, workers, **{"timeout": 60.0} | options)
        super().__init__(directory, specification, encrypted)

    @property
    def options(self) -> list[dict[str, Any]]:
        """The hyper-parameters of a step."""
        return hyperparameters(self.optimizer)


def join(workers: Sequence[Worker]) -> None:
    """Have workers train from now on, one after the other: all say first that they are there."""
    for worker in workers:
        worker.initialise()
        worker.meet()
    for worker in workers:
        worker.join()


def until(condition: Callable[[], object], timeout: float = 60) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + patience.at_most(timeout)
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.002)
