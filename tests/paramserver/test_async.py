"""Modes in which workers do not wait for each other in every step: async and ssp."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cnnstrategies.paramserver.specification import Specification
from tests.paramserver.roles import Roles, join
from tests.paramserver.test_sync import train
from tests.paramserver.training import SGD, assert_same, batches, specify, train_alone
from tests.runner.ranks import run_apart


@pytest.mark.parametrize(
    "options",
    [{"mode": "async", "clip_norm": 0.3}, {"mode": "ssp", "staleness": 2, "clip_value": 0.02}],
    ids=str,
)
def test_one_worker_alone_trains_as_one_process(options: dict[str, Any], tmp_path: Path) -> None:
    """Clip each worker's gradient: with one worker this equals clipping in one process."""

    def clip(parameters: list[Tensor]) -> None:
        if "clip_norm" in options:
            nn.utils.clip_grad_norm_(parameters, options["clip_norm"])
        if "clip_value" in options:
            nn.utils.clip_grad_value_(parameters, options["clip_value"])

    expected, _ = run_apart(train_alone, SGD, batches(5, 12), clip)
    with Roles(tmp_path, specify(SGD, 1, servers=2, **options)) as run:
        ((network, _),) = run.train(train, SGD, [slice(0, 12)], 12)
    assert_same(network, expected)


@pytest.mark.light
@pytest.mark.parametrize("mode", [{"mode": "async"}, {"mode": "ssp", "staleness": 2}, {"mode": "sync"}], ids=str)
def test_workers_leave_and_come_back_between_epochs(mode: dict[str, Any], tmp_path: Path) -> None:
    """Check that pushes after a worker's return are not mistaken for repeated pushes from before."""
    parameter = nn.Parameter(torch.zeros(10))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    with Roles(tmp_path, Specification.of([("w", parameter)], optimizer, 2, **mode)) as run:
        workers = [run.worker(number) for number in range(2)]
        for _ in range(3):
            join([worker for worker, _ in workers])
            for _ in range(5):
                for worker, _ in workers:
                    run.begin(worker)
                for worker, _ in workers:
                    worker.wait_all()
            for worker, _ in workers:
                worker.leave()
        for worker, (value,) in workers:
            worker.refresh()
            assert torch.equal(value, torch.full((10,), -15.0 if mode["mode"] == "sync" else -30.0))
