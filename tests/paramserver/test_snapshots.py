"""A server is killed, and the one in its place goes on from the last snapshot."""

import contextlib
import os
import random
import resource
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from local_cluster import Cluster, wait_for
from ranks import run_apart
from training import SGD, Replica, batches, specify, train_alone

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.drivers import snapshot_files
from cnnstrategies.paramserver.drivers.server import ServerService
from cnnstrategies.paramserver.drivers.snapshot_files import _Summed, read
from cnnstrategies.paramserver.drivers.snapshots import SnapshotWriter
from cnnstrategies.paramserver.effects import Effects, Parcel, Say
from cnnstrategies.paramserver.messages import Header, Kind
from cnnstrategies.paramserver.server import roll_call
from cnnstrategies.paramserver.server.server import Server
from cnnstrategies.paramserver.server.snapshots import Snapshots
from cnnstrategies.paramserver.server.store import Store
from cnnstrategies.paramserver.slicing import cut
from cnnstrategies.paramserver.specification import Specification
from cnnstrategies.paramserver.worker.worker import WorkerRole

STEPS = 60
SHARES = [slice(0, 6), slice(6, 12)]


def train(connect: Callable[..., Any], id: int, pause_before: int | None = None, killed: bool = False) -> Any:
    """Trains `STEPS` steps; may wait before one of them until the test goes on, or at the end until it has killed."""
    replica = Replica(connect, SGD)
    replica.worker.initialise()
    data = batches(STEPS, 12)
    for step in range(replica.worker.join(), STEPS):
        if step == pause_before:
            replica.worker.wait_all()
            Path("paused").touch()
            wait_for(Path("goes-on"))
        if killed and step == STEPS - 5:
            wait_for(Path("killed"))
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
def test_a_server_killed_at_any_moment_says_what_is_lost(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roll_call, "PATIENCE_SECONDS", 60.0)
    chance = random.Random(seed)
    options = {"snapshot_every": 25, "snapshot_directory": str(tmp_path / "snapshots")}
    with Cluster(specify(SGD, 2, servers=2, **options), tmp_path) as cluster:
        cluster.start_workers(train, None, True)
        for worker in range(2):
            wait_for(tmp_path / f"trained-{worker}")
        time.sleep(chance.uniform(0, 0.2))
        cluster.kill(cluster.servers[1])
        replace(cluster, 1)
        Path("killed").touch()
        # The snapshot is begun when the 25th step is applied; others are made while it is being written.
        assert_went_on(cluster, cluster.results(), range(50))


def die_in_the_middle_of_a_step(monkeypatch: pytest.MonkeyPatch, server: int, version: int, slices: int) -> None:
    """Have a server killed when some of its slices are answered with a version, and the others not yet."""
    act, on_message = ServerService._act, WorkerRole.on_message
    done: set[int] = set()
    answers: set[tuple[int | bytes, int]] = set()

    def last_act(self: ServerService, effects: Effects) -> None:
        for effect in effects:
            act(self, [effect])
            if self.role.id != server or not isinstance(effect, Parcel) or effect.header.kind != Kind.PULLED:
                continue
            if effect.header.base >= version:
                done.add(effect.header.key)
                answers.add((effect.to, effect.header.key))
            if len(done) == slices and not Path("dead").exists():
                for bundle in self._bundles.values():
                    bundle.flush()
                while len(list(Path().glob("answered-*"))) < len(answers):
                    time.sleep(0.002)
                while not list(Path("snapshots").glob(f"run-*/server-{server}/newest")):
                    time.sleep(0.002)  # A thread writes the first one, and may take longer than some steps.
                Path("dead").touch()
                os.kill(os.getpid(), signal.SIGKILL)

    def note(self: WorkerRole, sender: int, header: Header, payload: memoryview) -> None:
        on_message(self, sender, header, payload)
        if sender == server and header.kind == Kind.PULLED and header.base >= version:
            Path(f"answered-{os.getpid()}-{header.key}").touch()

    monkeypatch.setattr(ServerService, "_act", last_act)
    monkeypatch.setattr(WorkerRole, "on_message", note)


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
    monkeypatch.setattr(roll_call, "PATIENCE_SECONDS", 60.0)
    die_in_the_middle_of_a_step(monkeypatch, servers - 1, 10, slices)
    options = {"snapshot_every": 100, "snapshot_directory": str(tmp_path / "snapshots"), **options}
    with Cluster(specify(SGD, 2, servers=servers, **options), tmp_path) as cluster:
        cluster.start_workers(train)
        wait_for(tmp_path / "dead")
        replace(cluster, servers - 1)
        results = cluster.results()
        if options["mode"] == "sync":
            assert_went_on(cluster, results, range(10, 11))


