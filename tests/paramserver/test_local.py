"""Mode local: workers make local steps, and the servers make an outer step with the mean of the workers' changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.specification import Specification
from tests.paramserver.roles import PlainRoles, Roles, join
from tests.paramserver.training import SGD, batches, make_network, make_optimizer, specify
from tests.runner.ranks import run_apart

OWN_STEPS, ROUNDS = 3, 4
SAMPLES = (12, 6)  # Number of samples in each worker's part of a batch.
DILOCO = {"name": "SGD", "lr": 0.7, "momentum": 0.9, "nesterov": True}


def own_steps(network: nn.Module, optimizer: torch.optim.Optimizer, id: int, number: int) -> None:
    """Make a worker's local steps of a round, on the worker's part of each batch."""
    rows = slice(SAMPLES[0]) if id == 0 else slice(SAMPLES[0], None)
    for images, targets in batches(ROUNDS * OWN_STEPS, 18)[number * OWN_STEPS :][:OWN_STEPS]:
        optimizer.zero_grad()
        F.cross_entropy(network(images[rows]), targets[rows]).backward()
        optimizer.step()


def diloco() -> tuple[list[Tensor], dict[str, Any]]:
    """Train as in the paper on DiLoCo, in one process; return the values and the outer optimizer's state."""
    whole = make_network()
    optimizer = make_optimizer(whole, DILOCO)
    networks = [make_network() for _ in SAMPLES]
    inner = [make_optimizer(network, SGD) for network in networks]
    for number in range(ROUNDS):
        for id, network in enumerate(networks):
            network.load_state_dict(whole.state_dict())
            own_steps(network, inner[id], id, number)
        for value, *theirs in zip(whole.parameters(), *(n.parameters() for n in networks), strict=True):
            parts = zip(SAMPLES, theirs, strict=True)
            value.grad = sum(size * (value.detach() - local.detach()) for size, local in parts) / sum(SAMPLES)
        optimizer.step()
    return [p.detach() for p in whole.parameters()], optimizer.state_dict()["state"]


def train(
    connect: Callable[..., Any], id: int, outer: list[dict[str, Any]], dies: Callable[[], None]
) -> tuple[list[Tensor], dict[str, Any]]:
    network = make_network()
    inner, parameters = make_optimizer(network, SGD), list(network.parameters())
    worker: Worker = connect([p.data for p in parameters])
    worker.initialise()
    worker.join()
    for number in range(ROUNDS):
        if (id, number) == (0, ROUNDS // 2):
            dies()
        own_steps(network, inner, id, number)
        worker.begin_step(outer, SAMPLES[id] * OWN_STEPS)
        for index, parameter in enumerate(parameters):
            worker.push(index, parameter)
        worker.end_step()
        worker.wait_all()
    state = worker.optimizer_state()["state"] if id == 0 else {}
    worker.leave()
    worker.close()
    return [p.detach() for p in parameters], state


def test_local_mode_equals_diloco_in_one_process(tmp_path: Path) -> None:
    """Train while a server dies in the middle."""
    expected, momentum = run_apart(diloco)
    specification = specify(DILOCO, 2, servers=2, replication=2, mode="local", slice_bytes=512)
    with Roles(tmp_path, specification) as run:
        (first, state), (second, _) = run.train(train, run.options, lambda: run.lose(1))
    assert all(torch.equal(value, same) for value, same in zip(first, second, strict=True))
    for got, value in zip(first, expected, strict=True):
        torch.testing.assert_close(got, value, rtol=1e-12, atol=1e-14)
    for index, parts in momentum.items():
        if parts.get("momentum_buffer") is not None:
            torch.testing.assert_close(
                state[index]["momentum_buffer"], parts["momentum_buffer"], rtol=1e-10, atol=1e-14
            )


@pytest.mark.light
@pytest.mark.parametrize("options", [{"compression": "topk", "topk_density": 0.25}, {"pull_compression": "fp16"}])
def test_a_worker_sends_the_difference_to_the_values_that_it_pulled(options: dict[str, Any], tmp_path: Path) -> None:
    """Check that later pushes add what a push leaves out, and that a pull's rounding does not count as a change."""

    named = [("w", nn.Parameter(torch.zeros(64, dtype=torch.float64)))]
    optimizer = torch.optim.SGD([named[0][1]], lr=1.0)
    with Roles(tmp_path, Specification.of(named, optimizer, 1, mode="local", **options)) as run:
        got = torch.full((64,), 1 / 3, dtype=torch.float64)
        worker = run.connect(0, [got])
        join([worker])
        for number in range(8):
            if number < 4:
                got.sub_(torch.arange(64) / 64)
            run.step(worker, [got])
        worker.refresh()
    torch.testing.assert_close(got, 1 / 3 - 4 * torch.arange(64).double() / 64, rtol=1e-6, atol=1e-6)


@pytest.mark.light
def test_a_server_restarted_in_the_first_round_gets_the_initial_values(tmp_path: Path) -> None:
    """Check that the server does not get the worker's current values: the push's difference would count twice."""
    with PlainRoles(tmp_path, mode="local") as run:
        worker, (value,) = run.joined()
        value.sub_(1.0)
        run.kill(0)
        run.replace_server(0)
        run.step(worker, [value])
    torch.testing.assert_close(value, torch.full_like(value, -0.5))
