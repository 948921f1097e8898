"""Any message between workers and servers may be lost, and nobody waits for ever: they ask what the other holds."""

import random
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from roles import Roles, roles

from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.errors import ServersUnreachableError
from cnnstrategies.paramserver.messages import SERVER, Header, Kind
from cnnstrategies.paramserver.worker import worker as worker_role
from cnnstrategies.paramserver.worker.worker import Wait


class Wire:
    """Loses messages of workers that servers would act on, and all kinds that workers would.

    Args:
        run: The roles.
        loses: Whether a message of a kind is lost.
    """

    def __init__(self, run: Roles, loses: Callable[[Kind], bool]) -> None:
        self._loses = loses
        for server in run.servers.values():
            server.role.handlers.handle = self._lossy(server.role.handlers.handle)  # type: ignore[method-assign]

    def to(self, worker: Worker) -> None:
        worker._role.on_message = self._lossy(worker._role.on_message, at_worker=True)  # type: ignore[method-assign]

    def _lossy(self, handle: Callable[..., None], at_worker: bool = False) -> Callable[..., None]:
        def act(peer: int, header: Header, payload: memoryview) -> None:
            between_servers = header.sender >= SERVER and not at_worker
            if between_servers or not self._loses(header.kind):
                handle(peer, header, payload)

        return act


MODES: dict[str, dict[str, Any]] = {
    "sync": {}, "clipped": {"clip_norm": 100.0}, "async": {"mode": "async"}, "ssp": {"mode": "ssp", "staleness": 1},
}  # fmt: skip


def train(run: Roles, worker: Worker, steps: int) -> None:
    worker.join()
    for _ in range(steps):
        run.step(worker)


@pytest.mark.parametrize("mode", MODES)
def test_training_is_the_same_when_messages_are_lost(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any between a worker and a server: a fifth of them, and the first two of each kind."""
    monkeypatch.setattr(worker_role, "PROBE_SECONDS", 0.02)
    chance, left, lock = random.Random(0), dict.fromkeys(Kind, 2), threading.Lock()

    def loses(kind: Kind) -> bool:
        with lock:
            left[kind] -= 1
            return left[kind] >= 0 or chance.random() < 0.2

    with roles(tmp_path, (40, 30, 20), servers=2, slice_bytes=64, **MODES[mode]) as run:
        wire = Wire(run, loses)
        worker, values = run.worker()
        wire.to(worker)
        begun = {index: {"momentum_buffer": torch.full_like(value, 2.0)} for index, value in enumerate(values)}
        worker.initialise({**run.optimizer.state_dict(), "state": begun})
        train(run, worker, 6)
        state = worker.optimizer_state()
        worker.leave()
        (clock,) = {server.role.mode.clock.counts(0) for server in run.servers.values()}
    expected, momentum = 0.0, 2.0
    for _ in range(6):
        momentum = 0.5 * momentum + 1
        expected -= 0.5 * momentum
    for value in values:
        torch.testing.assert_close(value, torch.full_like(value, expected))
    for index, entry in state["state"].items():
        torch.testing.assert_close(entry["momentum_buffer"], torch.full_like(values[index], momentum))
    assert clock is False, "every server knows that it has left"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_server_that_learns_of_a_failover_after_the_worker(mode: str, tmp_path: Path) -> None:
    with roles(tmp_path, (40, 30), servers=2, replication=2, mode=mode) as run:
        worker, values = run.worker()
        worker.initialise()
        train(run, worker, 2)
        run.kill(0)
        after = replace(run.view, number=2, servers=run.view.servers[1:], lost=(0,))
        run.show("worker-0", after)
        told = threading.Event()

        def tell() -> None:
            told.set()
            run.show("server-1", after)

        late = threading.Timer(0.5, tell)
        late.start()
        run.step(worker)
        assert told.is_set(), "it cannot go on before"
        late.join()
    for value in values:
        torch.testing.assert_close(value, torch.full_like(value, -0.5 * (1 + 1.5 + 1.75)))


def test_servers_that_do_not_reach_each_other_are_named(tmp_path: Path) -> None:
    hole = socket.socket(socket.AF_UNIX)
    hole.bind(str(tmp_path / "hole"))
    hole.listen()
    with roles(tmp_path, servers=2, replication=2, mode="async", timeout=1.5) as run:
        there, elsewhere = run.view.servers
        deaf = replace(run.view, number=2, servers=(there, replace(elsewhere, endpoint=f"ipc://{tmp_path}/hole")))
        run.show("server-0", deaf)
        run.show("server-1", replace(run.view, number=2))
        worker, _ = run.worker(view=replace(run.view, number=2))
        worker.initialise()
        with pytest.raises(ServersUnreachableError, match=r"server 1 has heard nothing from server 0 for 3 s"):
            train(run, worker, 3)


def test_who_sends_for_long_is_not_taken_for_one_that_hears_nothing(tmp_path: Path) -> None:
    """As on a slow link that is full of gradients: what a server answers last of all it has not read yet."""
    with roles(tmp_path, timeout=4.0) as run:
        worker, _ = run.worker()
        worker.initialise()
        worker.join()
        connections = worker._role._connections
        handle = connections.send
        connections.send = lambda server, kind, *a, **k: 0 if kind == Kind.HELLO else handle(server, kind, *a, **k)  # type: ignore
        ends = time.monotonic() + 5.0

        def waiting() -> bool:
            return time.monotonic() < ends

        worker._wait(Wait(waiting, lambda: handle(0, Kind.VALUE)))  # Which no server answers.
