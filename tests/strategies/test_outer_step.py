"""When a worker of mode local takes part in an outer step, and with which hyper-parameters."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from cnnstrategies.strategies import ParameterServerStrategy
from cnnstrategies.strategies.parameter_server.step import Stepper

pytestmark = pytest.mark.light


class Recorder:
    """In the place of a worker's connection: keeps what it is told."""

    codecs = ("none", "none")

    def __init__(self):
        self.begun, self.pushed = [], 0

    def begin_step(self, options, samples):
        self.begun.append((options, samples))

    def push(self, index, value):
        self.pushed += 1

    def end_step(self):
        pass

    def wait_all(self):
        pass


def stepper_of(own_steps, **options):
    module = LightningModule()
    module.network = nn.Linear(16, 2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    strategy = ParameterServerStrategy("local", sync_every=3, **options)
    specification = strategy.options.specification(module, optimizer, 1, 2)
    worker = Recorder()
    return Stepper(module, worker, specification, optimizer, sync_every=3, own_steps=own_steps), worker


def test_a_newcomer_makes_outer_steps_with_the_others():
    """They have made one own step since the last: the second of the newcomer is the third."""
    stepper, worker = stepper_of(own_steps=1, outer_lr=0.7, outer_momentum=0.9)
    for _ in range(2):
        stepper.samples += 4
        stepper.after_step()
    ((options, samples),) = worker.begun
    assert (options[0]["lr"], options[0]["momentum"], options[0]["nesterov"], samples) == (0.7, 0.9, True, 8)
    assert worker.pushed == 2, "weight and bias"
    for _ in range(3):
        stepper.after_step()
    assert len(worker.begun) == 2


def test_there_is_no_outer_step_without_own_ones():
    """A validation and then a checkpoint at the same moment: the momentum must not move the weights in between."""
    stepper, worker = stepper_of(own_steps=0)
    stepper.outer_step()
    assert not worker.begun
    stepper.after_step()
    stepper.outer_step()
    stepper.outer_step()
    assert len(worker.begun) == 1
