"""Modes in which workers run on their own: async, ssp; compression."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_apart
from roles import Roles, join
from test_sync import train
from torch import Tensor, nn
from training import SGD, Replica, assert_same, batches, specify, train_alone

from cnnstrategies.paramserver.specification import Specification

PLAIN = {"name": "SGD", "lr": 0.3}


@pytest.mark.parametrize(
    "options",
    [{"mode": "async", "clip_norm": 0.3}, {"mode": "ssp", "staleness": 2, "clip_value": 0.02}],
    ids=str,
)
def test_one_worker_alone_trains_as_one_process(options: dict[str, Any], tmp_path: Path) -> None:
    """Clipping is of each worker's gradient."""

    def clip(parameters: list[Tensor]) -> None:
        if "clip_norm" in options:
            nn.utils.clip_grad_norm_(parameters, options["clip_norm"])
        if "clip_value" in options:
            nn.utils.clip_grad_value_(parameters, options["clip_value"])

    expected, _ = run_apart(train_alone, SGD, batches(5, 12), clip)
    with Roles(tmp_path, specify(SGD, 1, servers=2, **options)) as run:
        ((network, _),) = run.train(train, SGD, [slice(0, 12)], 12)
    assert_same(network, expected)


@pytest.mark.parametrize(
    ("mode", "pushes", "pulls"), [("sync", "topk", "fp16"), ("async", "none", "bf16")], ids=["sync", "async"]
)
def test_compressed_messages_are_smaller_and_still_train(mode: str, pushes: str, pulls: str, tmp_path: Path) -> None:
    """The servers' own values stay precise."""
    more: dict[str, Any] = {"mode": mode, "compression": pushes, "compression_ratio": 0.05, "pull_compression": pulls}
    with Roles(tmp_path, specify(PLAIN, 1, servers=2, slice_bytes=1 << 16, **more)) as run:
        replica = Replica(partial(run.connect, 0), PLAIN)
        replica.scheduler.step_size = 10**6
        join([replica.worker])
        losses = [replica.step(*batch) for batch in batches(1, 12) * 40]
        replica.worker.wait_all()
        sent, received = replica.worker.counters.bytes_sent, replica.worker.counters.bytes_received
        rounded = [p.detach().clone() for p in replica.parameters]
        replica.worker.refresh()
    whole = [p.detach() for p in replica.parameters]
    elements = sum(p.numel() for p in whole)
    assert losses[-1] < 0.6 * losses[0]
    assert pushes == "none" or sent < 40 * (8 * elements + 6 * 72) / 3.75
    assert received == (8 + 40 * 2) * elements
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}[pulls]
    for lesser, parameter in zip(rounded, whole, strict=True):
        assert torch.equal(lesser, parameter.to(half).double())
        assert not torch.equal(lesser, parameter)


@pytest.mark.light
@pytest.mark.parametrize("mode", [{"mode": "async"}, {"mode": "ssp", "staleness": 2}, {"mode": "sync"}], ids=str)
def test_workers_leave_and_come_back_between_epochs(mode: dict[str, Any], tmp_path: Path) -> None:
    """No push after the return is taken for one of before."""
    parameter = nn.Parameter(torch.zeros(10))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    with Roles(tmp_path, Specification.of([("w", parameter)], optimizer, 2, **mode)) as run:
        found = [run.worker(number) for number in range(2)]
        for _ in range(3):
            join([worker for worker, _ in found])
            for _ in range(5):
                for worker, _ in found:
                    run.begin(worker)
                for worker, _ in found:
                    worker.wait_all()
            for worker, _ in found:
                worker.leave()
        for worker, (value,) in found:
            worker.refresh()
            assert torch.equal(value, torch.full((10,), -15.0 if mode["mode"] == "sync" else -30.0))
