"""Tests of the memory that the first step of a divided network needs, and of parameters that its forward sets."""

import importlib
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn

from cnnstrategies.pipeline import combining, first_forward, mixing_backward
from cnnstrategies.pipeline.first_forward import NotedParameters
from cnnstrategies.pipeline.mixing_backward import Sketch
from cnnstrategies.placed import GlooLink, Places
from cnnstrategies.strategies.loss_comparison import compare_with_parts
from tests.pipeline.test_placed_network import placed
from tests.runner.ranks import run_ranks

WIDTH, LAYERS = 128, 12


def held(counter: Any, function: Callable[[], Any]) -> tuple[int, int, Any]:
    """Return the bytes that a function has allocated and not freed, their peak during the call, and the result."""
    before = counter.now
    counter.forget()
    result = function()
    return counter.now - before, counter.most - before, result


class Regression(LightningModule):
    """A module whose loss is a mean over samples.

    Args:
        network: The network.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.trainer = SimpleNamespace(loggers=[])  # type: ignore[assignment]

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.network(batch[0]).square().mean()


def peaks(make_counter: Callable[[], Any]) -> tuple[int, int, list[int], list[int], list[int]]:
    """Return the peak of a loss's comparison, the bytes of the stage's parameters, and the peaks of two steps.

    Of the steps, the peaks of the forwards come first. The last peaks are those of two steps with large activations.
    """
    first_forward.CHUNK = mixing_backward.CHUNK = combining.PIECE = 1024  # The layers are small.
    counter = make_counter()
    torch.manual_seed(0)
    network = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)])
    rank, size = dist.get_rank(), dist.get_world_size()
    places = Places(rank, size, GlooLink(dist.new_group(range(size)), rank, size))  # type: ignore[arg-type]
    images = torch.randn(4, WIDTH)
    _, of_comparison, comparison = held(counter, lambda: compare_with_parts(Regression(network), [images], 0))
    assert comparison.kind == "mean", comparison
    with placed(network, [str(LAYERS // 2)], (1, 1), places, 2) as divided:
        parameters = sum(parameter.nbytes for parameter in divided.runner.parameters)
        forwards, steps = two_steps(counter, network, images)
    network = nn.Sequential(
        *[nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Tanh()) for _ in range(LAYERS)]
    )
    with placed(network, [str(LAYERS // 2)], (1, 1), places, 2):
        of_images = two_steps(counter, network, torch.randn(6, 8, 32, 32))[1]
    places.messages.close()
    return of_comparison, parameters, forwards, steps, of_images


def two_steps(counter: Any, network: nn.Module, images: torch.Tensor) -> tuple[list[int], list[int]]:
    """Return the peaks of two forwards, and of their steps."""
    forwards, steps = [], []
    for _ in range(2):
        kept, of_forward, loss = held(counter, lambda: network(images).square().mean())
        _, of_backward, _ = held(counter, loss.backward)
        forwards.append(of_forward)
        steps.append(max(of_forward, kept + of_backward))
        network.zero_grad()
    return forwards, steps


@pytest.mark.skipif(shutil.which("g++") is None, reason="the counter of bytes is compiled")
def test_the_first_step_needs_the_memory_of_later_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks/planning")
    counted = importlib.import_module("counted")
    results = run_ranks(2, peaks, partial(counted.Counted, counted.build(tmp_path)))
    for of_comparison, parameters, (first, later), (first_step, later_step), of_images in results:
        layer = 4 * WIDTH * (WIDTH + 1)
        assert of_comparison < 2.5 * layer, "the comparison of a loss copies no parameters"
        assert later < layer, "activations are small"
        assert first < later + 2.5 * layer, "the first forward holds one gradient and a copy of it, but not all"
        assert later_step > parameters, "a step holds the gradients"
        assert first_step <= later_step + layer / 2
        assert of_images[0] < 1.02 * of_images[1], "two of six samples are probed while few activations exist"


def assign(weight: nn.Parameter) -> None:
    weight.data = weight.data * 2


def assign_and_change(weight: nn.Parameter) -> None:
    weight.data = weight.data * 2
    weight.data.add_(1)


def change_out(weight: nn.Parameter) -> None:
    torch.mul(weight.detach(), 2, out=weight.detach()[:])


WAYS: dict[str, Callable[[nn.Parameter], Any]] = {
    "data": lambda weight: weight.data.mul_(2),
    "view": lambda weight: weight.detach()[1].zero_(),
    "list": lambda weight: torch._foreach_mul_([weight.data], 2),
    "initialisation": nn.init.normal_,
    "out": change_out,
    "assignment": assign,
    "assignment and change": assign_and_change,
}


@pytest.mark.light
@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_that_a_forward_sets_is_noticed_and_restored(way: str) -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last))
    before = [parameter.detach().clone() for parameter in network.parameters()]
    for name in ("0", "1"):
        noted = NotedParameters(dict(network.named_modules()))
        with noted.watching():
            WAYS[way](network.get_parameter(f"{name}.weight"))
        assert noted.changed() == [f"{name}.weight"]
        assert noted.changed_unseen() is None
        noted.restore()
        assert noted.changed() == []
        for parameter, expected in zip(network.parameters(), before, strict=True):
            assert torch.equal(parameter, expected)


@pytest.mark.light
def test_a_parameter_that_changes_without_an_operation_is_noticed() -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3).bfloat16())
    noted = NotedParameters(dict(network.named_modules()))
    assert noted.changed_unseen() is None
    values = network.get_parameter("0.weight").detach().numpy()
    with noted.watching():
        values[[0, 1]] = values[[1, 0]]
    assert noted.changed_unseen() == "0.weight"


@pytest.mark.light
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sketches_of_large_gradients_are_small_and_differ_if_an_element_differs(dtype: torch.dtype) -> None:
    gradient = torch.randn(1000, 101, generator=torch.Generator().manual_seed(1)).to(dtype)
    sketch = Sketch.of(gradient)
    assert sketch.values.numel() < gradient.numel() / 50
    assert sketch.largest == gradient.abs().max()
    for index in (0, 63, 64, 99_999, 100_999):
        other = gradient.clone().view(-1)
        other[index] += 8
        assert (Sketch.of(other.view_as(gradient)).values - sketch.values).abs().max() > 0.1
