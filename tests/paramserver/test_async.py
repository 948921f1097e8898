"""Modes in which workers run on their own: async, ssp; compression and delay compensation."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from local_cluster import Cluster, wait_for
from ranks import run_apart
from torch import Tensor, nn
from training import SGD, Replica, batches, make_network, specify, train_alone

from cnnstrategies.paramserver.specification import Specification

PLAIN = {"name": "SGD", "lr": 0.05}


def run(
    connect: Callable[..., Any], id: int, options: dict[str, Any], steps: int, slow: int = -1, until: int = 0
) -> Any:
    """Train; one worker that is slow stays after its third step until the others have made some number of steps."""
    replica = Replica(connect, options)
    replica.worker.initialise()
    replica.worker.join()
    losses = []
    for step, (images, targets) in enumerate(batches(steps, 12), 1):
        losses.append(replica.step(images, targets))
        Path(f"made-{step}-{id}").touch()
        if id == slow and step == 3:
            replica.worker.wait_all()
            for other in range(id):
                wait_for(Path(f"made-{until}-{other}"))
            time.sleep(0.05)  # If they went further, they would now.
    replica.worker.wait_all()
    replica.worker.leave()
    replica.worker.close()
    return losses, replica.network.state_dict(), replica.worker.counters


@pytest.mark.parametrize("mode", [{"mode": "async"}, {"mode": "ssp", "staleness": 2}], ids=["async", "ssp"])
def test_one_worker_alone_trains_as_one_process(mode: dict[str, Any], tmp_path: Path) -> None:
    expected, _ = run_apart(train_alone, SGD, batches(5, 12))
    with Cluster(specify(SGD, 1, servers=2, **mode), tmp_path) as cluster:
        cluster.start_workers(run, SGD, 5)
        network = cluster.results()[0][1]
    for name, value in expected.items():
        torch.testing.assert_close(network[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("staleness", [1, 3])
def test_no_worker_runs_further_ahead_than_the_staleness(staleness: int, tmp_path: Path) -> None:
    with Cluster(specify(PLAIN, 3, servers=2, mode="ssp", staleness=staleness), tmp_path) as cluster:
        # With three steps finished the slowest lets the others make the fourth, and as many as are allowed beyond it.
        cluster.start_workers(run, PLAIN, 12, 2, 3 + 1 + staleness)
        cluster.results()
        reports = [cluster.server_report(server) for server in range(2)]
    for report in reports:
        clocks: dict[int, int] = {}
        furthest = 0
        for worker, clock in report["log"]:
            if clock < 0:
                clocks.pop(worker)
                continue
            clocks[worker] = clock
            if len(clocks) == 3:
                # A worker with clock c had begun step c - 1 when the slowest had finished c - 1 - staleness steps.
                furthest = max(furthest, clock - 1 - min(clocks.values()))
        assert furthest <= staleness


def test_async_workers_do_not_wait_for_a_slow_one(tmp_path: Path) -> None:
    with Cluster(specify(PLAIN, 2, mode="async"), tmp_path) as cluster:
        cluster.start_workers(run, PLAIN, 10, 1, 10)
        cluster.results()
        log = cluster.server_report(0)["log"]
    fast = log.index((0, 10))
    assert max((clock for worker, clock in log[:fast] if worker == 1), default=0) <= 3


@pytest.mark.parametrize(("compression", "smaller"), [("fp16", 2), ("bf16", 2), ("topk", 5), ("onebit", 9)])
def test_compressed_pushes_are_smaller_and_still_train(compression: str, smaller: float, tmp_path: Path) -> None:
    options = specify(PLAIN, 2, compression=compression, compression_ratio=0.05, slice_bytes=1 << 16)
    with Cluster(options, tmp_path) as cluster:
        cluster.start_workers(fit_one_batch)
        (first, last, counters), _ = cluster.results()
    plain = 40 * (8 * sum(p.numel() for p in make_network().parameters()) + 6 * 72)
    assert plain / counters.bytes_sent > smaller * 0.75
    assert last < 0.6 * first


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_compressed_pulls_are_half_as_large_and_the_servers_keep_their_precision(
    mode: str, compression: str, tmp_path: Path
) -> None:
    def train(connect: Callable[..., Any], id: int) -> Any:
        replica = Replica(connect, PLAIN | {"lr": 0.3})
        first, last, received = fit(replica)
        rounded = [p.detach().clone() for p in replica.parameters]
        replica.worker.refresh()
        return first, last, received, rounded, [p.detach() for p in replica.parameters]

    options = specify(PLAIN, 1, mode=mode, pull_compression=compression, servers=2)
    with Cluster(options, tmp_path) as cluster:
        cluster.start_workers(train)
        ((first, last, received, rounded, whole),) = cluster.results()
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}[compression]
    assert received == (8 + 40 * 2) * sum(p.numel() for p in whole)
    assert last < 0.6 * first
    for lesser, parameter in zip(rounded, whole, strict=True):
        assert torch.equal(lesser, parameter.to(half).double())
        assert not torch.equal(lesser, parameter)


def fit(replica: Replica) -> tuple[float, float, int]:
    replica.scheduler.step_size = 10**6
    replica.worker.initialise()
    replica.worker.join()
    losses = [replica.step(*batch) for batch in batches(1, 12) * 40]
    replica.worker.wait_all()
    return losses[0], losses[-1], replica.worker.counters.bytes_received


def fit_one_batch(connect: Callable[..., Any], id: int) -> Any:
    replica = Replica(connect, PLAIN | {"lr": 0.3})
    first, last, _ = fit(replica)
    return first, last, replica.worker.counters


def test_async_clips_the_norm_of_each_workers_gradient(tmp_path: Path) -> None:
    def clip(parameters: list[Tensor]) -> None:
        nn.utils.clip_grad_norm_(parameters, 0.3)

    expected, _ = run_apart(train_alone, SGD, batches(5, 12), clip)
    with Cluster(specify(SGD, 1, mode="async", clip_norm=0.3), tmp_path) as cluster:
        cluster.start_workers(run, SGD, 5)
        network = cluster.results()[0][1]
    for name, value in expected.items():
        torch.testing.assert_close(network[name], value, rtol=1e-10, atol=1e-12)


def test_delay_compensation_adds_the_gradient_squared_times_the_distance(tmp_path: Path) -> None:
    """Zheng et al. 2017, equation 10, on two workers in turn: 1 pulls, 0 steps, 1 pushes what it computed before."""

    def turn(connect: Callable[..., Any], id: int) -> Tensor:
        weight = nn.Parameter(torch.ones(8))
        worker = connect([weight.data])
        worker.initialise()
        worker.join()
        gradient = torch.full((8,), 2.0)
        ready, done = tmp_path / "ready", tmp_path / "done"
        options = specification.groups[0].options
        if id == 1:  # a first step without effect, so that this worker has pulled in the usual way
            worker.begin_step([options], 1)
            worker.push(0, torch.zeros(8))
            worker.end_step()
            worker.wait_all()
            ready.touch()
            wait_for(done)
        else:
            wait_for(ready)
        worker.begin_step([options], 1)
        worker.push(0, gradient)
        worker.end_step()
        worker.wait_all()
        if id == 0:
            done.touch()
        return weight.detach().clone()

    parameter = nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    specification = Specification.of([("w", parameter)], optimizer, 2, mode="async", delay_compensation=0.5)
    with Cluster(specification, tmp_path) as cluster:
        cluster.start_workers(turn)
        _, last = cluster.results()
    moved = 1.0 - 0.1 * 2.0
    torch.testing.assert_close(last, torch.full((8,), moved - 0.1 * (2.0 + 0.5 * 4.0 * (moved - 1.0))))


@pytest.mark.parametrize("mode", [{"mode": "async"}, {"mode": "ssp", "staleness": 2}, {"mode": "sync"}], ids=str)
def test_workers_leave_and_come_back_between_epochs(mode: dict[str, Any], tmp_path: Path) -> None:
    """No push after the return is taken for one of before."""

    def train(connect: Callable[..., Any], id: int) -> Tensor:
        value = torch.zeros(10)
        worker = connect([value])
        worker.initialise()
        for epoch in range(3):
            worker.join()
            for _ in range(5):
                worker.wait_all()
                worker.begin_step([specification.groups[0].options], 1)
                worker.push(0, torch.ones(10))
                worker.end_step()
            worker.leave()
            (tmp_path / f"epoch-{epoch}-{id}").touch()
            wait_for(tmp_path / f"epoch-{epoch}-{1 - id}")
        worker.refresh()
        return value

    parameter = nn.Parameter(torch.zeros(10))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    specification = Specification.of([("w", parameter)], optimizer, 2, **mode)
    with Cluster(specification, tmp_path) as cluster:
        cluster.start_workers(train)
        results = cluster.results()
        log = cluster.server_report(0)["log"]
    updates = len(log) if mode["mode"] == "sync" else 2 * 3 * 5
    for value in results:
        assert torch.equal(value, torch.full((10,), -float(updates)))
