"""A worker's side: pushes overlap with backward, each layer waits for its own values, and none waits for ever."""

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from roles import PlainRoles, Roles, join
from torch import Tensor, nn

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.messages import SERVER, Header, Kind
from cnnstrategies.paramserver.specification import Specification
from cnnstrategies.paramserver.worker import worker as worker_role
from cnnstrategies.paramserver.worker.worker import Wait

WIDTH, DEPTH = 512, 6


class Reversed(nn.Module):
    """Its layers are used in the reverse order of their definition."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


def test_a_forward_waits_for_its_layer_and_pulls_follow_use(tmp_path: Path) -> None:
    network = Reversed()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    specification = Specification.of(network.named_parameters(), optimizer, 1, slice_bytes=1 << 18, servers=2)
    with Roles(tmp_path, specification) as run:
        events: list[tuple[str, int, float]] = []

        def note(what: str, index: int) -> None:
            events.append((what, index, time.perf_counter()))

        def wait(index: int) -> None:
            worker.wait(index)
            note("wait", index)

        def push(index: int, parameter: Tensor) -> None:
            note("push", index)
            worker.push(index, parameter.grad)

        values = [p.data for p in network.parameters()]
        worker = run.connect(0, values, came=lambda index, value: note("arrived", index))
        for index, layer in enumerate(network.layers):
            layer.register_forward_pre_hook(lambda _module, _input, index=index: wait(index))
            layer.weight.register_post_accumulate_grad_hook(lambda p, index=index: push(index, p))
        join([worker])
        for _ in range(4):
            events.clear()
            optimizer.zero_grad()
            loss = network(torch.randn(256, WIDTH)).square().mean()
            worker.begin_step(run.options, 256)
            loss.backward()
            worker.end_step()
        step = list(events)
        worker.wait_all()
    counters = worker.counters
    use = list(reversed(range(DEPTH)))
    assert [index for what, index, _ in step if what == "wait"] == use
    assert [index for what, index, _ in step if what == "push"] == use[::-1], "pushed as backward gets to them"
    arrived = [index for what, index, _ in step if what == "arrived"]
    assert arrived[0] == use[0]
    misplaced = sum(abs(use.index(index) - place) for place, index in enumerate(arrived))
    assert misplaced <= 4, f"{arrived}: two servers may swap neighbours"
    at = {(what, index): time for what, index, time in step}
    assert at["wait", use[0]] < at["arrived", use[-1]], "the first layer ran while the last was on its way"
    assert counters.seconds_waited > 0
    assert counters.bytes_received > counters.steps * DEPTH * WIDTH * WIDTH * 4


def test_what_servers_would_drop_is_an_error_at_its_worker(tmp_path: Path) -> None:
    """A step that waits for it would never end."""
    with PlainRoles(tmp_path) as run:
        with pytest.raises(ConfigurationError, match=r"float64.*float32.*give the parameters that it was made from"):
            run.connect(0, [torch.zeros(40, dtype=torch.float64)])
        worker, _ = run.joined()
        run.step(worker)
        for rate in (float("nan"), float("inf"), 1e300):
            run.optimizer.param_groups[0]["lr"] = rate
            with pytest.raises(ConfigurationError, match=r"step 1: lr=.* of parameter group 0"):
                run.step(worker)
        run.optimizer.param_groups[0]["lr"] = 0.1
        worker.begin_step(run.options, 1)
        for gradient in (torch.ones(40, dtype=torch.float64), torch.ones(2)):
            with pytest.raises(ConfigurationError, match=r"0 is torch\.float32 of shape \(40,\), its gradient"):
                worker.push(0, gradient)
        worker.push(0, torch.ones(40))
        worker.end_step()
        worker.wait_all()


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
        (clock,) = {0 in server.role.mode.clock.known for server in run.servers.values()}
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
