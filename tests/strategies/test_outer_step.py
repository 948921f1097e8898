"""When a worker of mode local takes part in an outer step, and with which hyper-parameters."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies import ParameterServerStrategy
from cnnstrategies.strategies.parameter_server.step import Stepper

pytestmark = pytest.mark.light


class Recorder:
    """In the place of a worker's connection: keeps what it is told."""

    codecs = ("none", "none")

    def __init__(self):
        self.begun, self.pushed, self.log = [], 0, []

    def begin_step(self, options, samples):
        self.begun.append((options, samples))

    def push(self, index, value):
        self.pushed += 1
        self.log.append(index)

    def end_step(self, goes_on=False):
        self.log.append("goes on" if goes_on else "ends")

    def wait_all(self):
        self.log.append("waits")


def stepper_of(own_steps, there=lambda: 2, **options):
    module = LightningModule()
    module.network = nn.Linear(16, 2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    strategy = ParameterServerStrategy("local", **{"sync_every": 3, **options})
    # Weight and bias are in a slice of their own each, so that each can be a fragment.
    specification = strategy.options.specification(module, optimizer, 1, 2, slice_bytes=64)
    worker = Recorder()
    outer = strategy.options.outer_steps(specification, own_steps)
    workers = there if strategy.options.outer_steps_alone else None
    return Stepper(module, worker, specification, optimizer, outer=outer, workers=workers), worker


def test_a_newcomer_makes_outer_steps_with_the_others():
    """They have made one own step since the last: the second of the newcomer is the third."""
    stepper, worker = stepper_of(own_steps=[1, 1], outer_lr=0.7, outer_momentum=0.9)
    for _ in range(2):
        stepper.samples = 4
        stepper.after_step()
    ((options, samples),) = worker.begun
    assert (options[0]["lr"], options[0]["momentum"], options[0]["nesterov"], samples) == (0.7, 0.9, True, 8)
    assert worker.pushed == 2, "weight and bias"
    for _ in range(3):
        stepper.after_step()
    assert len(worker.begun) == 2


def test_there_is_no_outer_step_without_own_ones():
    """A validation and then a checkpoint at the same moment: the momentum must not move the weights in between."""
    stepper, worker = stepper_of(own_steps=[])
    stepper.outer_step()
    assert not worker.begun
    stepper.after_step()
    stepper.outer_step()
    stepper.outer_step()
    assert len(worker.begun) == 1


def test_fragments_take_turns_and_the_last_of_what_steps_have_changed_is_exchanged_at_once():
    """In five steps each is exchanged once."""
    stepper, worker = stepper_of([], sync_every=5, fragments=2)
    for _ in range(4):
        stepper.after_step()
    assert worker.log == [0, "ends", "waits"]
    worker.log.clear()
    stepper.outer_step()  # Before a validation: one step of the first, four of the second.
    assert worker.log == [0, 1, "ends", "waits"]
    worker.log.clear()
    for _ in range(5):
        stepper.after_step()
    assert worker.log == [0, "ends", "waits", 1, "ends", "waits"]
    worker.log.clear()
    stepper.outer_step()
    assert worker.log == [0, "ends", "waits"], "the second was exchanged just now"
    stepper.outer_step()
    assert worker.log == [0, "ends", "waits"]


def test_own_steps_go_on_while_an_exchange_is_on_its_way():
    stepper, worker = stepper_of([], sync_every=6, fragments=2, overlap=2)
    for _ in range(4):
        stepper.after_step()
    assert worker.log == [0, "goes on"]
    stepper.after_step()
    assert worker.log == [0, "goes on", "waits"]
    stepper.after_step()
    stepper.outer_step()  # It takes what is on its way first.
    assert worker.log == [0, "goes on", "waits", 1, "goes on", "waits", 0, "ends", "waits"]


def test_a_newcomer_takes_the_same_turns():
    stepper, worker = stepper_of([], sync_every=6, fragments=2)
    for _ in range(4):
        stepper.after_step()
    later, other = stepper_of(stepper.outer.made, sync_every=6, fragments=2)
    worker.log.clear()
    for each in (stepper, later):
        each.after_step()
        each.after_step()
        each.outer_step()
    assert other.log == worker.log == [1, "ends", "waits", 0, "ends", "waits"]


def test_a_worker_that_makes_outer_steps_alone_says_how_many_there_are():
    there = []
    stepper, worker = stepper_of([], lambda: there[-1], outer_mode="async", outer_lr=0.7, outer_momentum=0.9)
    for workers in (3, 2):
        there.append(workers)
        for _ in range(3):
            stepper.after_step()
    rounds = [(options[0]["workers"], options[0]["lr"], options[0]["momentum"]) for options, _ in worker.begun]
    assert rounds == [(3, 0.7, 0.9), (2, 0.7, 0.9)]


def test_what_has_not_left_a_worker_is_not_processed():
    """A batch whose own step is lost with its worker is another's."""
    stepper, _ = stepper_of([], outer_mode="async")
    assert stepper.all_pushed
    stepper.after_step()
    stepper.after_step()
    assert not stepper.all_pushed
    stepper.after_step()
    assert stepper.all_pushed


ALONE = {"mode": "local", "sync_every": 4, "outer_mode": "async"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fragments": 2}, "fragments=2 is for mode: local, not mode: sync"),
        ({"mode": "async", "overlap": 1}, "overlap=1 is for mode: local, not mode: async"),
        ({"mode": "local", "fragments": 0}, "fragments=0: use 1 or more"),
        ({"mode": "local", "sync_every": 4, "fragments": 5}, "fragments=5 with sync_every=4: each is exchanged once"),
        (
            {"mode": "local", "sync_every": 8, "fragments": 3, "overlap": 3},
            "an exchange must be over before the next begins: use at most 2",
        ),
        (
            {"mode": "local", "sync_every": 8, "fragments": 2, "pull_compression": "topk"},
            "a worker would lack the changes of steps that it takes no part in",
        ),
        ({"outer_mode": "alone"}, "outer_mode='alone': accepted are sync, async"),
        ({"mode": "async", "outer_mode": "async"}, "outer_mode: async is for mode: local, not mode: async"),
        ({"fragments": 2, **ALONE}, "fragments=2 with outer_mode: async: .* would be lost"),
        ({"pull_compression": "topk", **ALONE}, "'topk' with outer_mode: async: servers send one change to all"),
        ({"mode": "local", "data_dispatch": "dynamic"}, "in mode: local every worker makes the same number of steps"),
        ({"outer_lr": 0.7}, "are for mode: local, not mode: sync"),
        ({"mode": "local", "outer_lr": 0.0}, "outer_lr=0.0: use more than 0"),
        ({"mode": "local", "outer_lr": float("nan")}, "outer_lr=nan: use more than 0"),
        ({"mode": "local", "outer_momentum": 1.0}, "outer_momentum=1.0: use 0 or more and less than 1"),
    ],
)
def test_outer_steps_that_cannot_be_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        ParameterServerStrategy(**options)
