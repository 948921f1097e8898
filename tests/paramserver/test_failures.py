"""Real kills at random moments: what goes on, what is lost, and what the error says."""

import contextlib
import dataclasses
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from local_cluster import Cluster, wait_for
from ranks import run_apart
from torch import Tensor, nn
from training import SGD, Replica, batches, specify, train_alone

from cnnstrategies.paramserver.errors import RemovedError, ServersUnreachableError
from cnnstrategies.paramserver.specification import Specification, hyperparameters

STEPS = 60


def train(connect: Callable[..., Any], id: int, shares: list[slice], steps: int = STEPS, pause: float = 0.005) -> Any:
    """Trains some steps, of which the last come after what the test does meanwhile."""
    replica = Replica(connect, SGD)
    replica.worker.initialise()
    first = replica.worker.join()
    data = batches(steps, 12)
    for step in range(first, steps):
        if step == steps - 3:
            wait_for(Path("goes-on"), 150)
        images, targets = data[step]
        replica.step(images[shares[id]], targets[shares[id]])
        if step > first:  # So that a step has been answered.
            Path(f"trained-{id}").touch()
        time.sleep(pause)
    replica.worker.wait_all()
    replica.worker.leave()
    replica.worker.close()
    return replica.network.state_dict(), first


def until(condition: Callable[[], bool], timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.002)


def all_train(cluster: Cluster) -> None:
    until(lambda: all(Path(f"trained-{worker}").exists() for worker in cluster.workers))


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        error = (got[name] - value).norm() / value.norm().clamp(min=1e-3)
        assert error < 1e-10, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("clip", [None, 0.3])
def test_with_two_copies_a_servers_death_changes_nothing(seed: int, clip: float | None, tmp_path: Path) -> None:
    """One of two servers dies at a random moment, is replaced, and then the other one dies."""

    def clipped(parameters: list[Tensor]) -> None:
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters, clip)

    chance = random.Random(seed)
    expected, _ = run_apart(train_alone, SGD, batches(STEPS, 12), clipped)
    specification = specify(SGD, 2, servers=2, replication=2, clip_norm=clip)
    with Cluster(specification, tmp_path) as cluster:
        cluster.start_workers(train, [slice(0, 6), slice(6, 12)])
        all_train(cluster)
        first, second = chance.sample(range(2), 2)
        for server, restarted in ((first, True), (second, False)):
            time.sleep(chance.uniform(0, 0.1))
            cluster.kill(cluster.servers[server])
            cluster.without_server(server)
            if restarted:
                time.sleep(chance.uniform(0, 0.05))
                cluster.start_server(server)
                until(
                    lambda server=server: cluster.is_filled(server)
                )  # Till then another death may lose what was told.
        Path("goes-on").touch()
        for network, _ in cluster.results():
            assert_same(network, expected)


@pytest.mark.parametrize("seed", range(2))
def test_async_with_two_copies_applies_every_update_exactly_once(seed: int, tmp_path: Path) -> None:
    parameters = [nn.Parameter(torch.zeros(1000)) for _ in range(4)]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    named = [(str(i), p) for i, p in enumerate(parameters)]
    specification = Specification.of(
        named, optimizer, 2, mode="async", servers=3, replication=2, slice_bytes=1024, timeout=60.0
    )

    def count(connect: Callable[..., Any], id: int) -> list[Tensor]:
        values = [torch.zeros(1000) for _ in range(4)]
        worker = connect(values)
        worker.initialise()
        worker.join()
        for step in range(100):
            if step == 97:
                wait_for(tmp_path / "goes-on")
            worker.begin_step(hyperparameters(optimizer), 1)
            for index in reversed(range(4)):
                worker.push(index, torch.ones(1000))
            worker.end_step()
            worker.wait_all()
            time.sleep(0.003)
        (tmp_path / f"done-{id}").touch()
        until(lambda: all((tmp_path / f"done-{other}").exists() for other in range(2)))
        worker.refresh()
        return values

    chance = random.Random(seed)
    with Cluster(specification, tmp_path) as cluster:
        cluster.start_workers(count)
        time.sleep(chance.uniform(0.05, 0.25))
        server = chance.randrange(3)
        cluster.kill(cluster.servers[server])
        cluster.without_server(server)
        (tmp_path / "goes-on").touch()
        for values in cluster.results():
            for value in values:
                assert torch.equal(value, torch.full((1000,), -200.0))


