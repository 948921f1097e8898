"""Sync mode trains the same model as one process on the same global batch."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cnnstrategies.paramserver.specification import Specification
from tests.paramserver.roles import PlainRoles, Roles
from tests.paramserver.training import (
    ADAMW,
    SGD,
    Replica,
    assert_same,
    batches,
    make_network,
    make_optimizer,
    specify,
    train_alone,
    train_from,
)
from tests.runner.ranks import run_apart

STEPS = 5


def train(
    connect: Callable[..., Any],
    id: int,
    options: dict[str, Any],
    shares: list[slice],
    size: int,
    accumulate: int = 1,
    state: dict[str, Any] | None = None,
) -> Any:
    replica = Replica(connect, options)
    if id == 0:
        replica.worker.initialise(state)
    else:
        with torch.no_grad():
            replica.parameters[0].zero_()  # The value must come from worker 0.
    replica.worker.join()
    for images, targets in batches(STEPS, size):
        replica.step(images[shares[id]], targets[shares[id]], accumulate)
    replica.worker.wait_all()
    state = replica.worker.optimizer_state() if id == 0 else {}
    replica.worker.leave()
    replica.worker.close()
    return replica.network.state_dict(), state


def shares_of(workers: int, size: int) -> list[slice]:
    """Return workers' parts of a batch; they have unequal sizes, so that a mean over workers would be wrong."""
    edges = [0, *(size * (worker + 1) // workers - (worker + 1 < workers) for worker in range(workers))]
    return [slice(start, stop) for start, stop in itertools.pairwise(edges)]


def test_sync_equals_one_process(tmp_path: Path) -> None:
    options = ADAMW | {"groups": True}
    check(specify(options, 3, servers=2), options, tmp_path)


def test_pipelined_steps_equal_one_process(tmp_path: Path) -> None:
    """Train with clip_value, which clips the mean gradient of all workers, in pipelined steps."""
    limited = {"clip_value": 0.02, "replication": 2, "servers": 2}
    check(specify(SGD, 3, pipelined=True, slice_bytes=256, **limited), SGD, tmp_path)


def check(specification: Specification, options: dict[str, Any], directory: Path) -> None:
    """Train with servers and in one process: the weights and the optimizer's state must be the same."""

    def clip(parameters: list[Tensor]) -> None:
        if specification.clip_value is not None:
            assert (
                max(float(parameter.grad.abs().max()) for parameter in parameters if parameter.grad is not None)
                > specification.clip_value
            )
            torch.nn.utils.clip_grad_value_(parameters, specification.clip_value)

    expected, state = run_apart(train_alone, options, batches(STEPS, 12), clip)
    with Roles(directory, specification) as run:
        results = run.train(train, options, shares_of(specification.workers, 12), 12)
    for network, _ in results:
        assert_same(network, expected)
    assert_same_state(results[0][1], state)


@pytest.mark.light
def test_values_arrive_before_all_gradients_have_left(tmp_path: Path) -> None:
    """Wait for a parameter before the worker has pushed all gradients: the push itself requests the new values."""
    with PlainRoles(tmp_path, (40, 40), slice_bytes=160, pipelined=True) as run:
        worker, values = run.joined()
        worker.begin_step(run.options, 1)
        worker.push(0, torch.ones(40))
        worker.wait(0)
        assert torch.equal(values[0], torch.full((40,), -0.5))
        assert torch.equal(values[1], torch.zeros(40))
        worker.end_step()
        worker.wait_all()
        assert torch.equal(values[1], torch.zeros(40)), "the second parameter has no gradient"


def test_accumulated_gradients_and_ssp_of_staleness_0_are_sync(tmp_path: Path) -> None:
    expected, _ = run_apart(train_alone, SGD, batches(STEPS, 12))
    with Roles(tmp_path, specify(SGD, 2, mode="ssp", staleness=0)) as run:
        for network, _ in run.train(train, SGD, [slice(0, 4), slice(4, 12)], 12, 2):
            assert_same(network, expected)


def test_optimizer_state_is_resumed_from_one_process_and_back(tmp_path: Path) -> None:
    """Compare five steps in one process and then five with servers to ten steps in one process.

    The learning rate's schedule starts again after five steps in both.
    """
    network, state = run_apart(train_alone, ADAMW, batches(STEPS, 12))

    def go_on() -> Any:
        alone = make_network()
        alone.load_state_dict(network)
        optimizer = make_optimizer(alone, ADAMW)
        optimizer.load_state_dict(state)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"]
        return train_from(alone, optimizer, batches(STEPS, 12))

    def start(connect: Callable[..., Any], id: int) -> Any:
        def connected(parameters: list[Tensor]) -> Any:
            for parameter, value in zip(parameters, network.values(), strict=True):
                parameter.copy_(value)
            return connect(parameters)

        return train(connected, id, ADAMW, shares_of(2, 12), 12, 1, state)

    expected, expected_state = run_apart(go_on)
    with Roles(tmp_path, specify(ADAMW, 2, servers=2)) as run:
        results = run.train(start)
    assert_same(results[0][0], expected)
    assert_same_state(results[0][1], expected_state)


@pytest.mark.light
def test_missing_gradients_keep_values_and_count_as_zeros(tmp_path: Path) -> None:
    with PlainRoles(tmp_path, (40, 30), workers=2) as run:
        both = run.all_joined()
        for (worker, _), gradients in zip(both, ([None, torch.ones(30)], [None, None]), strict=True):
            run.begin(worker, gradients)
        for worker, values in both:
            worker.wait_all()
            assert torch.equal(values[0], torch.zeros(40))
            assert torch.equal(values[1], torch.full((30,), -0.5 * 0.5))


def assert_same_state(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got["param_groups"] == expected["param_groups"]
    for index, values in expected["state"].items():
        assert got["state"][index].keys() == values.keys()
        for name, value in values.items():
            torch.testing.assert_close(got["state"][index][name], value, rtol=1e-10, atol=1e-12)
