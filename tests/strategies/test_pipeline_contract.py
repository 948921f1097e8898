"""Tests of a pipeline's requirements on a module, its callbacks and its optimizers."""

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BackboneFinetuning, EMAWeightAveraging, StochasticWeightAveraging
from torch import nn

from cnnstrategies.callbacks import Pruning
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies.hybrid_pipeline.contract import (
    check_callbacks,
    find_network,
    put_network,
    try_optimizer,
)


def module(**children: Any) -> LightningModule:
    result = LightningModule()
    for name, child in children.items():
        setattr(result, name, child)
    return result


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 1, 1), nn.Linear(1, 1))


def test_the_child_with_all_parameters_or_the_named_submodule_is_divided() -> None:
    assert find_network(module(criterion=nn.CrossEntropyLoss(), unet=layers()), None) == "unet"
    frozen = layers().requires_grad_(False)
    assert find_network(module(net=frozen), None) == "net", "a frozen network may be unfrozen later"
    assert find_network(module(teacher=frozen, student=layers()), None) == "student"
    whole = module(teacher=layers(), parts=nn.ModuleDict({"net": layers()}))
    assert find_network(whole, "parts.net") == "parts.net"
    put_network(whole, "parts.net", other := nn.Identity())
    assert whole.parts["net"] is other


SAME = layers()
UNCLEAR: list[tuple[dict[str, Any], str | None, str]] = [
    ({"net": layers()}, "nett", r"submodule='nett': .* no submodule of this name; it has net"),
    ({}, None, "none has parameters to train: build it in __init__"),
    (
        {"encoder": layers(), "decoder": layers()},
        None,
        r"over self.encoder, self.decoder: .* own forward call them, and the steps self\(images\), once",
    ),
    ({"net": layers(), "scale": nn.Parameter()}, None, r"shared out over self.scale, self.net"),
    ({"net": SAME, "alias": SAME}, None, "alias shares parameters with LightningModule.net: .* leave out"),
    ({"net": SAME, "head": SAME[1]}, None, "head shares parameters with LightningModule.net"),
]


def test_an_ambiguous_network_is_refused_with_the_candidates() -> None:
    for children, named, message in UNCLEAR:
        with pytest.raises(ConfigurationError, match=message):
            find_network(module(**children), named)


def test_callbacks_that_need_the_whole_network_are_refused() -> None:
    check_callbacks([EMAWeightAveraging()])
    for callback in (StochasticWeightAveraging(1e-2), Pruning(), BackboneFinetuning()):
        with pytest.raises(ConfigurationError, match=f"{type(callback).__name__} .* (whole network|to the optimizer)"):
            check_callbacks([callback])


class Sharpness(torch.optim.SGD):
    """SAM: moves the parameters by a step that depends on the gradient's norm over all parameters, and back."""

    def step(self, closure: Any = None) -> Any:
        closure()
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        moves = [p.grad * (0.05 / norm) for p in parameters]
        with torch.no_grad():
            torch._foreach_add_(parameters, moves)
            closure()
            torch._foreach_sub_(parameters, moves)
        return super().step()


class Estimating(torch.optim.Optimizer):
    """An optimizer like Prodigy: from the third step on, its step size depends on all parameters."""

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
    """An optimizer like Lookahead, with tensors of all parameters in a list outside its state."""

    def __init__(self, parameters: Any, lr: float) -> None:
        parameters = list(parameters)
        super().__init__(parameters, lr)
        self.slow = [parameter.detach().clone() for parameter in parameters]


class Seeded(torch.optim.SGD):
    """An optimizer whose steps depend on the seed of torch's random numbers, for each parameter alike."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad, alpha=0.1 + 0.1 * (torch.initial_seed() == 1))
        return loss


def test_an_optimizer_that_mixes_parameters_is_refused() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 5), nn.Linear(5, 5, bias=False))
    before = copy.deepcopy(network.state_dict())
    every: list[Any] = [
        *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adafactor, torch.optim.Adagrad),
        *(torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop),
        *(torch.optim.ASGD, torch.optim.Rprop),
    ]
    for kind in every:
        optimizer = kind(network.parameters(), lr=0.1)
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: step / 10
        )  # The schedule starts with a learning rate of 0.
        try_optimizer(optimizer, torch.device("cpu"))
    for kind, message in (
        (Sharpness, "Sharpness changes a parameter by what others and their gradients are"),
        (Estimating, "Estimating changes a parameter by what others"),
        (Slow, "Slow keeps tensors of all parameters in slow"),
        (torch.optim.LBFGS, "LBFGS keeps tensors of all parameters"),
        (Seeded, "Seeded draws random numbers in its steps"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            try_optimizer(kind(network.parameters(), lr=0.1), torch.device("cpu"))
    torch.testing.assert_close(network.state_dict(), before, rtol=0, atol=0)
