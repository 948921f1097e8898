"""Gradients of parameters are those of one process, whether the ranks sum them together or layer by layer."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from cnnstrategies.spatial import SpatialParts, gradient_sums
from tests.spatial.parts_in_turn import on_parts

torch.manual_seed(6)
IMAGES = torch.randn(2, 3, 11, 5, dtype=torch.float64)


class Network(nn.Module):
    """Convolutions of which one is used twice, and another does not train its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.last = nn.Conv2d(4, 2, 1)
        self.last.weight.requires_grad_(False)
        self.double()

    def forward(self, images: Tensor) -> Tensor:
        return self.last(torch.tanh(self.twice(torch.tanh(self.twice(torch.tanh(self.first(images)))))))


Case = Callable[[Network, Tensor], Any]


def loss(network: Network, images: Tensor) -> Tensor:
    return network(images).square().mean()


def backward(network: Network, images: Tensor) -> None:
    torch.autograd.backward(loss(network, images))


def accumulated(network: Network, images: Tensor) -> None:
    for factor in (1, 2):
        backward(network, images * factor)


def with_penalty(network: Network, images: Tensor) -> None:
    torch.autograd.backward(loss(network, images) + network.twice.weight.square().sum())


def graph_used_twice(network: Network, images: Tensor) -> None:
    value = loss(network, images)
    torch.autograd.backward(value, retain_graph=True)
    torch.autograd.backward(value)


def some_parameters(network: Network, images: Tensor) -> None:
    torch.autograd.backward(loss(network, images), inputs=[network.twice.weight, network.first.bias])


def channels_last(network: Network, images: Tensor) -> tuple[int, ...]:
    network.to(memory_format=torch.channels_last)
    backward(network, images)
    assert network.twice.weight.grad is not None
    return network.twice.weight.grad.stride()


def normalised_weight(network: Network, images: Tensor) -> None:
    weight_norm(network.twice)
    backward(network, images)


def returned_gradients(network: Network, images: Tensor) -> list[Tensor]:
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    return list(torch.autograd.grad(loss(network, images), trained))


def gradient_penalty(network: Network, images: Tensor) -> None:
    value = loss(network, images)
    gradients = torch.autograd.grad(value, [network.first.weight, network.twice.bias], create_graph=True)
    torch.autograd.backward(value + sum(gradient.square().sum() for gradient in gradients))


def backward_with_graph(network: Network, images: Tensor) -> None:
    value = loss(network, images)
    torch.autograd.backward(value, create_graph=True)


def images_penalty(network: Network, images: Tensor) -> None:
    images = images.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(network, images), [images], create_graph=True)
    torch.autograd.backward(gradient.square().sum())


def hook_of_parameter(network: Network, images: Tensor) -> list[Tensor]:
    seen: list[Tensor] = []
    network.twice.weight.register_hook(lambda gradient: (seen.append(gradient.clone()), 2 * gradient)[1])
    backward(network, images)
    return seen


def hook_after_accumulation(network: Network, images: Tensor) -> list[Tensor]:
    seen: list[Tensor] = []
    network.first.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
    backward(network, images)
    return seen


def checkpointed(network: Network, images: Tensor) -> None:
    images = images.detach().requires_grad_()
    for is_reentrant in (False, True):
        features = checkpoint(network.first, images, use_reentrant=is_reentrant)
        torch.autograd.backward(network.last(checkpoint(network.twice, features, use_reentrant=is_reentrant)).mean())


def other_dtype(network: Network, images: Tensor) -> None:
    network.twice.float()
    features = network.first(images)
    torch.autograd.backward(network.last(network.twice(features.float()).double()).square().mean())


CASES: list[Case] = [
    backward, accumulated, with_penalty, graph_used_twice, some_parameters, channels_last, normalised_weight,
    returned_gradients, gradient_penalty, backward_with_graph, images_penalty, hook_of_parameter,
    hook_after_accumulation, checkpointed, other_dtype,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("message", [1, 1 << 20])
def test_gradients_are_those_of_one_process(case: Case, message: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_sums, "MESSAGE_BYTES", message)
    single = Network()
    networks = [copy.deepcopy(single) for _ in range(3)]
    expected = case(single, IMAGES)
    results = on_parts(3, lambda parts: case(networks[parts.rank], parts.scatter(IMAGES, -2)))
    tolerance = 1e-5 if case is other_dtype else 1e-12
    for result, network in zip(results, networks, strict=True):
        torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
        for (name, parameter), of_one_process in zip(network.named_parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(
                parameter.grad, of_one_process.grad, rtol=tolerance, atol=tolerance, msg=f"{name} of {case.__name__}"
            )


class StoppedError(Exception):
    pass


def test_a_backward_that_fails_leaves_no_sums() -> None:
    def stop(gradient: Tensor) -> Tensor:
        raise StoppedError

    def main(parts: SpatialParts) -> list[Any]:
        torch.manual_seed(8)
        network = Network()
        features = network.first(parts.scatter(IMAGES, -2))
        hook = features.register_hook(stop)
        with pytest.raises(StoppedError):
            torch.autograd.backward(network.twice(features).square().mean())
        hook.remove()
        del features
        gc.collect()
        assert not parts.gradient_sums
        assert network.twice.weight.grad is None
        backward(network, parts.scatter(IMAGES, -2))
        return [parameter.grad for parameter in network.parameters()]

    torch.manual_seed(8)
    single = Network()
    backward(single, IMAGES)
    for gradients in on_parts(2, main):
        torch.testing.assert_close(
            gradients, [parameter.grad for parameter in single.parameters()], rtol=1e-12, atol=1e-12
        )


def test_a_backward_sums_the_gradients_of_all_convolutions_together() -> None:
    def main(parts: SpatialParts) -> int:
        sums = 0

        def begin(tensor: Tensor) -> Callable[[], None]:
            nonlocal sums
            sums += 1
            return original(tensor)

        original, parts.begin_sum = parts.begin_sum, begin  # type: ignore[method-assign]
        images = parts.scatter(IMAGES, -2)
        backward(Network(), images)
        return sums

    assert on_parts(2, main) == [1, 1]