@pytest.mark.parametrize("seed", range(4))
def test_sync_goes_on_with_the_workers_that_are_left(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    with Cluster(specify(SGD, 3, servers=2), tmp_path) as cluster:
        cluster.start_workers(train, [slice(0, 4), slice(4, 8), slice(8, 12)])
        all_train(cluster)
        time.sleep(chance.uniform(0, 0.2))
        victim = chance.randrange(3)
        cluster.kill(cluster.workers.pop(victim))
        cluster.without_worker(victim)
        Path("goes-on").touch()
        results = cluster.results()
        logs = [cluster.server_report(server)["log"] for server in range(2)]
    assert logs[0] == logs[1], "every server saw the same members in every step"
    assert [step for step, _ in logs[0]] == list(range(STEPS))
    sizes = [len(members) for _, members in logs[0]]
    assert sizes == sorted(sizes, reverse=True)
    assert set(sizes) == {2, 3}
    for name, value in results[0][0].items():
        assert torch.equal(value, results[1][0][name])


def test_a_new_worker_joins_at_a_step_boundary_with_the_present_parameters(tmp_path: Path) -> None:
    with Cluster(specify(SGD, 2, servers=2), tmp_path) as cluster:
        cluster.start_workers(train, [slice(0, 6), slice(6, 12)], 60)
        all_train(cluster)
        cluster.with_worker(2)
        cluster.start_worker(2, train, [slice(0, 6), slice(6, 12), slice(0, 12)], 60)
        until(lambda: Path("trained-2").exists())
        Path("goes-on").touch()
        results = cluster.results()
        logs = [cluster.server_report(server)["log"] for server in range(2)]
    first = results[2][1]
    assert 0 < first < 60
    assert logs[0] == logs[1]
    assert all((2 in members) == (step >= first) for step, members in logs[0])
    for name, value in results[0][0].items():
        assert torch.equal(value, results[2][0][name])


def test_a_stopped_worker_is_told_that_it_was_removed(tmp_path: Path) -> None:
    def stopped(connect: Callable[..., Any], id: int, shares: list[slice]) -> Any:
        if id == 0:
            return train(connect, id, shares)
        with pytest.raises(RemovedError, match=r"worker 1 \(incarnation 0\) is no longer in the view"):
            train(connect, id, shares, 3000)
        return None

    with Cluster(specify(SGD, 2), tmp_path) as cluster:
        cluster.start_workers(stopped, [slice(0, 6), slice(6, 12)])
        all_train(cluster)
        pid = cluster.workers[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        cluster.without_worker(1)
        Path("goes-on").touch()
        cluster.result(0)
        os.kill(pid, signal.SIGCONT)
        cluster.result(1)


def test_a_server_that_is_lost_without_a_copy_is_named(tmp_path: Path) -> None:
    def lose(connect: Callable[..., Any], id: int) -> None:
        with pytest.raises(ServersUnreachableError, match=r"server 1 died, and .* slices of the parameters with it"):
            train(connect, id, [slice(0, 6)])

    with Cluster(specify(SGD, 1, servers=2, timeout=3.0), tmp_path) as cluster:
        cluster.start_workers(lose)
        all_train(cluster)
        cluster.kill(cluster.servers[1])
        cluster.without_server(1)
        Path("goes-on").touch()
        cluster.results()


def test_a_server_that_was_restarted_without_values_is_named(tmp_path: Path) -> None:
    def lose(connect: Callable[..., Any], id: int) -> None:
        with pytest.raises(ServersUnreachableError, match="server 1 was started again, but its slices"):
            train(connect, id, [slice(0, 6)])

    with Cluster(specify(SGD, 1, servers=2), tmp_path) as cluster:
        cluster.start_workers(lose)
        all_train(cluster)
        cluster.kill(cluster.servers[1])
        cluster.start_server(1)
        Path("goes-on").touch()
        cluster.results()


@pytest.mark.parametrize("mode", [{"mode": "async"}, {"mode": "ssp", "staleness": 2}], ids=["async", "ssp"])
def test_others_do_not_wait_for_a_dead_worker(mode: dict[str, Any], tmp_path: Path) -> None:
    with Cluster(specify(SGD, 3, servers=2, **mode), tmp_path) as cluster:
        cluster.start_workers(train, [slice(0, 4), slice(4, 8), slice(8, 12)])
        all_train(cluster)
        cluster.kill(cluster.workers.pop(1))
        cluster.without_worker(1)
        Path("goes-on").touch()
        cluster.results()
        log = cluster.server_report(0)["log"]
    assert (0, STEPS) in log
    assert (2, STEPS) in log


class Cable:
    """Between workers and a server; can be cut, so that bytes that are on their way are lost."""

    def __init__(self, path: Path, server: str) -> None:
        self._server = server.removeprefix("ipc://")
        self._ends: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = socket.socket(socket.AF_UNIX)
            far.connect(self._server)
            self._ends += [near, far]
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1000):
                target.sendall(data)

    def cut(self) -> None:
        ends, self._ends = self._ends, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


CUT = [{"mode": "sync"}, {"mode": "async"}, {"servers": 2, "replication": 2}, {"servers": 2, "clip_norm": 0.3}]


@pytest.mark.parametrize("options", CUT, ids=["sync", "async", "copies", "clipped"])
def test_what_a_cut_link_loses_is_sent_again(options: dict[str, Any], tmp_path: Path) -> None:
    """All links to a server are cut: the worker's, and those of the other server."""

    def clipped(parameters: list[Tensor]) -> None:
        if "clip_norm" in options:
            nn.utils.clip_grad_norm_(parameters, options["clip_norm"])

    expected, _ = run_apart(train_alone, SGD, batches(20, 12), clipped)
    with Cluster(specify(SGD, 1, **options), tmp_path) as cluster:
        servers = cluster.view.servers
        for server in servers:
            until(lambda: Path(server.endpoint.removeprefix("ipc://")).exists())  # noqa: B023
        behind = [dataclasses.replace(server, endpoint=f"ipc://{tmp_path}/cable-{server.id}") for server in servers]
        cluster.publish(servers=tuple(behind))
        cluster.start_workers(train, [slice(0, 12)], 20, 0.02)
        cables = [Cable(tmp_path / f"cable-{server.id}", server.endpoint) for server in servers]
        all_train(cluster)
        chance = random.Random(0)
        cuts = 0
        while cluster.workers[0].is_alive():
            time.sleep(chance.uniform(0, 0.1))
            chance.choice(cables).cut()
            cuts += 1
            if cuts == 3:
                Path("goes-on").touch()
        assert_same(cluster.result(0)[0], expected)
