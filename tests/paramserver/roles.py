"""Servers and workers as threads of the test's process, so that a fault does not cost the start of a process."""

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.core.view import ServerInfo, View, WorkerInfo
from cnnstrategies.paramserver.drivers.server import ServerService
from cnnstrategies.paramserver.membership import Views
from cnnstrategies.paramserver.security import KeyPair
from cnnstrategies.paramserver.specification import Specification, hyperparameters
from tests.runner import patience

INVALID_FIELDS = "missing or invalid fields"  # end of the reason for which a server drops a malformed message


class Roles:
    """Servers and workers that receive their views from the test.

    Attributes:
        servers: The living servers, by id.
        view: The last view that all processes were shown.
        keys: Key pairs, by role and id.
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
        servers = tuple(
            ServerInfo(number, f"ipc://{directory}/{number}", self._public(f"server-{number}")) for number in numbers
        )
        workers = tuple(
            WorkerInfo(number, 0, self._public(f"worker-{number}")) for number in range(specification.workers)
        )
        self.view = View(1, servers, workers)
        for number in numbers:
            self.serve(number)

    def _public(self, role: str) -> str:
        if not self._encrypted:
            return ""
        return self.keys.setdefault(role, KeyPair.create()).public

    # Membership

    def views(self, role: str) -> Views:
        """Return the views that one role receives."""
        views = Views(lambda: (self._shown.get(role, View(-1, (), ())), None), lambda: None)
        self._views.append((role, views))
        return views

    def show(self, role: str, view: View) -> None:
        """Show a view to one role."""
        self._shown[role] = view
        for listens, views in self._views:
            if listens == role:
                views.ring()

    def publish(self, **changes: Any) -> None:
        """Show all roles a new view. Servers that the view leaves out count as lost if their slices have backups."""
        view = replace(self.view, number=self.view.number + 1, **changes)
        gone = set(range(self.specification.servers)) - {info.id for info in view.servers}
        lost = tuple(sorted(gone)) if len(gone) < self.specification.replication else ()
        self.view = replace(view, lost=lost)
        for role in list(self._shown):
            self.show(role, self.view)

    def lose(self, number: int) -> None:
        """Kill a server and tell all roles."""
        self.kill(number)
        self.publish(servers=tuple(info for info in self.view.servers if info.id != number))

    def with_worker(self, number: int) -> None:
        """Show all roles a view with another worker."""
        self.publish(workers=(*self.view.workers, WorkerInfo(number, 0, self._public(f"worker-{number}"))))

    # Servers

    def serve(self, number: int) -> None:
        """Start a server that the view names."""
        role = f"server-{number}"
        self.show(role, self.view)
        (endpoint,) = (info.endpoint for info in self.view.servers if info.id == number)
        server = ServerService(self.specification, self.views(role), number, endpoint, self.keys.get(role))
        self.servers[number] = server
        self._start(role, server.run)

    def kill(self, number: int) -> None:
        """Stop a server."""
        self.servers.pop(number).stop()
        self._threads.pop(f"server-{number}").join()

    def replace_server(self, number: int) -> None:
        """Replace a dead server with a new server and tell all roles."""
        since = self.view.number + 1
        others = tuple(info for info in self.view.servers if info.id != number)
        endpoint, public = f"ipc://{self.directory}/{number}-{since}", self._public(f"server-{number}")
        self.publish(servers=(*others, ServerInfo(number, endpoint, public, since)))
        self.serve(number)

    # Workers

    def connect(self, number: int, values: Sequence[Tensor], incarnation: int = 0, **more: Any) -> Worker:
        """Return a worker that trains the given values."""
        role = f"worker-{number}"
        self.show(role, self.view)
        worker = Worker(self.specification, values, self.views(role), number, incarnation, self.keys.get(role), **more)
        self._workers.append(worker)
        return worker

    def worker(self, number: int = 0) -> tuple[Worker, list[Tensor]]:
        """Return a worker and its parameters, which are zeros."""
        infos = self.specification.parameters
        values = [torch.zeros(info.shape, dtype=getattr(torch, info.dtype)) for info in infos]
        return self.connect(number, values), values

    def joined(self) -> tuple[Worker, list[Tensor]]:
        """Return a worker that has joined as the only worker, and its parameters."""
        worker, values = self.worker()
        join([worker])
        return worker, values

    def all_joined(self) -> list[tuple[Worker, list[Tensor]]]:
        """Return all workers, which have joined, each with its parameters."""
        workers = [self.worker(number) for number in range(self.specification.workers)]
        join([worker for worker, _ in workers])
        return workers

    def step(self, worker: Worker, gradient: float | Sequence[Tensor | None] = 1.0) -> None:
        """Make a step and wait for all values."""
        self.begin(worker, gradient)
        worker.wait_all()

    def begin(self, worker: Worker, gradient: float | Sequence[Tensor | None] = 1.0) -> None:
        """Push the gradients of a step without waiting for values.

        Args:
            gradient: The gradient of every element, or one tensor for each parameter, None for no gradient.
        """
        worker.begin_step(self.options, 1)
        for index, info in enumerate(self.specification.parameters):
            if isinstance(gradient, float):
                worker.push(index, torch.full(info.shape, gradient, dtype=getattr(torch, info.dtype)))
            elif (tensor := gradient[index]) is not None:
                worker.push(index, tensor)
        worker.end_step()

    @property
    def options(self) -> list[dict[str, Any]]:
        """Hyperparameters of a step, one dictionary for each parameter group."""
        return [dict(group.options) for group in self.specification.groups]

    def train(self, work: Callable[..., Any], *args: Any) -> list[Any]:
        """Run a function in one thread for each worker, and return the results in the order of the workers.

        Args:
            work: Called with a function that connects the worker's parameters, the worker's id, and `args`.
        """
        for number in range(self.specification.workers):
            self._start(f"worker-{number}", partial(work, partial(self.connect, number), number, *args))
        names = [f"worker-{number}" for number in range(self.specification.workers)]
        running = names
        while running:  # The threads are polled, because the other workers would wait for a failed worker.
            time.sleep(0.005)
            running = [name for name in names if self._threads[name].is_alive()]
            for name in names:
                assert name in running or name in self._results, f"{name} has failed"
        return [self._results[name] for name in names]

    def _start(self, role: str, run: Callable[[], Any]) -> None:
        def keep() -> None:
            try:
                self._results[role] = run()
            except BaseException:
                traceback.print_exc()

        self._threads[role] = threading.Thread(target=keep, name=role, daemon=True)
        self._threads[role].start()

    def __enter__(self) -> "Roles":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        roles = [server.role for server in self.servers.values()]
        for number in list(self.servers):
            self.kill(number)
        for worker in self._workers:
            worker.close()
        # No correct member sends a message with invalid fields. Tests that forge messages read `dropped` themselves.
        refused = [reason for role in roles for reason in role.dropped if reason.endswith(INVALID_FIELDS)]
        assert kind is not None or not refused, refused


class PlainRoles(Roles):
    """Roles that train parameters that begin as zeros.

    Attributes:
        parameters: The initial parameters, zeros.
        optimizer: The optimizer that the servers use, here on `parameters`.
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
        """Hyperparameters of a step, one dictionary for each parameter group."""
        return hyperparameters(self.optimizer)


def join(workers: Sequence[Worker]) -> None:
    """Let workers join one after the other, after all have sent the servers their first hello."""
    for worker in workers:
        worker.initialise()
        worker.meet()
    for worker in workers:
        worker.join()


def until(condition: Callable[[], object], timeout: float = 60) -> None:
    """Wait until a condition holds.

    Raises:
        AssertionError: The condition does not hold after `timeout` seconds.
    """
    deadline = time.monotonic() + patience.at_most(timeout)
    while not condition():
        assert time.monotonic() < deadline, f"the condition does not hold after {timeout} s"
        time.sleep(0.002)
