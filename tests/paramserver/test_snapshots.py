"""A server is killed, and the one in its place goes on from the last snapshot."""

import os
import random
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

from cnnstrategies.paramserver.shard import Shard
from cnnstrategies.paramserver.slicing import cut
from cnnstrategies.paramserver.snapshots import Snapshots
from cnnstrategies.paramserver.store import Store

STEPS = 60
SHARES = [slice(0, 6), slice(6, 12)]


def train(connect: Callable[..., Any], id: int, pause_before: int | None = None) -> Any:
    """Trains `STEPS` steps; may wait before one of them until the test goes on."""
    replica = Replica(connect, SGD)
    replica.worker.initialise()
    data = batches(STEPS, 12)
    for step in range(replica.worker.join(), STEPS):
        if step == pause_before:
            replica.worker.wait_all()
            Path("paused").touch()
            wait_for(Path("goes-on"))
        images, targets = data[step]
        share = slice(0, 12) if pause_before is not None else SHARES[id]
        replica.step(images[share], targets[share])
        Path(f"trained-{id}").touch()
        time.sleep(0.005)
    replica.worker.wait_all()
    replica.worker.leave()
    return replica.network.state_dict()


def replace(cluster: Cluster, server: int) -> None:
    cluster.without_server(server)
    cluster.start_server(server)


def assert_went_on(cluster: Cluster, results: list[Any], lost: range) -> None:
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name])
    *others, last = [cluster.server_report(server) for server in cluster.servers]
    assert last["lost"] in lost
    made = [members for _, members in last["log"] if members]
    assert set(made) == {frozenset(range(2))}, "no worker's gradient is missing in a step that was not lost"
    for other in others:
        assert other["lost"] == 0
        assert [step for step, _ in other["log"]] == list(range(STEPS))


@pytest.mark.parametrize("seed", range(4))
def test_a_server_killed_at_any_moment_says_what_is_lost(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    options = {"snapshot_every": 25, "snapshot_directory": str(tmp_path / "snapshots")}
    with Cluster(specify(SGD, 2, servers=2, **options), tmp_path) as cluster:
        cluster.start_workers(train)
        for worker in range(2):
            wait_for(tmp_path / f"trained-{worker}")
        time.sleep(chance.uniform(0, 0.2))
        cluster.kill(cluster.servers[1])
        replace(cluster, 1)
        # The snapshot is written when the 25th step is applied; the 26th may be answered to some.
        assert_went_on(cluster, cluster.results(timeout=20), range(27))


def die_in_the_middle_of_a_step(monkeypatch: pytest.MonkeyPatch, server: int, version: int, slices: int) -> None:
    """Have a server killed when some of its slices are answered with a version, and the others not yet."""
    answer = Shard.answer
    done: set[int] = set()

    def last_answer(self: Shard, key: int) -> None:
        answer(self, key)
        if self._replicas._server == server and self.store.versions[key] == version and not Path("dead").exists():
            done.add(key)
            if len(done) == slices:
                self._post.flush()
                time.sleep(0.2)  # Until the answers have left.
                Path("dead").touch()
                os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(Shard, "answer", last_answer)


MODES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync"},
    "clipped": {"mode": "sync", "clip_norm": 0.3},
    "async": {"mode": "async"},
    "ssp": {"mode": "ssp", "staleness": 1},
}


@pytest.mark.parametrize("options", MODES.values(), ids=MODES.keys())
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("slices", [1, 4])
def test_what_was_answered_of_a_step_is_not_waited_for_again(
    slices: int, servers: int, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    die_in_the_middle_of_a_step(monkeypatch, servers - 1, 10, slices)
    options = {"snapshot_every": 100, "snapshot_directory": str(tmp_path / "snapshots"), **options}
    with Cluster(specify(SGD, 2, servers=servers, **options), tmp_path) as cluster:
        cluster.start_workers(train)
        wait_for(tmp_path / "dead")
        replace(cluster, servers - 1)
        results = cluster.results(timeout=10)
        if options["mode"] == "sync":
            assert_went_on(cluster, results, range(10, 11))


def wait_for_snapshot(path: Path, version: int) -> None:
    wait_for(path)
    while set(torch.load(path)["versions"].values()) != {version}:
        time.sleep(0.01)


def test_a_worker_that_has_left_is_not_waited_for(tmp_path: Path) -> None:
    def work(connect: Callable[..., Any], id: int) -> Any:
        if id == 0:
            return train(connect, id, 2)
        replica = Replica(connect, SGD)
        replica.worker.join()
        replica.worker.leave()
        wait_for(tmp_path / "result-0")
        return None

    options = {"snapshot_every": 1, "snapshot_directory": str(tmp_path)}
    with Cluster(specify(SGD, 2, **options), tmp_path) as cluster:
        cluster.start_workers(work)
        wait_for(tmp_path / "paused")
        wait_for_snapshot(tmp_path / "server-0.pt", 2)
        cluster.kill(cluster.servers[0])
        replace(cluster, 0)
        Path("goes-on").touch()
        cluster.results(timeout=15)


def test_a_snapshot_of_the_present_step_loses_nothing(tmp_path: Path) -> None:
    expected, _ = run_apart(train_alone, SGD, batches(STEPS, 12))
    options = {"snapshot_every": 1, "snapshot_directory": str(tmp_path)}
    with Cluster(specify(SGD, 1, **options), tmp_path) as cluster:
        cluster.start_workers(train, 2)
        wait_for(tmp_path / "paused")
        wait_for_snapshot(tmp_path / "server-0.pt", 2)
        cluster.kill(cluster.servers[0])
        replace(cluster, 0)
        Path("goes-on").touch()
        got = cluster.result(0)
        assert cluster.server_report(0)["lost"] == 0
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-12)


def test_a_snapshot_that_is_not_written_to_its_end_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specification = specify(SGD, 1, snapshot_every=1, snapshot_directory=str(tmp_path))
    store, restored = (Store(specification, cut(specification)) for _ in range(2))
    for key, slice_ in store.slices.items():
        store.put(key, torch.ones(slice_.numel, dtype=slice_.dtype), 3)
    snapshots = Snapshots(specification, 0)
    assert snapshots.after(3, store)

    def fails(contents: Any, file: Any) -> None:
        file.write(b"a part")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(OSError, match="no space"):
        snapshots.after(4, store)
    assert Snapshots(specification, 0).load(restored)
    for key, values in store.values.items():
        assert torch.equal(restored.values[key], values)
        assert restored.versions[key] == 3
