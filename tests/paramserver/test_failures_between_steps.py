"""A server dies while no step is under way: during set-up, while states are fetched, after a worker has left."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from local_cluster import Cluster, wait_for
from ranks import run_apart
from training import SGD, Replica, batches, specify, train_alone

from cnnstrategies.paramserver.errors import ServersUnreachableError

DATA = batches(3, 12)


def train(replica: Replica, first: int) -> None:
    for images, targets in DATA[first:]:
        replica.step(images, targets)
    replica.worker.wait_all()


def stop(cluster: Cluster, server: int) -> None:
    os.kill(cluster.servers[server].pid or 0, signal.SIGSTOP)


def replace(cluster: Cluster, server: int, restarted: bool) -> None:
    """Have a stopped server die after a moment in which something was asked of it."""
    time.sleep(0.3)
    cluster.kill(cluster.servers[server])
    cluster.without_server(server)
    if restarted:
        cluster.start_server(server)


def assert_equal(got: Any, expected: Any) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-12)


def test_a_server_that_dies_before_it_has_answered_a_hello_is_not_waited_for(tmp_path: Path) -> None:
    def work(connect: Callable[..., Any], id: int) -> Any:
        replica = Replica(connect, SGD)
        replica.worker.initialise()
        train(replica, replica.worker.join())
        return replica.network.state_dict()

    expected, _ = run_apart(train_alone, SGD, DATA)
    with Cluster(specify(SGD, 1, servers=2, replication=2), tmp_path) as cluster:
        stop(cluster, 0)  # It leads.
        cluster.start_workers(work)
        replace(cluster, 0, restarted=False)
        assert_equal(cluster.result(0), expected)


def test_a_server_that_is_replaced_before_the_first_step_gets_the_first_values_again(tmp_path: Path) -> None:
    def work(connect: Callable[..., Any], id: int) -> Any:
        replica = Replica(connect, SGD)
        replica.worker.initialise()
        first = replica.worker.join()
        Path("joined").touch()
        wait_for(Path("stopped"))
        train(replica, first)
        return replica.network.state_dict()

    expected, _ = run_apart(train_alone, SGD, DATA)
    with Cluster(specify(SGD, 1), tmp_path) as cluster:
        cluster.start_workers(work)
        wait_for(Path("joined"))
        stop(cluster, 0)
        Path("stopped").touch()
        replace(cluster, 0, restarted=True)
        assert_equal(cluster.result(0), expected)


def test_the_optimizer_state_is_whole_when_a_server_dies_while_it_is_fetched(tmp_path: Path) -> None:
    def work(connect: Callable[..., Any], id: int) -> Any:
        replica = Replica(connect, SGD)
        replica.worker.initialise()
        train(replica, replica.worker.join())
        Path("trained").touch()
        wait_for(Path("stopped"))
        return replica.worker.optimizer_state()

    _, expected = run_apart(train_alone, SGD, DATA)
    with Cluster(specify(SGD, 1, servers=2, replication=2), tmp_path) as cluster:
        cluster.start_workers(work)
        wait_for(Path("trained"))
        stop(cluster, 0)
        Path("stopped").touch()
        replace(cluster, 0, restarted=False)
        got = cluster.result(0)
    assert got["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        assert_equal(got["state"][index], state)


@pytest.mark.parametrize("snapshot", [True, False])
def test_a_worker_that_has_left_hears_what_a_server_that_was_started_again_has(snapshot: bool, tmp_path: Path) -> None:
    def work(connect: Callable[..., Any], id: int) -> Any:
        replica = Replica(connect, SGD)
        replica.worker.initialise()
        train(replica, replica.worker.join())
        replica.worker.leave()
        Path("left").touch()
        wait_for(Path("stopped"))
        try:
            replica.worker.refresh()
        except ServersUnreachableError as error:
            return str(error)
        return "refreshed"

    options = {"snapshot_every": 1, "snapshot_directory": str(tmp_path)} if snapshot else {}
    with Cluster(specify(SGD, 1, mode="ssp", staleness=2, **options), tmp_path) as cluster:
        cluster.start_workers(work)
        wait_for(Path("left"))
        if snapshot:
            wait_for(tmp_path / f"run-{cluster.specification.session:016x}" / "server-0" / "newest")
        stop(cluster, 0)
        Path("stopped").touch()
        replace(cluster, 0, restarted=True)
        result = cluster.result(0)
    assert result == "refreshed" if snapshot else "server 0 was started again, but its slices" in result
