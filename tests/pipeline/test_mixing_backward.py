"""Tests of the probe that finds out whether a stage's backward mixes samples."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cnnstrategies.networks import SmallResNet
from cnnstrategies.pipeline.mixing import MixingProbe
from cnnstrategies.pipeline.mixing_backward import reason_of_backward
from cnnstrategies.pipeline.stored_watch import StoredWatch

pytestmark = pytest.mark.light
TINY = 1e-6


class Rounds(nn.Module):
    """Adds a number that depends on the number of samples and is as small as a kernel's rounding."""

    def forward(self, values: Tensor) -> Tensor:
        return values + TINY * len(values)


class Hooked(nn.Module):
    """Changes the gradient of its input in the backward."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, values: Tensor) -> Tensor:
        result = values.clone()
        result.register_hook(self.change)  # type: ignore[no-untyped-call]
        return result


class OwnLength(torch.autograd.Function):
    """The identity, whose backward multiplies gradients by a function of the number of samples."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * len(gradient) ** 0.5


class OfLength(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return OwnLength.apply(values)  # type: ignore[no-any-return, no-untyped-call]


def reason(network: nn.Module, images: Tensor, microbatches: int = 1) -> str | None:
    """Return the probe's result for a stage that consists of a network."""
    probe = MixingProbe(lambda *arguments: (network(*arguments),), dict(network.named_modules()), StoredWatch(network))
    parts = images.chunk(microbatches)
    arguments, samples = [(part,) for part in parts], [len(part) for part in parts]
    verdict = probe.verdict(arguments, samples)
    assert verdict is not None
    assert verdict.reason is None
    return reason_of_backward(probe, arguments, samples, verdict.has_rows)


def near_zero(samples: int) -> Tensor:
    """Return values, one of which in each sample is negative or positive by rounding."""
    values = torch.randn(samples, 100)
    values[:, 7] = -1.5 * TINY
    return values


@pytest.mark.parametrize("microbatches", [1, 4])
def test_rounding_that_changes_the_sign_of_a_value_is_not_mixing(microbatches: int) -> None:
    network = nn.Sequential(Rounds(), nn.ReLU(), nn.Linear(100, 3))
    images = near_zero(4)
    both, alone = (torch.relu(Rounds()(images[:count]))[0, 7] for count in (2, 1))
    assert both > 0 == alone, "the derivative depends on the number of samples"
    assert reason(network, images, microbatches) is None


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda gradient: gradient / gradient.norm(),
    "mean": lambda gradient: gradient - gradient.mean(0, keepdim=True),
    "a little of the mean": lambda gradient: gradient + 0.05 * gradient.mean(0, keepdim=True),
    "a little of the norm": lambda gradient: gradient * (1 + 0.1 * gradient.norm()),
    "length": lambda gradient: gradient * len(gradient),
    "other sample": lambda gradient: gradient.flip(0),
}


@pytest.mark.parametrize("is_rounded", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_hooks_that_mix_samples_are_found(change: str, is_rounded: bool) -> None:
    first = [Rounds(), nn.ReLU()] if is_rounded else []
    network = nn.Sequential(*first, nn.Linear(100, 50), Hooked(CHANGES[change]), nn.Tanh(), nn.Linear(50, 3))
    assert "another gradient in another batch" in str(reason(network, near_zero(4)))


@pytest.mark.parametrize("is_rounded", [False, True])
def test_functions_of_the_batch_size_are_found(is_rounded: bool) -> None:
    network = nn.Sequential(*[Rounds(), nn.ReLU()] * is_rounded, nn.Linear(100, 50), OfLength(), nn.Linear(50, 3))
    assert "another gradient in another batch" in str(reason(network, near_zero(4)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_gradient_that_is_zero_but_for_rounding_is_not_mixing(dtype: torch.dtype) -> None:
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.InstanceNorm2d(8),
        nn.Conv2d(8, 8, 3),
        nn.GroupNorm(8, 8),
        nn.Flatten(),
        nn.Linear(1152, 3),
    ).to(dtype)
    images = torch.randn(4, 3, 16, 16, dtype=dtype)
    assert reason(network, images) is None
    network(images).square().sum().backward()
    bias, weight = (network.get_parameter(name).grad for name in ("0.bias", "0.weight"))
    assert bias is not None
    assert weight is not None
    assert bias.abs().max() < 0.01 * weight.abs().max(), "an instance normalisation removes the bias"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_ordinary_network_mixes_nothing_in_any_precision(dtype: torch.dtype) -> None:
    network = SmallResNet(10)
    for _ in range(2):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            assert reason(network, torch.randn(4, 3, 32, 32), 2) is None
