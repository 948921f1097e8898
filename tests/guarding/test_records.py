"""Networks with many weights: each step measures some of the gradients, and errors of a single step are found."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from cnnstrategies.guarding.records import LEAST, TURNS, StepRecords
from cnnstrategies.guarding.watch import TrainingWatch, WatchedRun

WEIGHTS = TURNS * LEAST
FOUND = "weights.7"
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": partial(torch.optim.SGD, lr=0.001, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.001),
    "plain": partial(torch.optim.SGD, lr=0.001),
}


class Weights(nn.Module):
    """Module with many weights of five elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.ones(5) for _ in range(WEIGHTS)])


def findings(optimizer: str, wrong: int, change: Callable[[int], float]) -> list[tuple[str, int, str]]:
    """Train with random gradients, one step of which is wrong, and return the check, the step and the tensor.

    Args:
        optimizer: Name of the optimizer.
        wrong: Number of the wrong step.
        change: Function that maps the index of a weight to the factor of its gradient in this step.
    """
    torch.manual_seed(0)
    module = Weights()
    stepper = OPTIMIZERS[optimizer](module.parameters())
    run = WatchedRun(0, lambda tensor: None, True, True, True, True, False)
    watch, result = TrainingWatch(module, [stepper], run), list[Any]()
    watch.begin(0)
    for step in range(1, wrong + 2 * TURNS):
        loss = 1 + 0.1 * torch.rand(()) + sum(value.sum() for value in module.weights).detach() * 0
        watch.records.step = step
        watch.records.before_backward(loss)
        for index, value in enumerate(module.weights):
            # After a wrong step all gradients are wrong, as after a backward pass.
            value.grad = torch.randn(5) + loss * 0
            if step == wrong:
                value.grad *= change(index)
        watch.records.before_step(stepper)
        stepper.step()
        watch.records.end_batch(loss)
        if step % 20 == 0:
            result += watch.check(step)[2]
    result += watch.check(wrong + 2 * TURNS)[2]
    return [(finding.check, finding.step, finding.tensor) for finding in result]


@pytest.mark.parametrize(
    ("optimizer", "wrong"), [*(("momentum", 33 + turn) for turn in range(TURNS)), ("adam", 34), ("plain", 35)]
)
def test_a_gradient_that_is_not_finite_in_one_step_is_named(optimizer: str, wrong: int) -> None:
    first = findings(optimizer, wrong, lambda index: torch.nan if index == 7 else 1.0)[0]
    assert first == ("finite", wrong, f"the gradient of {FOUND}")


@pytest.mark.parametrize(("optimizer", "wrong"), [*(("momentum", 241 + turn) for turn in range(TURNS)), ("adam", 241)])
def test_a_large_gradient_in_one_step_is_named(optimizer: str, wrong: int) -> None:
    ((check, step, tensor),) = findings(optimizer, wrong, lambda index: 1e5 if index == 7 else 1.0)
    assert (check, tensor) == ("history", f"the gradient of {FOUND}")
    assert wrong <= step <= wrong + TURNS


@pytest.mark.light
def test_a_step_with_large_gradients_is_found_without_averages() -> None:
    ((check, step, _),) = findings("plain", 243, lambda index: 1e4)
    assert (check, step) == ("history", 243)


@pytest.mark.light
def test_each_step_measures_some_of_many_gradients() -> None:
    module = Weights()
    records = StepRecords(module, lambda tensor: True, has_states=True)
    stepper = torch.optim.SGD(module.parameters(), 0.1)
    for value in module.weights:
        value.grad = torch.ones(5)
    records.before_backward(torch.ones(()))
    for step in range(2 * TURNS):
        records.step = step
        records.before_step(stepper)
    each = records.take([stepper], dict(module.named_parameters())).gradients
    assert [len(norms.names) for norms in each] == [LEAST] * 2 * TURNS
    assert {name for norms in each[:TURNS] for name in norms.names} == {name for name, _ in module.named_parameters()}
