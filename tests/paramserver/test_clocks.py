"""The state machines of the modes, on random histories, and what a vote costs."""

import pytest

from cnnstrategies.paramserver.server.clocks import PATIENCE_SECONDS, RollCall, StaleClock, SyncClock
from cnnstrategies.paramserver.server.decision import Reports

pytestmark = pytest.mark.light


def test_the_members_of_a_step_are_the_living_workers_that_joined_before_it() -> None:
    clock = SyncClock(expected=3)
    assert clock.join(0) == clock.join(1) == 0
    assert clock.ready({0, 1}) is None, "one of the start has not come"
    clock.leave(2)
    assert clock.ready({0}) is None
    assert clock.ready({0, 1}) == {0, 1}
    clock.decide(0)
    assert clock.join(3, 3) == 3
    clock.decide(1)
    assert clock.members == {0, 1}
    for _ in range(2):  # The same decision twice counts once.
        clock.decide(2)
    assert clock.step == 3
    assert clock.members == {0, 1, 3}
    assert clock.ready({0, 1}) is None


def test_a_node_joins_with_its_first_worker_and_leaves_with_its_last() -> None:
    clock = SyncClock(expected=2, per_node=2)
    clock.join(0)
    for dead in (1, 2):
        clock.leave(dead)
        assert clock.ready({0}) is None, "the other node has not come"
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
        assert not clock.may_start(staleness + 1), "one has not come"
        clock.leave(2)
        assert clock.may_start(2 * staleness)
        assert not clock.may_start(2 * staleness + 1)
        clock.finished(0, 7)
        clock.finished(1, 7)
        clock.leave(0)
        clock.leave(1)
        assert clock.join(0) == clock.join(1) == 7, "all have left for a while"


def test_a_roll_call_waits_for_workers_but_not_for_ever() -> None:
    """Of a server that begins to lead: it may have met only some of the members."""
    roll = RollCall()
    roll.follow(dict.fromkeys(range(4), 0))
    assert roll.complete
    roll.call({1, 2, 3})
    assert not roll.expire(5.0)
    roll.note_position(2)
    assert roll.follow(dict.fromkeys(range(3), 0)) == [3]
    assert not roll.complete
    roll.call({1})
    assert not roll.expire(5.0 + PATIENCE_SECONDS), "the patience begins anew"
    assert not roll.complete
    assert roll.expire(5.0 + 2 * PATIENCE_SECONDS)
    assert roll.complete
    assert not roll.expire(50.0), "only once"


class Number(int):
    """A worker's number that counts how often one is looked at."""

    looks = 0

    def __hash__(self) -> int:
        Number.looks += 1
        return int.__hash__(self)


def looks_in_a_step(workers: int, servers: int = 4) -> int:
    """Of the leader at workers' numbers, for the votes that come worker by worker, as pushes get complete."""
    reports, clock = Reports(), SyncClock(workers)
    numbers = [Number(worker) for worker in range(workers)]
    reports.follow(range(servers))
    for worker in numbers:
        clock.join(worker)
    for server in range(servers):
        reports.add(server, ())
    Number.looks = 0
    for worker in numbers:
        for server in range(servers):
            reports.add(server, {(0, worker)})
            complete = reports.complete(0)
            assert complete is not None
            ready = clock.ready(complete)
            assert (ready is None) == (len(complete) < workers)
    return Number.looks


def test_the_cost_of_a_vote_does_not_grow_with_the_number_of_workers() -> None:
    few, many = looks_in_a_step(100), looks_in_a_step(800)
    assert few >= 100
    assert many < 1.1 * 8 * few, f"{few} looks for 100 workers, {many} for 800"
