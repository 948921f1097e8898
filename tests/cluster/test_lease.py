"""At most one process owns a run folder, and the folder is free when its owner has ended.

Clocks, machines and processes are simulated, except in the tests of a kill and of a race.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cnnstrategies.cluster import lease
from cnnstrategies.cluster.lease import HeldError, Lease, holding, is_unused, newest, take
from cnnstrategies.cluster.run_owner import HEARTBEAT, LONGEST_GAP, SILENCE, Observation, Owner, State
from cnnstrategies.runtime.process_ids import ProcessId

pytestmark = pytest.mark.light
RUN = Path("runs/digits")
OWNER = Owner("ann", "alpha", "0123456789ab", 17, 99, "SLURM step 4711.0", "token", 5, 1.0)


class Time:
    """A clock that only waiting moves. At each moment `acts` may change the folder, as other machines do."""

    def __init__(self, acts: Callable[[float], None] = lambda now: None) -> None:
        self.now = 0.0
        self.acts = acts

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.acts(self.now)

    def take(self, token: str = "mine", waits: Callable[[Owner], None] = lambda owner: None) -> Lease:
        return take(RUN, "torchrun digits", token, waits, self, self.sleep)


def on_another_machine(number: int = 1, **changes: object) -> Lease:
    """Make a process of another machine the owner of the folder, and return its lease."""
    RUN.mkdir(parents=True, exist_ok=True)
    owner = replace(OWNER, folder=RUN.stat().st_ino, **changes)  # type: ignore[arg-type]
    (RUN / f".owner-{number}.json").write_bytes(owner.content())
    return Lease(RUN, number, owner)


STATES: list[tuple[str, list[tuple[float, int | None]], bool | None, State]] = [
    # (description, times and heartbeats of the readings, whether the process has ended, state)
    ("the process is alive", [(0.0, 0)], False, State.HELD),
    ("the process has ended", [(0.0, 0)], True, State.FREE),
    ("the process is stopped", [(1.0 * second, 0) for second in range(100)], False, State.HELD),
    ("first reading", [(0.0, 7)], None, State.UNKNOWN),
    ("a heartbeat arrives", [(0.0, 7), (1.0, 7), (2.0, 8)], None, State.HELD),
    ("almost silent for long enough", [(1.0 * second, 7) for second in range(int(SILENCE))], None, State.UNKNOWN),
    ("silent for long enough", [(1.0 * second, 7) for second in range(int(SILENCE) + 1)], None, State.FREE),
    ("the reader was stopped", [(0.0, 7), (1.0, 7), (900.0, 7), (1800.0, 7)], None, State.UNKNOWN),
    ("no record, then silence", [(1.0 * second, None) for second in range(int(SILENCE) + 1)], None, State.FREE),
    ("a record appears", [(0.0, None), (20.0, None), (25.0, 0), (26.0, 0)], None, State.UNKNOWN),
]


@pytest.mark.parametrize(
    ("readings", "ended", "state"), [case[1:] for case in STATES], ids=[case[0] for case in STATES]
)
def test_the_state_of_a_folder_follows_from_the_readings(
    readings: list[tuple[float, int | None]], ended: bool | None, state: State
) -> None:
    observation = Observation()
    for now, beat in readings:
        content = b"" if beat is None else replace(OWNER, beat=beat).content()
        observed = observation.state(content, ended, now)
    assert observed is state
    assert observation.state(replace(OWNER, released=True).content(), ended, now) is State.FREE


def test_another_owner_is_not_a_heartbeat() -> None:
    observation = Observation()
    observation.state(OWNER.content(), None, 0.0)
    assert observation.state(replace(OWNER, token="other").content(), None, 1.0) is State.UNKNOWN


INVALID = [
    *(("pid", "17"), ("pid", 0), ("pid", 2**31), ("start", -1), ("folder", 2**64), ("beat", True), ("released", 1)),
    *(("since", None), ("since", float("nan")), ("since", 1e300), ("user", "a\x1b[31m"), ("host", "a" * 257)),
    ("token", 3),
]


def test_only_a_valid_record_is_an_owner() -> None:
    assert Owner.read(OWNER.content()) == OWNER
    assert Owner.read(replace(OWNER, since=2).content()) is not None
    for name, value in INVALID:
        assert Owner.read(replace(OWNER, **{name: value}).content()) is None, (name, value)  # type: ignore[arg-type]
    whole = OWNER.content()
    for content in (b"", b"{", b"[" * 9000, b"null", b"\xff", whole.replace(b'"pid"', b'"id"'), whole[:-20]):
        assert Owner.read(content) is None, content[:99]


def test_a_copy_of_a_folder_has_no_owner_here() -> None:
    """The folder of a running run is copied. The record in the copy never changes."""
    RUN.mkdir(parents=True)
    owner = Owner.of_this_process(RUN, "", "other")
    assert owner.has_ended(RUN.stat().st_ino) is False
    assert owner.has_ended(RUN.stat().st_ino + 1) is None
    (RUN / ".owner-3.json").write_bytes(replace(owner, folder=owner.folder + 1).content())
    time = Time()
    assert time.take().number == 4
    assert time.now >= SILENCE


def test_an_owner_on_another_machine_is_waited_for_only_until_its_heartbeat() -> None:
    running = on_another_machine()
    time = Time(lambda now: running.beat() if now % HEARTBEAT == 0 else None)
    waited: list[Owner] = []
    with pytest.raises(HeldError) as held:
        time.take(waits=waited.append)
    assert held.value.folder == RUN
    assert str(held.value.owner).startswith("ann on alpha (process 17, SLURM step 4711.0) since 19")
    assert len(waited) == 1
    assert time.now <= HEARTBEAT


def test_a_folder_whose_owner_has_lost_power_is_free_after_a_time() -> None:
    on_another_machine(7)
    time = Time()
    mine = time.take()
    assert SILENCE <= time.now < SILENCE + 2
    assert mine.number == 8
    assert [path.name for path in RUN.iterdir()] == [".owner-8.json"]
    assert is_unused(RUN)


def test_a_released_folder_is_free_at_once() -> None:
    on_another_machine().release()
    time = Time()
    mine = time.take()
    assert (time.now, mine.number) == (0.0, 2)
    mine.release()
    assert time.take().number == 3
    assert time.now == 0.0


def test_a_power_cut_may_leave_an_empty_record() -> None:
    RUN.mkdir(parents=True)
    (RUN / ".owner-2.json").touch()
    time = Time()
    assert time.take().number == 3
    assert time.now >= SILENCE


def test_an_owner_that_was_taken_for_dead_notices_it_and_writes_nothing_more() -> None:
    """Its machine was asleep, and its heartbeat thread stopped, while another machine took the folder."""
    asleep = on_another_machine()
    mine = Time().take()
    assert asleep.is_lost()
    assert not mine.is_lost()
    asleep.beat()
    asleep.release()
    assert [path.name for path in RUN.iterdir()] == [".owner-2.json"]
    assert Owner.read(newest(RUN)[1]) == mine.owner
    (RUN / ".owner-2.json").unlink()
    assert not mine.is_lost()
    mine.beat()
    assert Owner.read(newest(RUN)[1]) == mine.owner, "a heartbeat restores a removed file"
    (RUN / ".owner-2.json").unlink()
    other = on_another_machine(1)
    assert mine.is_lost(), "the folder was removed, and another run has started in it"
    assert not other.is_lost()


def test_two_that_see_a_free_folder_do_not_both_get_it() -> None:
    """The other process creates its file between this process's reading and its claim."""
    on_another_machine(4).release()
    reading = lease.newest

    def overtaken(folder: Path) -> tuple[int, bytes]:
        number, content = reading(folder)
        if number == 4:
            on_another_machine(5, token="other")
        return number, content

    time = Time(lambda now: on_another_machine(5, token="other", beat=int(now)) and None)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(lease, "newest", overtaken)
        with pytest.raises(HeldError):
            time.take()


