"""A worker's side: pushes overlap with backward, each layer waits for its own values, and what cannot be is refused."""

import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from roles import PlainRoles, Roles, join
from torch import Tensor, nn

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.specification import Specification
from cnnstrategies.strategies import ParameterServerStrategy

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


@pytest.mark.light
def test_parameters_and_gradients_of_another_type_are_refused(tmp_path: Path) -> None:
    """Servers drop what does not fit, and a step that waits for it would never end."""
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    specification = Specification.of([("scale", parameter)], torch.optim.SGD([parameter], lr=0.1), 1)

    with Roles(tmp_path, specification) as run:
        with pytest.raises(ConfigurationError, match=r"float32.*float64.*give the parameters that it was made from"):
            run.connect(0, [torch.zeros(3)])
        worker, _ = run.joined()
        worker.begin_step(run.options, 1)
        for gradient in (torch.ones(3), torch.ones(2, dtype=torch.float64)):
            with pytest.raises(ConfigurationError, match=r"scale is torch\.float64 of shape \(3,\), its gradient"):
                worker.push(0, gradient)


def test_the_timeout_reaches_the_servers() -> None:
    module = LightningModule()
    module.weight = torch.nn.Parameter(torch.zeros(3))
    options = ParameterServerStrategy(timeout=7.0).options
    assert options.specification(module, torch.optim.SGD([module.weight], lr=0.1), 1, 2).timeout == 7


def test_a_refused_learning_rate_is_an_error_at_its_worker(tmp_path: Path) -> None:
    with PlainRoles(tmp_path) as run:
        worker, _ = run.joined()
        run.step(worker)
        for rate in (float("nan"), float("inf"), 1e300):
            run.optimizer.param_groups[0]["lr"] = rate
            with pytest.raises(ConfigurationError, match=r"step 1: lr=.* of parameter group 0"):
                run.step(worker)
        run.optimizer.param_groups[0]["lr"] = 0.1
        run.step(worker)
