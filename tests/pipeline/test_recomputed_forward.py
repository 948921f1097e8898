"""Activations that are computed again in one process: the results are those of training that keeps all activations."""

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from cnnstrategies._torch_private import OperationMode
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.division import Division
from cnnstrategies.pipeline.recomputed_forward import RecomputedForward
from tests.runner.ranks import run_apart

F64 = torch.float64
CUTS = ["0", "1", "2"]


class Renormalised(nn.BatchNorm2d):
    """A BatchNorm whose result depends on the running statistics, which it also updates."""

    def forward(self, images: Tensor) -> Tensor:
        mean = self.running_mean
        assert mean is not None
        return super().forward(images) + 0.1 * mean.detach().clone()[:, None, None]


class OwnNorm(nn.Module):
    """A layer that normalises by torch's kernel, which changes buffers without counting the writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("spread", torch.ones(4))

    def forward(self, images: Tensor) -> Tensor:
        shifted = images + self.average.clone()[:, None, None]
        return nn.functional.batch_norm(shifted, self.average, self.spread, training=True, momentum=0.3)


class Layer(nn.Module):
    """A layer that does everything that a second forward must not do twice."""

    def __init__(self, inputs: int, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm = nn.utils.parametrizations.spectral_norm(nn.Conv2d(inputs, 4, 3, padding=1)), norm
        self.calls, self.temperature = 0, 1.0
        self.inputs: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.norm(self.conv(x)), 0.3, self.training)
        x = torch.tanh(x * self.temperature) * random.uniform(0.8, 1.2)
        self.penalty = (x + 1.0).square().mean()
        self.calls += 1
        self.inputs.append(1.0)
        return x


class Changing(nn.Module):
    """A layer that changes its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.5)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    random.seed(0)
    average = nn.BatchNorm2d(4, momentum=None)
    frozen = nn.BatchNorm2d(4)
    network = nn.Sequential(
        Layer(3, nn.BatchNorm2d(4)),
        nn.Sequential(Changing(), Layer(4, average)),
        Layer(4, Renormalised(4)),
        nn.Sequential(Layer(4, OwnNorm()), frozen, nn.Flatten(), nn.Linear(64, 3)),
    )
    return network.double()


def train(wrap: Callable[[nn.Module], Any], twice: bool = False) -> list[Any]:
    """Train, and return everything that must not depend on how activations are kept."""
    network = make()
    layers = [module for module in network.modules() if isinstance(module, Layer)]
    wrap(network)
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    seen: list[float] = []
    result: list[Any] = []
    for _ in range(3):
        network.train()
        network[3][1].eval()
        images = torch.randn(6, 3, 4, 4, dtype=F64, generator=generator, requires_grad=True)
        handle = layers[1].register_forward_hook(lambda layer, inputs, output: seen.append(1.0) or output * 1.1)
        loss = network(images).square().mean() + sum(layer.penalty for layer in layers)
        if twice:
            loss = loss + network(images * 0.5).mean()
        handle.remove()
        # The program changes the modules between the forward and the backward.
        penalties = [layer.penalty.detach() for layer in layers]
        for layer in layers:
            layer.temperature = 3.0
        network.eval()
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        loss.backward()
        assert [layer.temperature for layer in layers] == [3.0] * 4
        assert not network.training
        assert all(torch.equal(layer.penalty, value) for layer, value in zip(layers, penalties, strict=True))
        result += [loss.detach(), images.grad, random.getstate(), torch.get_rng_state(), len(seen)]
        result += [parameter.grad for parameter in network.parameters()]
        optimizer.step()
        for layer in layers:
            layer.temperature = 1.0
            result += [layer.calls, len(layer.inputs)]
    result += [list(network.state_dict()), *network.state_dict().values()]
    return result


def recompute(network: nn.Module) -> RecomputedForward:
    return RecomputedForward(network, lambda: Division(network, CUTS), network)


def assert_same(values: list[Any], expected: list[Any]) -> None:
    for value, other in zip(values, expected, strict=True):
        if isinstance(value, Tensor):
            torch.testing.assert_close(value, other, rtol=1e-12, atol=1e-12)
        else:
            assert value == other


