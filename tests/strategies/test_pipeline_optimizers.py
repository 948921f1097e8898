"""Optimizers that a stage can run with its own parameters alone, and others."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies.hybrid_pipeline.contract import try_optimizer


class Sharpness(torch.optim.SGD):
    """SAM: goes where the gradient's norm over all parameters says, and back."""

    def step(self, closure: Any = None) -> Any:
        closure()
        own = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in own]).norm()
        moves = [p.grad * (0.05 / norm) for p in own]
        with torch.no_grad():
            torch._foreach_add_(own, moves)
            closure()
            torch._foreach_sub_(own, moves)
        return super().step()


class Estimating(torch.optim.Optimizer):
    """Prodigy's kind: its step size is found from all parameters, and from the third step on."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "way": 0.0, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        closure()
        for group in self.param_groups:
            group["way"] = max(group["way"], *(float(p.grad.abs().sum()) for p in group["params"]))
            group["steps"] += 1
            for parameter in group["params"]:
                parameter -= group["lr"] * (group["way"] if group["steps"] > 2 else 1.0) * parameter.grad.sign()


class Slow(torch.optim.SGD):
    """Lookahead's kind, with a list of its own beside the state."""

    def __init__(self, parameters: Any, lr: float) -> None:
        parameters = list(parameters)
        super().__init__(parameters, lr)
        self.slow = [parameter.detach().clone() for parameter in parameters]


def test_one_that_mixes_parameters_is_refused_and_no_other() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 5), nn.Linear(5, 5, bias=False))
    before = copy.deepcopy(network.state_dict())
    every: list[Any] = [
        *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adafactor, torch.optim.Adagrad),
        *(torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop),
        *(torch.optim.ASGD, torch.optim.Rprop),
    ]
    for kind in every:
        optimizer = kind(network.parameters(), lr=0.1)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)  # It begins with 0.
        try_optimizer(optimizer, torch.device("cpu"))
    for kind, message in (
        (Sharpness, "Sharpness changes a parameter by what others and their gradients are"),
        (Estimating, "Estimating changes a parameter by what others"),
        (Slow, "Slow keeps tensors of all parameters in slow"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            try_optimizer(kind(network.parameters(), lr=0.1), torch.device("cpu"))
    torch.testing.assert_close(network.state_dict(), before, rtol=0, atol=0)
