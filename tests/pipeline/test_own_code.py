"""Tests of what a network's own code does besides computing: it stores attributes, enters contexts, reads numbers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.division import Division
from tests.pipeline.stages_in_turn import train_in_stages

FACTOR = 1.0
SETTINGS: dict[str, Any] = {"shift": 0.0}


class Contexts(nn.Module):
    """A network that enters contexts, one of them inside another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.a(x)
            with torch.enable_grad():
                norm = self.b.weight.square().sum()
            x = x.tanh()
        x = self.b(x) * norm
        with torch.autocast("cpu", torch.bfloat16):
            x = self.c(x)
        result: Tensor = x.float() * 2
        return result


def test_contexts_of_the_networks_own_code_are_those_of_one_device() -> None:
    torch.manual_seed(0)
    network, images = Contexts(), torch.randn(2, 4)
    division = Division(network, ["b"])
    expected = network(images)
    expected.square().sum().backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in network.parameters()]
    network.zero_grad()
    assert torch.equal(train_in_stages(division, images), expected)
    assert gradients[0] is None
    for parameter, gradient in zip(network.parameters(), gradients, strict=True):
        assert gradient is parameter.grad is None or torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]
    with torch.no_grad():
        division.run(0, images)
        assert not torch.is_grad_enabled()
    for cut in ("a", "c"):
        with pytest.raises(ConfigurationError, match=f"cannot be cut after '{cut}'"):
            Division(network, [cut])


def test_an_error_leaves_the_contexts_that_a_stage_has_entered() -> None:
    network = Contexts()
    division = Division(network, ["b"])
    with pytest.raises(RuntimeError):
        division.run(0, torch.ones(2, 3))
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


class Keeping(nn.Module):
    """A network that keeps what it computes in attributes, and uses an attribute again."""

    kept: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.uses_last = False

    def forward(self, x: Tensor) -> Tensor:
        if self.uses_last and self.kept is not None:
            x = x + self.kept
        self.kept = self.a(x)
        self.maps = [x]
        self.maps.append(self.b(self.kept))
        self.described = {"shape": x.shape, "norm": (self.kept.norm(), 2)}
        result: Tensor = self.maps[-1] * 2
        return result


def test_the_networks_own_code_may_store_what_it_computes() -> None:
    torch.manual_seed(0)
    network, images = Keeping(), torch.randn(2, 4)
    division = Division(network, ["a"])
    graphs = division.graphs()
    assert network.kept is None
    for _ in range(2):
        train_in_stages(division, images)
    assert torch.equal(network.kept, network.a(images))
    assert torch.equal(network.maps[1], network.b(network.kept))
    assert network.described["shape"] == images.shape
    assert torch.equal(network.described["norm"][0], network.kept.norm())
    assert division.graphs() is graphs, "new values are not a reason for a new trace"
    network.uses_last = True
    with pytest.raises(ConfigurationError, match="changes the attribute 'kept'"):
        division.run(0, images)


class Reading(nn.Module):
    """A network that reads numbers from a global variable, its class, an object, a closure, and another module."""

    level = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.strength = 1.0
        self.settings = SimpleNamespace(a=SimpleNamespace(b=SimpleNamespace(c=1.0)))

    @property
    def doubled(self) -> float:
        return 2 * self.level

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.settings.a.b.c + SETTINGS["shift"]

    def forward(self, x: Tensor) -> Tensor:
        x = self.scaled(self.a(x) * FACTOR)
        result: Tensor = self.b(x) * self.b.strength * self.level + self.doubled
        return result


def test_numbers_that_the_networks_own_code_reads_stay_live(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    network, images = Reading(), torch.randn(2, 4)
    division = Division(network, ["a"])

    graphs = {id(division.graphs()): division.graphs()}

    def check() -> None:
        torch.testing.assert_close(train_in_stages(division, images), network(images))
        graphs[id(division.graphs())] = division.graphs()

    check()
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    check()
    monkeypatch.setitem(SETTINGS, "shift", 0.5)
    check()
    network.settings.a.b.c = 2.0
    check()
    monkeypatch.setattr(Reading, "level", 4.0)
    check()
    network.level = 5.0
    check()
    network.b.strength = 0.5
    check()
    assert len(graphs) == 7


class Aliases(nn.Module):
    """A network that changes a view in place, and uses the tensor of which it is a view afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        view = x.reshape(-1)
        y = self.b(x.tanh())
        view.mul_(2)
        result: Tensor = self.c(y + x)
        return result


def test_a_cut_does_not_separate_a_view_from_its_change() -> None:
    torch.manual_seed(0)
    network, images = Aliases(), torch.randn(2, 4)
    for cut in ("a", "reshape", "tanh", "b"):
        with pytest.raises(ConfigurationError, match=f"cannot be cut after '{cut}'"):
            Division(network, [cut])
    torch.testing.assert_close(train_in_stages(Division(network, ["mul_"]), images), network(images))
