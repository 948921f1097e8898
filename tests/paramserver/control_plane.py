"""A coordinator and members in forked processes, for the tests of the control plane; their time is virtual."""

import itertools
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from virtual_time import VirtualTime

from cnnstrategies.paramserver.collectives import Collectives
from cnnstrategies.paramserver.coordinator.settings import Address, CoordinatorSettings
from cnnstrategies.paramserver.drivers.coordinator import CoordinatorService
from cnnstrategies.paramserver.membership import Membership

_context = multiprocessing.get_context("fork")
APPEAR = 3600.0  # Virtual seconds may be short.


@dataclass
class Run:
    """One run: start members, kill them, see what they returned."""

    directory: Path
    workers: int = 2
    servers: int = 0
    timeout: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)
    endpoint: str = ""

    def __post_init__(self):
        self.endpoint = self.endpoint or f"ipc://{self.directory}/coordinator"
        self.processes = {}
        self.pipes = {}
        self.time = VirtualTime(self.timeout / 10)
        self._numbers = itertools.count()
        self.coordinator = self.coordinate()

    def coordinate(self, term=0):
        options = {"appear": APPEAR, **self.options}
        settings = CoordinatorSettings(self.endpoint, self.workers, self.servers, self.timeout, term=term, **options)
        return self._fork(("coordinator", term), lambda: CoordinatorService(settings).run())

    def address(self, role, identity, incarnation=0):
        session = self.options.get("session", 0)
        times = self.timeout / 10, self.timeout, APPEAR
        return Address(self.endpoint, role, identity, incarnation, *times, session=session)

    def worker(self, identity, function: Callable[[Collectives], Any], incarnation=0):
        def main():
            membership = Membership(self.address("worker", identity, incarnation))
            collectives = Collectives(membership)
            result = function(collectives)
            membership.close()
            return result

        return self._fork(("worker", identity, incarnation), main)

    def server(self, identity, incarnation=0, see=True):
        def main():
            membership = Membership(self.address("server", identity, incarnation), endpoint=f"ipc://{identity}")
            while not see and membership.participant.view is None:
                time.sleep(0.01)
            Path(f"server-{identity}-is-there").touch()
            number = -1
            while True:
                number = membership.wait_newer(number, 1000).number if see else time.sleep(1000)

        return self._fork(("server", identity, incarnation), main)

    def result(self, *key, timeout=60.0):
        pipe, process = self.pipes[key], self.processes[key]
        assert pipe.poll(timeout), f"{key} gave no answer"
        state, value = pipe.recv()
        process.join(30)
        return value if state == "ok" else f"{state}: {value}"

    def kill(self, *key, how=signal.SIGKILL):
        os.kill(self.processes[key].pid, how)

    def close(self):
        for process in self.processes.values():
            process.kill()
            process.join()
        self.time.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _fork(self, key, function):
        receiver, sender = _context.Pipe(duplex=False)
        number = next(self._numbers)

        def main():
            torch.set_num_threads(1)
            self.time.use(number)
            try:
                sender.send(("ok", function()))
            except BaseException as error:
                name = type(error).__name__
                sender.send((name, str(error) if name == "RunEnded" else traceback.format_exc()))

        process = _context.Process(target=main)
        process.start()
        sender.close()
        self.processes[key], self.pipes[key] = process, receiver
        return process
