"""One small CNN in float64, its batches, and a training loop with and without servers."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.specification import Specification, hyperparameters

SGD = {"name": "SGD", "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}
ADAMW = {"name": "AdamW", "lr": 1e-2, "betas": (0.8, 0.99)}


_random = threading.Lock()


def make_network() -> nn.Module:
    with _random:  # All threads share one generator.
        torch.manual_seed(0)
        layers = nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 8, 3, 2, 1), nn.Tanh(), nn.Flatten()
        return nn.Sequential(*layers, nn.Linear(128, 5)).double()


def make_optimizer(network: nn.Module, options: dict[str, Any]) -> Optimizer:
    options = dict(options)
    kind = getattr(torch.optim, options.pop("name"))
    if options.pop("groups", False):
        biases = [p for name, p in network.named_parameters() if name.endswith("bias")]
        weights = [p for name, p in network.named_parameters() if not name.endswith("bias")]
        return kind([{"params": biases, "weight_decay": 0.0, "lr": 0.03}, {"params": weights}], **options)
    return kind(network.parameters(), **options)


def make_scheduler(optimizer: Optimizer) -> LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def batches(steps: int, size: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 1, 8, 8, generator=generator).double(), torch.randint(5, (size,), generator=generator))
        for _ in range(steps)
    ]


def specify(options: dict[str, Any], workers: int, **rest: Any) -> Specification:
    network = make_network()
    optimizer = make_optimizer(network, options)
    make_scheduler(optimizer)
    rest = {"slice_bytes": 2048, "timeout": 60.0} | rest
    return Specification.of(network.named_parameters(), optimizer, workers, **rest)


def train_alone(
    options: dict[str, Any],
    data: list[tuple[Tensor, Tensor]],
    clip: Callable[[list[nn.Parameter]], object] | None = None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    network = make_network()
    return train_from(network, make_optimizer(network, options), data, clip)


def train_from(
    network: nn.Module,
    optimizer: Optimizer,
    data: list[tuple[Tensor, Tensor]],
    clip: Callable[[list[Tensor]], object] | None = None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    scheduler = make_scheduler(optimizer)
    for images, targets in data:
        optimizer.zero_grad()
        F.cross_entropy(network(images), targets).backward()
        if clip is not None:
            clip(list(network.parameters()))
        optimizer.step()
        scheduler.step()
    return copy.deepcopy(network.state_dict()), copy.deepcopy(optimizer.state_dict())


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Assert that two state dicts are equal up to rounding in float64."""
    for name, value in expected.items():
        error = (got[name] - value).norm() / value.norm().clamp(min=1e-3)
        assert error < 1e-10, f"{name}: relative error {error:.1e}"


class Replica:
    """A worker's network with the hooks that push and wait."""

    def __init__(self, connect: Callable[[list[Tensor]], Worker], options: dict[str, Any]) -> None:
        self.network = make_network()
        self.optimizer = make_optimizer(self.network, options)
        self.scheduler = make_scheduler(self.optimizer)
        self.parameters = list(self.network.parameters())
        self.worker = connect([p.data for p in self.parameters])
        index = {p: i for i, p in enumerate(self.parameters)}
        for module in self.network.modules():
            indices = [index[p] for p in module.parameters(recurse=False)]
            module.register_forward_pre_hook(lambda _module, _input, indices=indices: self._wait(indices))
        for i, p in enumerate(self.parameters):
            p.register_post_accumulate_grad_hook(lambda p, i=i: self._push(i, p))
        self._pushes = True

    def _push(self, index: int, parameter: Tensor) -> None:
        if self._pushes:
            assert parameter.grad is not None
            self.worker.push(index, parameter.grad)

    def _wait(self, indices: list[int]) -> None:
        for index in indices:
            self.worker.wait(index)

    def step(self, images: Tensor, targets: Tensor, accumulate: int = 1) -> float:
        self.optimizer.zero_grad()
        parts = list(zip(images.chunk(accumulate), targets.chunk(accumulate), strict=True))
        for number, (part, labels) in enumerate(parts, 1):
            loss = F.cross_entropy(self.network(part), labels) * (len(part) / len(images))
            self._pushes = number == len(parts)
            if self._pushes:
                self.worker.begin_step(hyperparameters(self.optimizer), len(images))
            loss.backward()
        self.worker.end_step()
        self.scheduler.step()
        return loss.item()
