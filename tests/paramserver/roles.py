"""Servers as threads and workers in the test's own process: a fault is played where it happens, and costs no start."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.core.view import ServerInfo, View, WorkerInfo
from cnnstrategies.paramserver.drivers.server import ServerService
from cnnstrategies.paramserver.file_views import FileViews
from cnnstrategies.paramserver.specification import Specification, hyperparameters


class Roles:
    """Some servers, each with a file of views of its own, and workers with theirs.

    Args:
        directory: For sockets and views.
        parameters: Sizes of the parameters, all zeros.
        workers: How many the views name.
        options: Of the specification.
    """

    def __init__(self, directory: Path, parameters: tuple[int, ...] = (40,), workers: int = 1, **options: Any) -> None:
        self.directory = directory
        self.parameters = [nn.Parameter(torch.zeros(size)) for size in parameters]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.5, momentum=0.5)
        named = [(str(number), parameter) for number, parameter in enumerate(self.parameters)]
        options = {"timeout": 60.0} | options
        self._open(Specification.of(named, self.optimizer, workers, **options))

    def _open(self, specification: Specification) -> None:
        self.specification = specification
        self.servers: dict[int, ServerService] = {}
        self.threads: dict[int, threading.Thread] = {}
        self.workers: list[Worker] = []
        infos = tuple(ServerInfo(one, f"ipc://{self.directory}/{one}") for one in range(specification.servers))
        self.view = View(1, infos, tuple(WorkerInfo(number) for number in range(specification.workers)))
        for number in range(self.specification.servers):
            self.show(f"server-{number}", self.view)
            self.serve(number)

    def views(self, who: str) -> FileViews:
        """What one role is told."""
        return FileViews(self.directory / who)

    def show(self, who: str, view: View) -> None:
        """Tell one role of a view."""
        self.views(who).publish(view)

    def serve(self, number: int) -> None:
        """Start a server."""
        server = ServerService(
            self.specification, self.views(f"server-{number}"), number, f"ipc://{self.directory}/{number}"
        )
        self.servers[number] = server
        self.threads[number] = threading.Thread(target=server.run, daemon=True)
        self.threads[number].start()

    def kill(self, number: int) -> None:
        """Have a server answer no more."""
        self.servers[number].stop()
        self.threads[number].join()

    def worker(self, number: int = 0, view: View | None = None) -> tuple[Worker, list[Tensor]]:
        """A worker, and its parameters."""
        self.show(f"worker-{number}", self.view if view is None else view)
        values = [parameter.detach().clone() for parameter in self.parameters]
        self.workers.append(Worker(self.specification, values, self.views(f"worker-{number}"), number))
        return self.workers[-1], values

    def step(self, worker: Worker, gradient: float = 1.0) -> None:
        """One step, to its end."""
        worker.begin_step(hyperparameters(self.optimizer), 1)
        for index, parameter in enumerate(self.parameters):
            worker.push(index, torch.full_like(parameter.data, gradient))
        worker.end_step()
        worker.wait_all()

    def close(self) -> None:
        """End all of them."""
        for number in self.servers:
            self.kill(number)
        for worker in self.workers:
            worker.close()


@contextlib.contextmanager
def roles(directory: Path, *args: Any, **options: Any) -> Iterator[Roles]:
    """Roles that end with the test."""
    made = Roles(directory, *args, **options)
    try:
        yield made
    finally:
        made.close()
