"""A coordinator that follows a killed coordinator: with the journal it goes on as if it had only been stopped."""

import json
import subprocess
import sys
from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cnnstrategies import ConfigurationError
from cnnstrategies.paramserver.coordinator import journal
from cnnstrategies.paramserver.coordinator.coordinator import Coordinator
from cnnstrategies.paramserver.coordinator.journal import Journaled, JournalStore, StateError, from_table, to_table
from cnnstrategies.paramserver.coordinator.settings import CoordinatorSettings
from cnnstrategies.paramserver.core.node import Message, Peer
from cnnstrategies.paramserver.drivers.coordinator import JournalFile
from tests.paramserver.control_world import trained
from tests.paramserver.simulation import toys
from tests.paramserver.simulation.control import Plan, run
from tests.paramserver.simulation.faults import Network
from tests.paramserver.simulation.sameness import differing

pytestmark = pytest.mark.light
BEAT = 1.0  # seconds
SETTINGS = CoordinatorSettings("here", 2, 0)


def restarted(store: JournalStore, most: int = 10_000) -> Coordinator:
    """Return a new coordinator that has read a journal."""
    return Journaled(Coordinator(SETTINGS), store, follows=True, most=most).coordinator


def state_size(coordinator: Coordinator) -> int:
    """Return the number of bytes of a coordinator's state in a journal, without the head of the record."""
    table, buffers = to_table(coordinator)
    return len(json.dumps(table, separators=(",", ":"))) + sum(map(len, buffers))


def epoch(number: int) -> Message:
    """Return the message with which a worker begins an epoch."""
    fields = {"session": 0, "floor": 1, "epoch": number, "samples": 4, "chunk": 1}
    return Message("epoch", fields, (b"x",), number)


def with_epochs(store: JournalStore, most: int = 10_000, count: int = 6) -> Journaled:
    """Return a coordinator with two registered workers, of which one has begun some epochs."""
    role = Journaled(Coordinator(SETTINGS), store, most=most)
    role.start(0.0)
    for worker in range(2):
        about = {"session": 0, "floor": 1, "process": 1, "host": "here", "endpoint": "", "public_key": ""}
        role.on_message(1.0, Peer("worker", worker), Message("hello", about, request=1))
    for value in range(2, count):
        role.on_message(2.0 + value, Peer("worker", 0), epoch(value))
        role.on_timer(2.5 + value, "tick")
    return role


def test_the_time_without_a_coordinator_does_not_count_as_silence() -> None:
    run, peers = trained(2)
    run.strike("mute", peers[1], 20 * BEAT)
    run.passes(5 * BEAT)
    run.world.kill(run.world.processes["coordinator", 0])
    run.passes(5 * BEAT)
    run.coordinate(1)
    run.passes(3.5 * BEAT)
    assert run.members == peers, "the worker was silent for at most 9.5 s"
    run.passes(2.5 * BEAT)
    assert run.members == peers[:1]


def test_a_large_journal_is_rewritten_when_it_has_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the largest size: twice the state and one message, plus the bytes that are always allowed."""
    monkeypatch.setattr(journal, "MOST_BYTES", 1 << 12)
    store, sizes = toys.MemoryJournal(), []
    role = with_epochs(store, count=2)
    for number in range(2, 60):
        fields, text = {"session": 0, "floor": number, "number": 0}, bytes(1 << (14 if number == 2 else 13))
        role.on_message(9.0, Peer("worker", 0), Message("put", fields, (text,), number))
        sizes.append(len(store.read()))
    assert max(sizes) < 2 * (state_size(role.coordinator) + (1 << 14)) + (1 << 12)
    assert 4 < sum(after < before for before, after in pairwise(sizes)) < 30, "the journal is rewritten now and then"
    assert differing(role.coordinator, restarted(store)) is None


@pytest.mark.parametrize("where", range(-29, 0, 3))
def test_a_last_record_with_a_changed_byte_is_ignored(where: int) -> None:
    store, other = toys.MemoryJournal(), toys.MemoryJournal()
    with_epochs(store)
    with_epochs(other, count=5).on_message(7.0, Peer("worker", 0), epoch(5))
    contents = bytearray(store.read())
    contents[where] ^= 1
    store.replace(bytes(contents))
    assert differing(restarted(store), restarted(other)) is None


def trace_of_a_run() -> list[str]:
    """Return the trace of a run in which many messages are lost."""
    plan = Plan(workers=3, servers=3, survivable=1, restarts=1, epochs=3, max_joiners=2)
    outcome = run(plan, Network(7, 1.0, tcp=False, rate=0.05), 7, traced=True)
    assert outcome.violation is None
    return outcome.trace


def test_runs_do_not_depend_on_the_hash_seed() -> None:
    """Compare two processes: a coordinator that reads another coordinator's journal must reach the same state."""
    environment = {"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)}
    command = [
        sys.executable,
        "-c",
        "from tests.paramserver import test_restart; print(*test_restart.trace_of_a_run(), sep='\\n')",
    ]
    other = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
    assert other.stdout.splitlines() == trace_of_a_run()


class Stranger:
    """An object of a class outside of the package."""


def test_a_state_with_shared_objects_is_read_as_it_was_written() -> None:
    shared = Peer("worker", 3)
    state = [set(range(100)), deque([shared], 5), {"peers": (shared, shared), 2: b"x", "none": None}, frozenset(), 0.5]
    table, buffers = to_table(state)
    copy = from_table(json.loads(json.dumps(table)), list(map(bytes, buffers)))
    assert copy == state
    assert copy[1].maxlen == 5
    assert copy[1][0] is copy[2]["peers"][1]


def test_an_object_of_a_foreign_class_is_neither_written_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StateError, match=r"tests.paramserver.test_restart:Stranger"):
        to_table([Stranger()])
    monkeypatch.setattr(journal, "PACKAGE", "")
    table, _ = to_table([Stranger()])
    monkeypatch.undo()
    with pytest.raises(StateError, match=r"tests.paramserver.test_restart:Stranger"):
        from_table(table, [])


# The file


def test_a_journal_file_is_private_and_replaced_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b"of a previous run")
    file = JournalFile(path)
    role = with_epochs(file, most=7)
    assert path.stat().st_mode & 0o777 == 0o600
    assert differing(role.coordinator, restarted(JournalFile(path))) is None

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        file.replace(b"new")
    monkeypatch.undo()
    assert differing(role.coordinator, restarted(JournalFile(path))) is None


def test_a_coordinator_that_was_killed_before_it_wrote_anything_is_replaced(tmp_path: Path) -> None:
    """The starter creates the journal, so the file neither is missing nor belongs to an earlier run at this address."""
    path = tmp_path / "journal"
    with_epochs(JournalFile(path))  # The journal of an earlier run.
    JournalFile(path).create()
    assert path.stat().st_mode & 0o777 == 0o600
    assert differing(Coordinator(SETTINGS), restarted(JournalFile(path))) is None


def test_a_full_disk_does_not_end_the_run_and_leaves_no_partial_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "journal"
    role = with_epochs(JournalFile(path), most=16)

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.write", full)
        for tick in range(3):
            role.on_timer(20.0 + tick, "tick")
    assert capsys.readouterr().err.count("No space left on device): free disk space") == 1
    with pytest.raises(
        ConfigurationError, match="journal was removed, because it could not be written: free disk space"
    ):
        restarted(JournalFile(path))
    for tick in range(16):
        role.on_timer(30.0 + tick, "tick")
    assert differing(role.coordinator, restarted(JournalFile(path))) is None, "the whole journal was written again"
