"""The state machines of the modes, and the cost of a vote."""

import pytest

from cnnstrategies.paramserver.core.node import Lasting, Liveness
from cnnstrategies.paramserver.server.asynchronous import StaleClock
from cnnstrategies.paramserver.server.decision import PATIENCE_SECONDS, Reports, RollCall, SyncClock

pytestmark = pytest.mark.light


def test_the_members_of_a_step_are_the_living_workers_that_joined_before_it() -> None:
    clock = SyncClock(expected=3)
    assert clock.join(0) == clock.join(1) == 0
    assert clock.ready({0, 1}) is None, "a worker of the start has not joined"
    clock.leave(2)
    assert clock.ready({0}) is None
    assert clock.ready({0, 1}) == {0, 1}
    clock.decide(0)
    assert clock.join(3, 3) == 3
    clock.decide(1)
    assert clock.members == {0, 1}
    for _ in range(2):  # A repeated decision counts once.
        clock.decide(2)
    assert clock.step == 3
    assert clock.members == {0, 1, 3}
    assert clock.ready({0, 1}) is None


def test_a_node_joins_with_its_first_worker_and_leaves_with_its_last() -> None:
    clock = SyncClock(expected=2, per_node=2)
    clock.join(0)
    for dead in (1, 2):
        clock.leave(dead)
        assert clock.ready({0}) is None, "the other node has not joined"
    clock.leave(3)
    assert clock.ready({0}) == {0}


def test_a_worker_is_at_most_staleness_steps_ahead() -> None:
    for staleness in (0, 3):
        clock = StaleClock(staleness, expected=3)
        clock.join(0)
        clock.join(1)
        clock.finished(0, staleness)
        clock.finished(1, staleness + 1)
        assert clock.may_start(staleness)
        assert not clock.may_start(staleness + 1), "a worker has not joined"
        clock.leave(2)
        assert clock.may_start(2 * staleness)
        assert not clock.may_start(2 * staleness + 1)
        clock.finished(0, 7)
        clock.finished(1, 7)
        clock.leave(0)
        clock.leave(1)
        assert clock.join(0) == clock.join(1) == 7, "after all workers have left for a while"


def test_a_roll_call_waits_for_workers_but_not_for_ever() -> None:
    """Check the roll call of a new leader, which may not have met all members."""
    roll = RollCall()
    roll.follow(dict.fromkeys(range(4), 0))
    assert roll.complete
    roll.call({1, 2, 3})
    assert not roll.expire(5.0)
    roll.note_position(2)
    assert roll.follow(dict.fromkeys(range(3), 0)) == [3]
    assert not roll.complete
    roll.call({1})
    assert not roll.expire(5.0 + PATIENCE_SECONDS), "a new call restarts the patience"
    assert not roll.complete
    assert roll.expire(5.0 + 2 * PATIENCE_SECONDS)
    assert roll.complete
    assert not roll.expire(50.0), "a roll call expires only once"


class Number(int):
    """A worker's number that counts how often such numbers are hashed."""

    hashes = 0

    def __hash__(self) -> int:
        Number.hashes += 1
        return int.__hash__(self)


def hashes_in_a_step(workers: int, servers: int = 4) -> int:
    """Return the number of hashes of workers' numbers while a leader receives the votes of a step, worker by worker."""
    reports, clock = Reports(), SyncClock(workers)
    numbers = [Number(worker) for worker in range(workers)]
    reports.follow(range(servers))
    for worker in numbers:
        clock.join(worker)
    for server in range(servers):
        reports.add(server, ())
    Number.hashes = 0
    for worker in numbers:
        for server in range(servers):
            reports.add(server, {(0, worker)})
            complete = reports.complete(0)
            assert complete is not None
            ready = clock.ready(complete)
            assert (ready is None) == (len(complete) < workers)
    return Number.hashes


def test_the_cost_of_a_vote_does_not_grow_with_the_number_of_workers() -> None:
    few, many = hashes_in_a_step(100), hashes_in_a_step(800)
    assert few >= 100
    assert many < 1.1 * 8 * few, f"{few} hashes for 100 workers, {many} for 800"


def test_a_pause_of_a_process_does_not_count_as_silence_of_others() -> None:
    liveness: Liveness[str] = Liveness(pause=1.0)
    liveness.pass_to(100.0)
    liveness.hear("early")
    liveness.pass_to(101.0)
    liveness.hear("late")
    liveness.pass_to(150.0)
    assert liveness.silent(0.5) == ["early"]
    assert not liveness.silent(1.0)
    liveness.pass_to(150.7)
    assert liveness.silent(0.6) == ["early", "late"]
    liveness.listen(170.0)
    assert not liveness.silent(0.0), "this process has not read messages since the last call"


def test_a_process_that_is_always_late_notices_in_the_end_that_another_is_silent() -> None:
    liveness: Liveness[str] = Liveness(pause=1.0, usual=0.25)
    for call in range(5):
        liveness.pass_to(10.0 * call)
        if call == 0:
            liveness.hear("lost")
        assert bool(liveness.silent(0.6)) == (call >= 3)


def test_the_time_of_a_value_begins_again_when_the_value_changes() -> None:
    lasting = Lasting(False)
    assert [lasting.seconds(now, now >= 2.0) for now in (0.0, 1.0, 2.0, 5.0)] == [0.0, 1.0, 0.0, 3.0]
