"""Tests of the moments at which workers with local steps make an outer step."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from cnnstrategies.strategies import ParameterServerStrategy
from cnnstrategies.strategies.parameter_server.step import Stepper


class Servers:
    """A replacement for a worker's connection that records its calls and pulls no values."""

    codecs, late, step, leader = ("none", "none"), False, 0, 0

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.pushed = 0

    def begin_step(self, options: Any, samples: int) -> None:
        self.begun.append((options, samples))

    def push(self, index: int, value: Tensor) -> None:
        self.pushed += 1

    def nothing(self, *_: Any) -> None: ...

    wait = wait_all = end_step = nothing


def local(own_steps: int) -> tuple[Stepper, Servers]:
    module, servers = LightningModule(), Servers()
    module.net, module.head = nn.Linear(16, 2), nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(module.parameters(), 0.01)
    strategy = ParameterServerStrategy("local", sync_every=3, outer_lr=0.7, outer_momentum=0.9)
    specification = strategy.options.specification(module, optimizer, 1, 2)
    return Stepper(module, servers, specification, optimizer, sync_every=3, own_steps=own_steps), servers


@pytest.mark.light
def test_a_joiner_makes_outer_steps_with_the_other_workers() -> None:
    """The other workers have made one local step since the last outer step: the joiner's second step is their third."""
    stepper, servers = local(own_steps=1)
    for _ in range(2):
        stepper.count(4)
        stepper.after_step()
    ((options, samples),) = servers.begun
    assert (options[0]["lr"], options[0]["momentum"], options[0]["nesterov"], samples) == (0.7, 0.9, True, 8)
    assert servers.pushed == 4, "an outer step pushes each parameter once"
    for _ in range(3):
        stepper.after_step()
    assert len(servers.begun) == 2


@pytest.mark.light
def test_there_is_no_outer_step_without_local_steps() -> None:
    """A validation and a checkpoint may follow each other without a step; the momentum must not move weights then."""
    stepper, servers = local(own_steps=0)
    stepper.outer_step()
    assert not servers.begun
    stepper.after_step()
    stepper.outer_step()
    stepper.outer_step()
    assert len(servers.begun) == 1