@pytest.mark.parametrize("twice", [False, True], ids=["one call", "two calls"])
def test_training_is_the_same_and_leaves_no_second_trace(twice: bool) -> None:
    def run() -> list[list[Any]]:
        return [train(wrap, twice) for wrap in (recompute, lambda network: None)]

    with_recomputation, plain = run_apart(run)
    assert_same(with_recomputation, plain)


class Live(OperationMode):
    """Mode that knows the most bytes of tensors that were in memory at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: WeakSet[Any] = WeakSet()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.storages.update(leaf.untyped_storage() for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        self.most = max(self.most, sum(storage.nbytes() for storage in self.storages))
        return result


def test_only_values_between_segments_and_one_segment_are_in_memory() -> None:
    def run() -> list[tuple[int, int]]:
        sizes = []
        for cuts in ([], ["3", "7", "11"]):
            layers = [layer for _ in range(8) for layer in (nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.Tanh())]
            network = nn.Sequential(*layers)
            if cuts:
                RecomputedForward(network, lambda network=network, cuts=cuts: Division(network, cuts), network)
            images = torch.randn(2, 4, 32, 32)
            network(images).sum().backward()
            with Live() as live:
                loss = network(images).sum()
                kept = sum(storage.nbytes() for storage in live.storages)
                loss.backward()
            sizes.append((kept // images.nbytes, live.most // images.nbytes))
        return sizes

    plain, with_recomputation = run_apart(run)
    assert plain == (8, 9)  # The results of Tanh, and a gradient or a result of a convolution.
    assert with_recomputation == (3 + 2, 3 + 2 + 1)


class Noisy(nn.Module):
    """A layer that draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(0)

    def forward(self, images: Tensor) -> Tensor:
        return images * self.generator.random()


def test_what_would_change_the_gradients_is_refused() -> None:
    def run() -> list[str]:
        messages = []
        for change in ("parameter", "images", "generator"):
            layers: list[nn.Module] = [nn.Linear(3, 3), nn.Tanh(), Noisy() if change == "generator" else nn.Tanh()]
            network = nn.Sequential(*layers, nn.Linear(3, 3)).double()
            RecomputedForward(network, lambda network=network: Division(network, ["2"]), network)
            images = torch.randn(4, 3, dtype=F64)
            loss = network(images).sum()
            with torch.no_grad():
                if change == "parameter":
                    network[0].weight.add_(1)
                elif change == "images":
                    images.add_(1)
            try:
                loss.backward()
            except (ConfigurationError, RuntimeError) as error:
                messages.append(str(error))
        return messages

    parameter, images, generator = run_apart(run)
    assert "the parameter 0.weight was changed after the network's forward and before the backward" in parameter
    assert "modified by an inplace operation" in images
    assert "a forward of Sequential has given other results when it ran again" in generator


def test_copies_recompute_for_themselves_and_the_network_gets_its_forward_back() -> None:
    def run() -> list[Any]:
        layers = [nn.Sequential(nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4), nn.Dropout()) for channels in (3, 4)]
        network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 3)).double()
        forward = RecomputedForward(network, lambda: Division(network, ["0", "1"]), network)
        # A copy that is made before its first call shares nothing with the network but the cuts.
        copied = copy.deepcopy(network)
        doubled = copy.deepcopy(copied)
        pickled = pickle.loads(pickle.dumps(network))
        images = torch.randn(6, 3, 8, 8, dtype=F64)
        for module in (copied, doubled, pickled):
            assert not any(a is b for a, b in zip(module.parameters(), network.parameters(), strict=True))
            random.seed(1)
            torch.manual_seed(1)
            module(images).sum().backward()
        assert all(parameter.grad is None for parameter in network.parameters())
        grads = [[p.grad for p in module.parameters()] for module in (copied, doubled, pickled)]
        assert vars(copied)["forward"].compared
        with torch.no_grad():
            network(images)
        replaced = {name: parameter.detach() for name, parameter in network.named_parameters()}
        with pytest.warns(UserWarning, match="such calls keep all activations"):
            functional_call(network, replaced, (images,))
        forward.remove()
        assert "forward" not in vars(network)
        assert "forward" not in vars(doubled)
        return grads

    first, second, third = run_apart(run)
    assert_same(first, second)
    assert_same(first, third)
