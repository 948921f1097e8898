"""A network whose forward is not the same each time is refused by name when it is traced."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.stage import divide
from cnnstrategies.pipeline.tracing import trace

pytestmark = pytest.mark.light


class Changing(nn.Module):
    """Two layers, and between them something that a trace would fix."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.calls = 0
        self.gain = 1.0
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        match self.how:
            case "no_grad":
                with torch.no_grad():
                    x = self.block(x)
            case "autocast":
                with torch.autocast("cpu", torch.bfloat16):
                    x = self.block(x)
            case "random" if random.random() < 2:
                x = self.block(x)
            case "numpy" if np.random.rand() < 2:
                x = self.block(x)
            case "torch" if torch.rand(()) < 2:
                x = self.block(x)
            case "attribute":
                self.calls += 1
                x = self.block(x)
            case _:
                x = self.block(x) * self.gain
        return self.head(x)


@pytest.mark.parametrize(
    ("how", "message"),
    {
        "no_grad": "block computes under torch.no_grad or torch.enable_grad, .* use .detach()",
        "autocast": "block computes under torch.autocast",
        "random": "Changing.forward draws random numbers with random to decide",
        "numpy": "Changing.forward draws random numbers with numpy.random",
        "torch": "Changing.forward draws random numbers with torch",
        "attribute": "Changing.forward changes the attribute 'calls'",
    }.items(),
)
def test_what_a_trace_would_fix_is_refused(how: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        trace(Changing(how))


def test_a_context_around_the_trace_is_no_context_of_the_network() -> None:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        trace(Changing("nothing"))


def test_an_attribute_of_traced_code_cannot_change_afterwards() -> None:
    stage = divide(Changing("nothing"), [2]).build(0)
    with pytest.raises(ConfigurationError, match=r"gain = 5.0 is set on a part of the network that is cut"):
        stage.gain = 5.0
    with pytest.raises(ConfigurationError, match=r"rate = 0.1 is set"):
        stage.block.rate = 0.1
    stage.train()
    stage.requires_grad_(False)
    stage.get_submodule("block.0").anything = 1.0  # A layer keeps looking at its own.
