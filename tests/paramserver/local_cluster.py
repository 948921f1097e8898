"""Servers and workers as forked processes, which learn of each other from a file."""

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.core.view import ServerInfo, View, WorkerInfo
from cnnstrategies.paramserver.drivers.server import ServerService
from cnnstrategies.paramserver.file_views import FileViews
from cnnstrategies.paramserver.security import KeyPair
from cnnstrategies.paramserver.specification import Specification

_context = multiprocessing.get_context("fork")


class Cluster:
    """`with Cluster(specification, directory) as cluster: cluster.start_workers(...); cluster.results()`."""

    def __init__(
        self, specification: Specification, directory: Path, encrypted: bool = False, workers: int | None = None
    ) -> None:
        self.specification = specification
        self.directory = directory
        self.views = FileViews(directory / "view.json")
        self.keys: dict[str, KeyPair] = {}
        self._encrypted = encrypted
        self.servers: dict[int, BaseProcess] = {}
        self.workers: dict[int, BaseProcess] = {}
        count = specification.workers if workers is None else workers
        self.view = View(0, (), tuple(WorkerInfo(w, 0, self._public(f"worker-{w}")) for w in range(count)))
        self._complete = False  # Every server has come once.
        for server in range(specification.servers):
            self.start_server(server)
        self._complete = True

    def _public(self, name: str) -> str:
        if not self._encrypted:
            return ""
        self.keys[name] = KeyPair.create()
        return self.keys[name].public

    def publish(self, **changes: Any) -> None:
        values = {"servers": self.view.servers, "workers": self.view.workers, **changes}
        gone = set(range(self.specification.servers)) - {info.id for info in values["servers"]}
        if self._complete and len(gone) < self.specification.replication:
            values["lost"] = tuple(sorted(gone))
        self.view = View(self.view.number + 1, **values)
        self.views.publish(self.view)

    def start_server(self, server: int) -> None:
        """Starts a server and puts it into the view; of an id that was there before, as another process."""
        endpoint = f"ipc://{self.directory}/server-{server}-{self.view.number}"
        public = self._public(f"server-{server}")
        args = (self.specification, self.directory, server, endpoint, self.keys.get(f"server-{server}"))
        self.servers[server] = _context.Process(target=_serve, args=args)
        self.servers[server].start()
        others = tuple(info for info in self.view.servers if info.id != server)
        self.publish(servers=(*others, ServerInfo(server, endpoint, public, self.view.number + 1)))

    def is_filled(self, server: int) -> bool:
        """Whether a server has a value of each of its slices, since it was last started."""
        (endpoint,) = (info.endpoint for info in self.view.servers if info.id == server)
        return _sign_of_filled(endpoint).exists()

    def start_worker(self, worker: int, function: Callable[..., Any], *args: Any, incarnation: int = 0) -> None:
        name = f"worker-{worker}"
        everything = (self, worker, incarnation, self.keys.get(name), function, args)
        self.workers[worker] = _context.Process(target=_work, args=everything)
        self.workers[worker].start()

    def start_workers(self, function: Callable[..., Any], *args: Any) -> None:
        for worker in range(self.specification.workers):
            self.start_worker(worker, function, *args)

    def result(self, worker: int, timeout: float = 150) -> Any:
        self.workers[worker].join(timeout)
        path = self.directory / f"result-{worker}"
        code = self.workers[worker].exitcode
        assert path.exists(), f"worker {worker} gave no result within {timeout} s, exit code {code}"
        result = torch.load(path, weights_only=False)
        assert not isinstance(result, BaseException), f"worker {worker}: {result}"
        return result

    def results(self, timeout: float = 150) -> list[Any]:
        return [self.result(worker, timeout) for worker in sorted(self.workers)]

    def kill(self, process: BaseProcess) -> None:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()

    def without_server(self, server: int) -> None:
        self.publish(servers=tuple(info for info in self.view.servers if info.id != server))

    def without_worker(self, worker: int) -> None:
        self.publish(workers=tuple(info for info in self.view.workers if info.id != worker))

    def with_worker(self, worker: int, incarnation: int = 0) -> None:
        others = tuple(info for info in self.view.workers if info.id != worker)
        self.publish(workers=(*others, WorkerInfo(worker, incarnation, self._public(f"worker-{worker}"))))

    def server_report(self, server: int) -> Any:
        """What a server that was stopped saw: its log of clocks, drops and lost updates."""
        os.kill(self.servers[server].pid or 0, signal.SIGTERM)
        self.servers[server].join(60)
        return torch.load(self.directory / f"report-{server}", weights_only=False)

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes():
            if process.is_alive():
                self.kill(process)

    def _processes(self) -> Iterable[BaseProcess]:
        return [*self.servers.values(), *self.workers.values()]


def _serve(specification: Specification, directory: Path, id: int, endpoint: str, keys: KeyPair | None) -> None:
    torch.set_num_threads(1)
    views = FileViews(directory / "view.json")
    views.wait_newer(0, 60)
    server = ServerService(specification, views, id, endpoint, keys)
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    threading.Thread(target=_tell_when_filled, args=(server, endpoint), daemon=True).start()
    server.run()
    report = {"log": server.log, "dropped": dict(server.dropped), "lost": server.lost_updates}
    torch.save(report, directory / f"report-{id}")


def _tell_when_filled(server: ServerService, endpoint: str) -> None:
    while any(version < 0 for version in list(server.role.shard.store.versions.values())):
        time.sleep(0.005)
    _sign_of_filled(endpoint).touch()


def _sign_of_filled(endpoint: str) -> Path:
    return Path(f"{endpoint.removeprefix('ipc://')}.filled")


def _work(
    cluster: Cluster, id: int, incarnation: int, keys: KeyPair | None, function: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    views = FileViews(cluster.directory / "view.json")

    def connect(parameters: list[torch.Tensor]) -> Worker:
        return Worker(cluster.specification, parameters, views, id, incarnation, keys)

    try:
        result = function(connect, id, *args)
    except BaseException as error:
        result = error
        traceback.print_exc()
    scratch = cluster.directory / f"result-{id}.new"
    torch.save(result, scratch)
    scratch.replace(cluster.directory / f"result-{id}")


def wait_for(path: Path, timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.002)