def wait_for_snapshot(directory: Path, version: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for path in directory.glob("run-*/server-0/newest"):
            with contextlib.suppress(FileNotFoundError):
                if set(read(path)["versions"].values()) == {version}:
                    return
        time.sleep(0.01)
    raise AssertionError(f"no snapshot of version {version}")


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
        wait_for_snapshot(tmp_path, 2)
        cluster.kill(cluster.servers[0])
        replace(cluster, 0)
        Path("goes-on").touch()
        cluster.results()


def test_a_snapshot_of_the_present_step_loses_nothing(tmp_path: Path) -> None:
    expected, _ = run_apart(train_alone, SGD, batches(STEPS, 12))
    options = {"snapshot_every": 1, "snapshot_directory": str(tmp_path)}
    with Cluster(specify(SGD, 1, **options), tmp_path) as cluster:
        cluster.start_workers(train, 2)
        wait_for(tmp_path / "paused")
        wait_for_snapshot(tmp_path, 2)
        cluster.kill(cluster.servers[0])
        replace(cluster, 0)
        Path("goes-on").touch()
        got = cluster.result(0)
        assert cluster.server_report(0)["lost"] == 0
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-12)


def specification_with(directory: Path, session: int = 5) -> Specification:
    return specify(SGD, 1, snapshot_every=1, snapshot_directory=str(directory), session=session)


class SnapshotsOfOne:
    """When they are due, and what writes them."""

    def __init__(self, specification: Specification) -> None:
        self.writer = SnapshotWriter(specification, 0)
        self.errors: list[str] = []
        self._plan = Snapshots(specification.snapshot_every, False)

    def after(self, updates: int, store: Store) -> bool:
        """Write one if it is due; whether it was."""
        save = self._plan.after(updates, store)
        if save is None:
            return False
        self.writer.begin(save.contents)
        assert self._plan.after(updates + 1, store) is None, "one at a time"
        error = self.writer.result()
        self._plan.written(error is None)
        self.errors += [error] if error is not None else []
        return True

    def close(self, remove: bool = False) -> None:
        self.writer.close(remove)


def some_snapshots(directory: Path, **options: Any) -> tuple[SnapshotsOfOne, Store]:
    """Of a store of ones, at version 3."""
    specification = specify(
        SGD, 1, **{"snapshot_every": 1, "snapshot_directory": str(directory), "session": 5} | options
    )
    store = Store(specification, cut(specification))
    for key, slice_ in store.slices.items():
        store.put(key, torch.ones(slice_.numel, dtype=slice_.dtype), 3)
    return SnapshotsOfOne(specification), store


def written(snapshots: SnapshotsOfOne, store: Store, updates: int) -> Path:
    assert snapshots.after(updates, store)
    assert snapshots.writer.files is not None
    return snapshots.writer.files.newest


def restored(directory: Path, **options: Any) -> Store | None:
    """What a server that replaces another finds."""
    specification = specify(
        SGD, 1, **{"snapshot_every": 1, "snapshot_directory": str(directory), "session": 5} | options
    )
    store = Store(specification, cut(specification))
    snapshots = SnapshotWriter(specification, 0)
    found = snapshots.load(store)
    snapshots.close()
    return store if found else None


def versions(store: Store | None) -> set[int]:
    return set() if store is None else set(store.versions.values())


def test_a_server_goes_on_with_all_that_its_snapshot_holds(tmp_path: Path) -> None:
    snapshots, store = some_snapshots(tmp_path)
    for key, value in store.values.items():
        store.set_state(key, "momentum_buffer", torch.full_like(value, 2.0))
        store.seen[key][1, 2] = 6
    store.decided = {"step": 2}
    written(snapshots, store, 0)
    snapshots.close()
    found = restored(tmp_path)
    assert found is not None
    assert found.seen == store.seen
    assert found.decided == store.decided
    assert found.versions == store.versions
    for key, value in store.values.items():
        assert torch.equal(found.values[key], value)
        assert found.state(key).keys() == store.state(key).keys()
        assert torch.equal(found.state(key)["momentum_buffer"], store.state(key)["momentum_buffer"])


