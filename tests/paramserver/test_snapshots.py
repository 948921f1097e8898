"""A server is killed, and the one in its place goes on from the last snapshot."""

import contextlib
import os
import resource
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from roles import PlainRoles, until
from training import SGD, specify

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.drivers import snapshot_files
from cnnstrategies.paramserver.drivers.snapshot_files import SummedFile, read
from cnnstrategies.paramserver.drivers.snapshots import SnapshotWriter
from cnnstrategies.paramserver.effects import Say
from cnnstrategies.paramserver.errors import ServersUnreachableError
from cnnstrategies.paramserver.server.server import Server
from cnnstrategies.paramserver.server.snapshots import Snapshots
from cnnstrategies.paramserver.server.store import Store
from cnnstrategies.paramserver.slicing import cut
from cnnstrategies.paramserver.specification import Specification


def is_saved(directory: Path, version: int) -> bool:
    """Whether the newest snapshot of the only server is of a version."""
    for path in directory.glob("run-*/server-0/newest"):
        with contextlib.suppress(FileNotFoundError):
            return set(read(path)["versions"].values()) == {version}
    return False


@pytest.mark.light
@pytest.mark.parametrize("mode", [{}, {"mode": "async"}], ids=["sync", "async"])
def test_a_snapshot_of_the_present_step_loses_nothing(mode: dict[str, Any], tmp_path: Path) -> None:
    """Nor does a server that comes back wait for a worker that has left."""
    options = {"snapshot_every": 1, "snapshot_directory": str(tmp_path)}
    with PlainRoles(tmp_path, (40, 30), workers=2, **mode, **options) as run:
        (worker, values), (other, _) = run.all_joined()
        other.leave()
        for step in range(4):
            if step == 2:
                until(lambda: is_saved(tmp_path, 2))
                run.kill(0)
                run.serve_again(0)
            run.step(worker)
        assert run.servers[0].lost_updates == 0
    for value in values:
        torch.testing.assert_close(value, torch.full_like(value, -0.5 * (1 + 1.5 + 1.75 + 1.875)))


@pytest.mark.light
@pytest.mark.parametrize("snapshot", [True, False])
def test_a_worker_that_has_left_hears_what_a_server_that_was_started_again_has(snapshot: bool, tmp_path: Path) -> None:
    options = {"snapshot_every": 1, "snapshot_directory": str(tmp_path)} if snapshot else {}
    with PlainRoles(tmp_path, mode="ssp", staleness=2, **options) as run:
        worker, (value,) = run.joined()
        run.step(worker)
        worker.leave()
        if snapshot:
            until(lambda: is_saved(tmp_path, 1))
        run.kill(0)
        threading.Timer(0.1, run.serve_again, args=(0,)).start()
        if snapshot:
            worker.refresh()
            assert value.unique().tolist() == [-0.5]
        else:
            with pytest.raises(ServersUnreachableError, match="server 0 was started again, but its slices"):
                worker.refresh()


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

    for owner, name in ((Path, "replace"), (Path, "unlink"), (os, "fsync"), (os, "open"), (SummedFile, "write")):
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
