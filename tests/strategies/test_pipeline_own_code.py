"""Tests of users' hooks under a pipeline: results equal one device."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_value_

from tests.strategies.test_pipeline_ways_to_write import CLASSES, Module, differ


class Own(Module):
    cut = "0.2"
    epochs = 2

    def __init__(self) -> None:
        super().__init__()
        body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.Tanh(), nn.Dropout(0.0))
        self.net = nn.Sequential(body, nn.Flatten(), nn.Linear(64, CLASSES))

    def training_step(self, batch: Any, index: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])


class EachByItself(Own):
    """A module with common hooks that handle parameters one by one, in loops or by a layer's name or position."""

    def on_train_epoch_start(self) -> None:
        next(self.net.children())[-3].requires_grad_(self.current_epoch > 0)
        self.net[0][-1].p = 0.0

    def on_after_backward(self) -> None:
        if any(not torch.isfinite(p.grad).all() for p in self.parameters() if p.grad is not None):
            self.zero_grad()
        for parameter in self.net[0][0].parameters():
            parameter.grad = None if self.current_epoch else parameter.grad * 0.5
        for layer in self.net.modules():
            if isinstance(layer, nn.Conv2d) and layer.bias.grad is not None:
                layer.bias.grad[layer.bias.grad.abs() < 1e-3] = 0

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in self.net.parameters():
            if parameter.grad is not None:  # Adaptive clipping, like NFNets.
                parameter.grad.mul_((0.1 * parameter.detach().norm() / parameter.grad.norm()).clamp(max=1))

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, 0.05, "norm")
        clip_grad_value_(self.parameters(), 0.02)

    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Callable[[], Any]) -> None:
        optimizer.param_groups[0]["lr"] = 0.5 / (1 + self.global_step)
        optimizer.step(closure=closure)

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for layer in (self.net[0], *self.net[1:]):
                for parameter in layer.parameters():
                    parameter.clamp_(-0.3, 0.3)


def test_hooks_of_single_parameters_act_as_on_one_device() -> None:
    assert differ((EachByItself,), [1, 1], 2) == {}