def test_a_full_disk_costs_a_snapshot_and_not_the_run(tmp_path: Path) -> None:
    snapshots, store = some_snapshots(tmp_path)
    written(snapshots, store, 0)
    store.versions = dict.fromkeys(store.versions, 4)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    begun = [updates for updates in range(1, 30) if snapshots.after(updates, store)]
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(begun) <= 6, "it tries again after ever longer pauses"
    snapshots.close()
    assert len(snapshots.errors) == len(begun)
    assert snapshots.errors[0].startswith("[Errno 27]")
    (said,) = Server(specification_with(tmp_path), 0, store).on_saved(snapshots.errors[0])
    assert isinstance(said, Say)
    assert said.urgent
    assert said.text.startswith("server 0 could not write a snapshot: [Errno 27]")
    assert versions(restored(tmp_path)) == {3}
    assert sorted(path.name for path in tmp_path.glob("run-*/server-0/*")) == ["lock", "newest"]


def test_a_flipped_bit_is_refused_by_name_and_the_generation_before_is_used(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    snapshots, store = some_snapshots(tmp_path)
    path = written(snapshots, store, 0)
    store.versions = dict.fromkeys(store.versions, 4)
    written(snapshots, store, 1)
    snapshots.close()
    assert versions(restored(tmp_path)) == {4}
    data = bytearray(path.read_bytes())
    data[data.index(torch.ones(20, dtype=torch.float64).numpy().tobytes()) + 3] ^= 0x40
    path.write_bytes(data)
    assert versions(restored(tmp_path)) == {3}
    assert f"{path} is damaged" in capfd.readouterr().err
    (path.parent / "before").write_bytes(path.read_bytes()[:300])
    assert restored(tmp_path) is None


def crash_at(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """End this process before one of the calls that change the disk."""
    writes = calls = 0

    def count(name: str) -> None:
        nonlocal writes, calls
        writes += name == "write"
        calls += name != "write" or writes % 100 == 50  # There are many small ones.
        if calls == call:
            os._exit(1)

    for owner, name in ((Path, "replace"), (Path, "unlink"), (os, "fsync"), (os, "open"), (_Summed, "write")):
        original = getattr(owner, name)
        instead = lambda *a, original=original, name=name, **k: (count(name), original(*a, **k))[1]  # noqa: E731
        monkeypatch.setattr(owner, name, instead)


def test_a_crash_at_any_write_leaves_a_whole_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots, store = some_snapshots(tmp_path)
    written(snapshots, store, 0)
    snapshots.close()
    last, crash = 3, 0
    while crash < 20:
        crash += 1
        store.versions = dict.fromkeys(store.versions, last + 1)
        pid = os.fork()
        if pid == 0:
            files = some_snapshots(tmp_path)[0].writer.files
            assert files is not None
            crash_at(crash, monkeypatch)
            files.write(store.contents())
            os._exit(0)
        _, code = os.waitpid(pid, 0)
        found = versions(restored(tmp_path))
        assert found in ({last}, {last + 1})
        (last,) = found
        if code == 0:
            assert crash > 7
            assert last == store.versions[0]
            return
    raise AssertionError("it went on and on")


def test_snapshots_are_for_their_owner_and_two_runs_cannot_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_files, "DYING_SECONDS", 0.1)
    snapshots, store = some_snapshots(tmp_path)
    path = written(snapshots, store, 0)
    modes = [stat.S_IMODE(one.stat().st_mode) for one in (path, path.parent, path.parent.parent)]
    assert [f"{mode:o}" for mode in modes] == ["600", "700", "700"]
    other, theirs = some_snapshots(tmp_path, session=6)
    theirs.versions = dict.fromkeys(theirs.versions, 9)
    written(other, theirs, 0)
    with pytest.raises(ConfigurationError, match="another process writes the snapshots in"):
        some_snapshots(tmp_path)
    other.close(remove=True)
    snapshots.close()
    assert versions(restored(tmp_path)) == {3}
    assert [one.name for one in tmp_path.iterdir()] == ["run-0000000000000005"]
    path.parent.chmod(0o755)
    with pytest.raises(ConfigurationError, match="is not a directory of this user's alone"):
        some_snapshots(tmp_path)
