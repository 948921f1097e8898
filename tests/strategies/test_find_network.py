"""The submodule that a pipeline divides: found by its parameters or named, and in one place alone."""

from typing import Any

import pytest
from lightning.pytorch import LightningModule
from torch import nn

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies.hybrid_pipeline.contract import find_network, put_network

pytestmark = pytest.mark.light


def module(**children: Any) -> LightningModule:
    result = LightningModule()
    for name, child in children.items():
        setattr(result, name, child)
    return result


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 1, 1), nn.Linear(1, 1))


def test_the_child_with_all_parameters_is_divided():
    assert find_network(module(criterion=nn.CrossEntropyLoss(), unet=layers()), None) == "unet"
    frozen = layers().requires_grad_(False)
    assert find_network(module(net=frozen), None) == "net", "it may be unfrozen later"
    assert find_network(module(teacher=frozen, student=layers()), None) == "student"


def test_one_can_be_named_at_any_depth():
    assert find_network(module(teacher=layers(), parts=nn.ModuleDict({"net": layers()})), "parts.net") == "parts.net"
    with pytest.raises(ConfigurationError, match=r"network='nett': .* no submodule of this name; it has net"):
        find_network(module(net=layers()), "nett")


@pytest.mark.parametrize(
    ("children", "message"),
    [
        ({}, "none has parameters to train: build it in __init__"),
        (
            {"encoder": layers(), "decoder": layers()},
            r"over self.encoder, self.decoder: .* own forward call them, and the steps self\(images\), once",
        ),
        ({"net": layers(), "scale": nn.Parameter()}, r"parameters of its own \(scale\) beside those of self.net"),
        ({"net": (same := layers()), "alias": same}, "alias shares parameters with LightningModule.net: .* leave out"),
        ({"net": (same := layers()), "head": same[1]}, "head shares parameters with LightningModule.net"),
    ],
)
def test_what_has_no_one_place_is_refused_with_the_candidates(children: Any, message: str):
    with pytest.raises(ConfigurationError, match=message):
        find_network(module(**children), None)


def test_another_module_takes_its_place():
    whole = module(parts=nn.ModuleDict({"net": layers()}))
    put_network(whole, "parts.net", other := nn.Identity())
    assert whole.parts["net"] is other
