"""Any message between workers and servers may be lost, and nobody waits for ever: they ask what the other holds."""

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from roles import PlainRoles, Roles

from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.messages import SERVER, Header, Kind
from cnnstrategies.paramserver.worker import worker as worker_role
from cnnstrategies.paramserver.worker.worker import Wait


class Wire:
    """Loses messages of workers that servers would act on, and all kinds that workers would."""

    def __init__(self, run: Roles, loses: Callable[[Kind], bool]) -> None:
        self._loses = loses
        for server in run.servers.values():
            server.role.handle = self._lossy(server.role.handle)  # type: ignore[method-assign]

    def to(self, worker: Worker) -> None:
        worker.role.on_message = self._lossy(worker.role.on_message, at_worker=True)  # type: ignore[method-assign]

    def _lossy(self, handle: Callable[..., None], at_worker: bool = False) -> Callable[..., None]:
        def act(peer: int, header: Header, payload: memoryview) -> None:
            between_servers = header.sender >= SERVER and not at_worker
            if between_servers or not self._loses(header.kind):
                handle(peer, header, payload)

        return act


def test_training_is_the_same_when_messages_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any between a worker and a server: a fifth of them, and the first two of each kind."""
    monkeypatch.setattr(worker_role, "PROBE_SECONDS", 0.02)
    chance, left, lock = random.Random(0), dict.fromkeys(Kind, 2), threading.Lock()

    def loses(kind: Kind) -> bool:
        with lock:
            left[kind] -= 1
            return left[kind] >= 0 or chance.random() < 0.2

    with PlainRoles(tmp_path, (40, 30, 20), servers=2, slice_bytes=64, clip_norm=100.0) as run:
        wire = Wire(run, loses)
        worker, values = run.worker()
        wire.to(worker)
        begun = {index: {"momentum_buffer": torch.full_like(value, 2.0)} for index, value in enumerate(values)}
        worker.initialise({**run.optimizer.state_dict(), "state": begun})
        worker.join()
        for _ in range(6):
            run.step(worker)
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


def test_who_sends_for_long_is_not_taken_for_deaf(tmp_path: Path) -> None:
    """As on a slow link that is full of gradients: what a server answers last of all it has not read yet."""
    with PlainRoles(tmp_path, timeout=2.0) as run:
        worker, _ = run.joined()
        connections = worker.role.connections
        handle = connections.send
        connections.send = lambda server, kind, *a, **k: 0 if kind == Kind.HELLO else handle(server, kind, *a, **k)  # type: ignore
        ends = time.monotonic() + 3.0

        def waiting() -> bool:
            return time.monotonic() < ends

        worker.wait_for(Wait(waiting, lambda: handle(0, Kind.VALUE)))  # Which no server answers.
