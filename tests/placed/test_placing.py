"""Modules whose tensors cannot simply become foreign: they train as on one device, or are refused unchanged."""

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.placed import ForeignTensor, Places
from cnnstrategies.placed.placing import place_tensors
from tests.placed.placements import compare
from tests.placed.turns import on_ranks, outcomes

AT = [(0,), (1,)]


class Recurrent(nn.Module):
    """A layer that has weak references to its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(4, 4)
        self.decoder.weight = self.encoder.weight
        self.alias = self.encoder.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x).relu()) + self.alias


def pruned() -> nn.Module:
    layer = nn.Linear(4, 4)
    prune.l1_unstructured(layer, "weight", 0.3)
    prune.random_structured(layer, "weight", 0.3, 0)
    return layer


def old(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return norm(nn.Linear(4, 4))


MAKE: list[Callable[[], nn.Module]] = [
    Recurrent,
    Tied,
    pruned,
    lambda: old(nn.utils.weight_norm),
    lambda: old(nn.utils.spectral_norm),
    lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
    lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(make() for make in MAKE)).double()


def place(places: Places, module: nn.Module) -> None:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    place_tensors(places, module, [(name, AT[int(name[0]) % 2], tensor) for name, tensor in tensors])


def train(places: Places | None = None) -> Any:
    module = network()
    cycle: dict[Any, Any] = {module[3].weight: 0}  # Garbage that refers to a derived weight, such as a tracer.
    cycle["itself"] = cycle
    del cycle
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    before = list(module.parameters())
    if places is not None:
        place(places, module)
        foreign = {name[0] for name, tensor in module.named_parameters() if isinstance(tensor, ForeignTensor)}
        assert foreign == {"1", "3", "5", "7"} if places.rank == 0 else {"0", "2", "4", "6"}
        assert isinstance(module[3].weight, ForeignTensor) == (places.rank == 0)
    results: list[Any] = []
    for step in range(2):
        results += [module[index].weight.detach().norm() for index in range(2, 8)]
        optimizer.zero_grad()
        loss = module(torch.arange(24.0, dtype=torch.float64).reshape(2, 3, 4).sin() + step).square().mean()
        loss.backward()
        optimizer.step()
        results.append(loss.item())
    assert all(now is then for now, then in zip(module.parameters(), before, strict=True))
    module.eval()
    results += [module[index].weight.detach().norm().item() for index in range(2, 8)]
    return [*results, *module.parameters(), *module.buffers()]


@pytest.mark.light
def test_layers_with_weak_references_and_derived_weights_train_as_on_one_device() -> None:
    expected = train()
    on_ranks(2, lambda places: compare(places, train(places), expected))


@pytest.mark.light
def test_a_graph_that_was_recorded_before_a_parameter_became_foreign_is_refused() -> None:
    def on_rank(places: Places) -> None:
        layer = nn.LSTM(2, 2)
        loss = sum(parameter.sum() for parameter in layer.parameters())
        place_tensors(places, layer, [(name, (1,), parameter) for name, parameter in layer.named_parameters()])
        if places.rank == 0:
            with pytest.raises(RuntimeError, match="a graph that was recorded before a parameter became foreign"):
                loss.backward()  # type: ignore[union-attr]

    on_ranks(2, on_rank)


def kept_view(module: nn.Module) -> Any:
    return module[1].weight.detach().view(-1)


def kept_base(module: nn.Module) -> Any:
    table = torch.arange(12).reshape(3, 4).contiguous()
    module[1].register_buffer("table", table.flatten())
    return table


def kept_graph(module: nn.Module) -> Any:
    return module(torch.ones(2, 4, dtype=torch.float64)).square().sum()


def computed_buffer(module: nn.Module) -> Any:
    module[1].register_buffer("norm", module[1].weight.norm())


def memory_of_another_stage(module: nn.Module) -> Any:
    module[1].weight.data = module[0].weight.data


def attribute_of_two_stages(module: nn.Module) -> Any:
    module.total = module[0].weight.sum() + module[1].weight.sum()


REFUSED = {
    kept_base: r"1.table shares its memory with a tensor .*: compute views of parameters where they are used",
    kept_view: r"\d.weight shares its memory with a tensor .*: compute views of parameters where they are used",
    kept_graph: r"\d.weight is still used by the autograd graph of a result .*: delete the result or .*no_grad",
    computed_buffer: r"the buffer 1.norm was computed from parameters: register its value, 1.norm.detach\(\)",
    memory_of_another_stage: "0.weight and 1.weight share their memory, but are in different stages: choose other cuts",
    attribute_of_two_stages: r"total is a tensor that was computed from [01].weight and [01].weight, which are in diff",
}


@pytest.mark.light
@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_what_cannot_become_foreign_is_refused_on_all_ranks_before_a_tensor_has_changed(change: Any) -> None:
    def on_rank(places: Places) -> None:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
        kept = change(module)
        state = copy.deepcopy([tensor.detach() for tensor in module.state_dict().values()])
        try:
            place(places, module)
        finally:
            assert not any(isinstance(tensor, ForeignTensor) for tensor in module.state_dict().values())
            assert all(map(torch.equal, module.state_dict().values(), state))
            del kept

    _, errors = outcomes(2, on_rank)
    texts = [str(error) for error in errors if isinstance(error, ConfigurationError)]
    assert len(texts) == 2, errors
    assert texts[0] == texts[1]
    assert re.search(REFUSED[change], texts[0]), texts[0]


@pytest.mark.light
def test_refused_tensors_keep_the_values_of_derived_attributes() -> None:
    def on_rank(places: Places) -> Tensor:
        module = nn.Sequential(old(nn.utils.weight_norm), nn.Linear(4, 4))
        expected = module[0].weight.detach().clone()
        kept = module[1].weight.view(-1)
        with pytest.raises(ConfigurationError, match=r"1\.weight"):
            place(places, module)
        assert torch.equal(module[0].weight, expected)
        return kept.sum()

    on_ranks(2, on_rank)


@pytest.mark.light
def test_a_view_of_a_tensor_that_no_variable_holds_becomes_foreign() -> None:
    def on_rank(places: Places) -> None:
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
        module[1].register_buffer("table", torch.arange(12).clone().view(3, 4).flatten())
        place(places, module)
        assert isinstance(module[1].table, ForeignTensor) == (places.rank == 0)

    on_ranks(2, on_rank)
