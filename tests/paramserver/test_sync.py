"""Sync mode trains the same model as one process on the same global batch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import Cluster
from ranks import run_apart
from torch import Tensor
from training import ADAMW, SGD, Replica, batches, specify, train_alone

STEPS = 5


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        error = (got[name] - value).norm() / value.norm().clamp(min=1e-3)
        assert error < 1e-5, f"{name}: relative error {error:.1e}"


def train(connect: Callable[..., Any], id: int, options: dict[str, Any], shares: list[slice], size: int) -> Any:
    replica = Replica(connect, options)
    if id == 0:
        replica.worker.initialise()
    else:
        with torch.no_grad():
            replica.parameters[0].zero_()  # must come from worker 0
    replica.worker.join()
    for images, targets in batches(STEPS, size):
        replica.step(images[shares[id]], targets[shares[id]])
    replica.worker.wait_all()
    state = replica.worker.optimizer_state() if id == 0 else {}
    replica.worker.leave()
    replica.worker.close()
    return replica.network.state_dict(), state


def shares_of(workers: int, size: int) -> list[slice]:
    """Parts of unequal sizes: the mean is over samples."""
    edges = [0, *(size * (worker + 1) // workers - (worker + 1 < workers) for worker in range(workers))]
    return [slice(start, stop) for start, stop in zip(edges, edges[1:], strict=False)]


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("options", [SGD, ADAMW | {"groups": True}], ids=["sgd", "adamw-groups"])
def test_sync_equals_one_process(options: dict[str, Any], servers: int, workers: int, tmp_path: Path) -> None:
    expected, state = run_apart(train_alone, options, batches(STEPS, 12))
    with Cluster(specify(options, workers, servers=servers), tmp_path) as cluster:
        cluster.start_workers(train, options, shares_of(workers, 12), 12)
        for network, got in cluster.results():
            assert_same(network, expected)
            if got:
                assert_same_state(got, state)


def assert_same_state(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got["param_groups"] == expected["param_groups"]
    for index, values in expected["state"].items():
        assert got["state"][index].keys() == values.keys()
        for name, value in values.items():
            torch.testing.assert_close(got["state"][index][name], value, rtol=1e-4, atol=1e-6)
