"""Tests of networks that are built while their parameters get places: values and draws are those of one process."""

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from cnnstrategies.placed import ForeignTensor, GlooLink, Places
from cnnstrategies.placed.registration import PlannedParameter, register_at_places
from tests.runner.ranks import run_ranks


class Initialised(nn.Module):
    """A network that draws random values in every way: in layers, again in its own code, and with rejected draws."""

    def __init__(self, look: Callable[[nn.Module], None]) -> None:
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
            look(self)
        self.layers.append(nn.Linear(40, 40))
        self.layers[-1].weight = self.layers[-2].weight
        nn.init.trunc_normal_(self.layers[0].weight)
        nn.init.kaiming_normal_(self.layers[1].weight)
        nn.init.orthogonal_(self.layers[5].weight)
        nn.init.sparse_(self.layers[0].weight, 0.3)
        self.register_buffer("noise", torch.rand(3))


class Copied(nn.Module):
    """A network that initialises its layers from each other, across stages."""

    def __init__(self, look: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(6))
        with torch.no_grad():
            self.layers[4].weight.copy_(self.layers[0].weight)
            self.layers[5].weight.mul_(self.layers[1].weight.norm())
        if self.layers[5].weight.sum() > 0:
            nn.init.zeros_(self.layers[1].bias)
        self.layers.append(copy.deepcopy(self.layers[0]))
        weights = torch.empty(5, 5)
        self.layers[2].weight = nn.Parameter(weights)
        nn.init.normal_(weights)
        look(self)


class Loaded(nn.Module):
    """A network with values from a checkpoint, of which one half cannot be read."""

    def __init__(self, look: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
        state = {name: torch.full(value.shape, 2.0) for name, value in self.state_dict().items()}
        is_whole = not any(isinstance(parameter, ForeignTensor) for parameter in self.parameters())
        real = {name for name, parameter in self.named_parameters() if not isinstance(parameter, ForeignTensor)}
        self.load_state_dict(
            {name: value if is_whole or name in real else unread(value) for name, value in state.items()}
        )
        look(self)


def unread(value: Tensor) -> Tensor:
    """Return a tensor of the same shape whose values cannot be read."""
    return torch.empty_like(value, device="meta")


def place_of(name: str) -> tuple[int, ...]:
    """Return the rank that has a parameter: rank 0 has every other layer."""
    return (0,) if name == "scale" or int(name.split(".")[1]) in (0, 2, 5, 6) else (1,)


def build(make: Callable[[Callable[[nn.Module], None]], nn.Module], places: Places) -> None:
    """Build a network as one process does, and with places, and compare both."""
    registered: list[nn.Parameter] = []
    handle = register_module_parameter_registration_hook(lambda module, name, parameter: registered.append(parameter))
    torch.manual_seed(3)
    whole = make(lambda network: None)
    after = torch.get_rng_state()
    handle.remove()
    names = {id(parameter): name for name, parameter in whole.named_parameters()}
    planned = [
        PlannedParameter(names[id(parameter)], place_of(names[id(parameter)])) if id(parameter) in names else None
        for parameter in registered
    ]
    held: set[tuple[int, ...]] = set()

    def look(network: nn.Module) -> None:
        real = [n for n, parameter in network.named_parameters() if not isinstance(parameter, ForeignTensor)]
        held.update(map(place_of, real))

    torch.manual_seed(3)
    with register_at_places(places, planned) as shapes:
        part = make(look)
        read = {name: places.everywhere(value.detach()) for name, value in part.state_dict(keep_vars=True).items()}
    assert torch.equal(torch.get_rng_state(), after), "both leave the random state the same"
    assert held == {(places.rank,)}, "no rank has had values of the other rank's parameters"
    assert shapes == [parameter.shape for parameter in registered]
    for name, value in whole.state_dict().items():
        assert torch.equal(read[name], value), name
    for name, parameter in part.named_parameters():
        assert (parameter.shape, parameter.requires_grad) == (whole.get_parameter(name).shape, True)
    if isinstance(part, Initialised):
        assert part.get_parameter("layers.5.weight") is part.get_parameter("layers.6.weight")


def build_all() -> None:
    group = dist.new_group([0, 1])
    places = Places(dist.get_rank(), 2, GlooLink(group, dist.get_rank(), 2))
    for make in (Initialised, Copied, Loaded):
        build(make, places)
    places.messages.close()


def test_parameters_get_the_values_of_one_process_on_their_own_ranks_only() -> None:
    run_ranks(2, build_all)
