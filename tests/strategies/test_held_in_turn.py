"""A network that is built in parts has the values of the whole, and never holds much more than its part."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies.hybrid_pipeline.own_stage import held_in_turn

pytestmark = pytest.mark.light


class Network(nn.Module):
    """Initialised in every way that draws: by the layers, again by its own code, and with rejected draws.

    Args:
        looked_at: What is called after each layer.
    """

    def __init__(self, looked_at: Callable[[nn.Module], None] = lambda made: None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(40, 1) * 0.1)
        self.layers = nn.Sequential()
        for make in (
            lambda: nn.Linear(30, 40),
            lambda: nn.Conv2d(3, 40, 5),
            lambda: nn.LSTM(20, 20),
            lambda: nn.utils.parametrizations.weight_norm(nn.Linear(40, 30)),
            lambda: nn.BatchNorm2d(40),
            lambda: nn.Linear(40, 40),
        ):
            self.layers.append(make())
            looked_at(self)
        self.layers.append(nn.Linear(40, 40))
        self.layers[-1].weight = self.layers[-2].weight
        for layer, init in zip(
            self.layers,
            (nn.init.trunc_normal_, nn.init.kaiming_normal_, None, None, None, nn.init.orthogonal_),
            strict=False,
        ):
            if init is not None:
                init(layer.weight)
                looked_at(self)
        nn.init.sparse_(self.layers[0].weight, 0.3)
        self.register_buffer("noise", torch.rand(3))


def built(make: Callable[[], nn.Module], own: Callable[[str], bool]) -> tuple[nn.Module, nn.Module]:
    """A network of which those are kept that are named, and a whole one that draws the same random numbers."""
    torch.manual_seed(3)
    whole = make()
    after = torch.get_rng_state()
    with held_in_turn() as planned:
        shapes = make()
    names = {id(parameter): name for name, parameter in shapes.named_parameters()}
    elsewhere = {number for number, one in enumerate(planned) if id(one) in names and not own(names[id(one)])}
    torch.manual_seed(3)
    with held_in_turn(elsewhere):
        part = make()
    assert torch.equal(torch.get_rng_state(), after), "the same numbers come next"
    return part, whole


@pytest.mark.parametrize("first", [True, False])
def test_what_is_kept_is_whole_and_the_rest_shape_alone(first: bool) -> None:
    part, whole = built(Network, lambda name: name.startswith(("layers.0", "layers.2", "layers.5")) == first)
    expected = dict(whole.named_parameters())
    kept = []
    for name, parameter in part.named_parameters():
        assert (parameter.shape, parameter.requires_grad) == (expected[name].shape, True)
        if not parameter.is_meta:
            kept.append(name)
            assert torch.equal(parameter, expected[name]), name
    assert kept == [name for name in expected if name.startswith(("layers.0", "layers.2", "layers.5")) == first]
    assert part.get_parameter("layers.5.weight") is part.get_parameter("layers.6.weight")
    assert torch.equal(part.get_buffer("noise"), whole.get_buffer("noise"))


def test_one_at_a_time_holds_memory_while_the_whole_is_built() -> None:
    held: list[int] = []

    def look(made: nn.Module) -> None:
        held.append(sum({id(s := one.untyped_storage()): s.nbytes() for one in made.parameters()}.values()))

    part, whole = built(lambda: Network(look), lambda name: name == "layers.1.bias")
    sizes = [one.nbytes for one in whole.parameters()]
    assert max(held[-9:]) <= max(sizes) + part.get_parameter("layers.1.bias").nbytes < sum(sizes) / 2


class Copied(nn.Module):
    """Its second layer begins as the first."""

    def __init__(self, way: Callable[[nn.Linear, nn.Linear], object]) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        with torch.no_grad():
            self.way = way(self.one, self.two)


def copied(one: nn.Linear, two: nn.Linear) -> Tensor:
    return two.weight.copy_(one.weight)


def scaled(one: nn.Linear, two: nn.Linear) -> Tensor:
    return two.weight.mul_(one.weight.norm())


def cloned(one: nn.Linear, two: nn.Linear) -> nn.Module:
    return copy.deepcopy(one)


@pytest.mark.parametrize("way", [copied, scaled, cloned])
def test_what_needs_values_that_are_gone_is_refused_by_name(way: Callable[[nn.Linear, nn.Linear], object]) -> None:
    with pytest.raises(ConfigurationError, match=r"Linear.weight is of another rank's stage.*in __init__"):
        built(lambda: Copied(way), lambda name: not name.startswith("one"))


def test_what_is_kept_of_a_checkpoint_is_read_alone() -> None:
    torch.manual_seed(4)
    saved = Network().state_dict()
    unreadable = {name: one if name.startswith("layers.1") else one.to("meta") for name, one in saved.items()}
    unreadable |= {name: saved[name] for name, _ in Network().named_buffers()}
    states = [saved, unreadable, unreadable]

    def make() -> nn.Module:
        network = Network()
        network.load_state_dict(states.pop(0))
        return network

    part, _ = built(make, lambda name: name.startswith("layers.1"))
    assert torch.equal(part.get_parameter("layers.1.weight"), saved["layers.1.weight"])