def test_a_process_that_the_owner_has_started_shares_the_folder() -> None:
    mine = Time().take("shared")
    child = Time().take("shared")
    assert child.number == mine.number
    child.beat()
    child.release()
    assert Owner.read(newest(RUN)[1]) == mine.owner, "only the owner writes"
    with pytest.raises(HeldError):
        Time().take("other")


def held_by(start: int, end: int) -> None:
    """Own the folder until the parent process closes its end of a pipe."""
    with holding((RUN,), "", f"process {os.getpid()}"):
        os.write(start, b"!")
        os.read(end, 1)


def test_kill_9_frees_the_folder_at_once() -> None:
    started, starts = os.pipe()
    ends, end = os.pipe()
    child = os.fork()
    if not child:
        os.close(end)
        with contextlib.suppress(BaseException):
            held_by(starts, ends)
        os._exit(1)
    os.read(started, 1)
    time = Time()
    with pytest.raises(HeldError, match=f"process {child}"):
        time.take()
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # The process is still a zombie.
    assert time.take().number == 2
    assert time.now == 0.0, "nothing is waited for on the owner's own machine"
    os.waitpid(child, 0)
    os.close(end)


def test_of_many_processes_that_start_at_the_same_time_one_gets_the_folder() -> None:
    go, start = os.pipe()
    children = []
    for _ in range(8):
        if not (child := os.fork()):
            code = 3
            with contextlib.suppress(BaseException):
                os.close(start)
                os.read(go, 1)  # Returns when the parent process closes the pipe.
                try:
                    take(RUN, "", f"process {os.getpid()}")
                    code = 0
                    signal.pause()
                except HeldError:
                    code = 1
            os._exit(code)
        children.append(child)
    os.close(start)
    ended = [os.waitpid(-1, 0) for _ in range(7)]
    (owner,) = set(children) - {child for child, _ in ended}
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    assert {os.waitstatus_to_exitcode(status) for _, status in ended} == {1}
    record = Owner.read(newest(RUN)[1])
    assert record is not None
    assert record.pid == owner


def test_a_thread_sends_the_heartbeats_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "HEARTBEAT", 0.01)
    threads = threading.active_count()
    with holding((RUN, RUN / "checkpoints"), "", "mine") as leases:
        for held in leases:
            while held.owner.beat < 3:
                threading.Event().wait(0.01)
            record = Owner.read(newest(held.folder)[1])
            assert record is not None
            assert record.beat >= 2
            assert not record.released
    for held in leases:
        record = Owner.read(newest(held.folder)[1])
        assert record is not None
        assert record.released
    assert threading.active_count() == threads
    assert {path.name for path in RUN.iterdir()} == {".owner-1.json", "checkpoints"}


def test_a_folder_that_is_not_free_releases_the_folders_before_it() -> None:
    (RUN / "checkpoints").mkdir(parents=True)
    other = Owner.of_this_process(RUN / "checkpoints", "", "other")
    (RUN / "checkpoints/.owner-1.json").write_bytes(other.content())
    with pytest.raises(HeldError), holding((RUN, RUN / "checkpoints"), "", "mine"):
        pass
    record = Owner.read(newest(RUN)[1])
    assert record is not None
    assert record.released


def test_the_time_limits_fit_together() -> None:
    """Several heartbeats may be late, and a reading that is late does not count as silence."""
    assert SILENCE >= 8 * HEARTBEAT
    assert LONGEST_GAP < HEARTBEAT
    assert ProcessId.current().has_ended() is False
