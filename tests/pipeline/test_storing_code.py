"""Whether the code of a module's forward may store something."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from cnnstrategies.pipeline.storing_code import function_may_store, may_store

pytestmark = pytest.mark.light
LOG: list[Any] = []


def half(x: Tensor) -> Tensor:
    return x * 0.5


def noted(x: Tensor) -> Tensor:
    LOG.append(x)
    return x


class Residual(nn.Module):
    scales: tuple[float, ...] = (1.0, 2.0)

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.size = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), (2, 2)
        self.active = F.gelu

    def branch(self, x: Tensor) -> Tensor:
        return self.active(self.norm(self.conv(x)))

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4:
            raise ValueError(f"{x.shape}")
        parts = [half(scale * self.branch(x)) for scale in self.scales]
        return x + torch.cat(parts, dim=1).mean((2, 3), keepdim=True).flatten(1).sum() + F.relu(x)[:, :1]


class Assigned(Residual):
    def branch(self, x: Tensor) -> Tensor:
        self.last = x
        return x


class Counted(Residual):
    count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x


class Derived(Counted):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Listed(Residual):
    def forward(self, x: Tensor) -> Tensor:
        self.conv.seen.append(x)
        return x


class InFunction(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return noted(x)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(1)
        return x


class Recorder:
    def note(self, x: Tensor) -> None:
        self.x = x


class ByObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recorder = Recorder()

    def forward(self, x: Tensor) -> Tensor:
        self.recorder.note(x)
        return x


class InList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [Assigned()]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


class ByArgument(nn.Module):
    def forward(self, x: Any) -> Tensor:
        x.note(1)
        return x.tensor


def kept(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(self: Any, x: Tensor) -> Any:
        return function(self, x)

    return wrapper


class Decorated(nn.Module):
    @kept
    def forward(self, x: Tensor) -> Tensor:
        return x


def test_modules_that_store_nothing_are_recognised() -> None:
    for module in (*Residual().modules(), nn.LSTM(2, 2), nn.Dropout(), nn.Identity(), nn.MultiheadAttention(2, 1)):
        assert not may_store(module), module
    assert not function_may_store(torch.add)
    assert not function_may_store(half)


def test_modules_that_may_store_something_are_recognised() -> None:
    classes = (Assigned, Counted, Derived, Listed, InFunction, InPlace, InList, ByObject, ByArgument, Decorated)
    for module in [kind() for kind in classes]:
        assert may_store(module), module
    assert may_store(nn.InstanceNorm2d(2, track_running_stats=True)), "torch changes the statistics in place"
    normed = parametrizations.spectral_norm(nn.Linear(2, 2))
    assert any(map(may_store, normed.modules())), "the estimate of the norm is a buffer that changes"
    assert function_may_store(noted)
    hooked = nn.ReLU()
    assert not may_store(hooked)
    hooked.register_forward_hook(lambda module, *_: setattr(module, "seen", True))
    assert may_store(hooked)
