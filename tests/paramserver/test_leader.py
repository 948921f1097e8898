"""Steps that a leader has decided: when it dies with what it knew, and when servers go on from older snapshots."""

from collections.abc import Collection
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from data_world import MEMBER, Servers, fresh
from training import specify

from cnnstrategies.paramserver.core.view import ServerInfo, View, WorkerInfo
from cnnstrategies.paramserver.messages import NO_STEP, SERVER, Kind
from cnnstrategies.paramserver.server.decision import Decision
from cnnstrategies.paramserver.server.roll_call import PATIENCE_SECONDS

pytestmark = pytest.mark.light

PLAIN = {"name": "SGD", "lr": 0.5}
SERVERS = (ServerInfo(0, "0", since=5), ServerInfo(1, "1", since=6))
NEWCOMER = MEMBER | {"first": 3, "given": False}
NEW: dict[str, Any] = MEMBER | {"given": False}


def snapshots(
    *versions: int, workers: int = 1, life: int = 0, decided: bool = False, late: bool = False,
    restored: Collection[int] = (0, 1), **options: Any,
) -> Servers:  # fmt: skip
    """Two servers that go on from snapshots of some versions.

    Args:
        versions: Theirs.
        workers: How many train.
        life: Of the workers; those that made the last step had the first.
        decided: The snapshots hold the last decision, too.
        late: The second server hears of the view later.
        restored: Those that go on from one; others have first values.
        options: Of the specification.
    """
    run = Servers(specify(PLAIN, workers, servers=2, **options), life)
    for number, version in enumerate(versions):
        store = run.store(number, version)
        if decided and version > 0:
            store.decided = Decision(version - 1, (0,), (0,), run.options, 1.0).as_dict()
        run.serve(number, store, number in restored)
    run.follow(View(6, SERVERS, run.view.workers), [0] if late else None)
    return run


def begins(run: Servers) -> list[int]:
    """The steps that workers were told to begin with, by the server that leads."""
    return [step for _, said, step in run.welcomes() if said.get("counted") and said["leader"]]


def test_a_step_is_decided_again_that_only_a_dead_leader_knew_the_decision_of() -> None:
    """The leader's snapshot is past it, the other server's is not, and the worker was answered by none."""
    run = snapshots(3, 2)
    run.say_hello(MEMBER, 2)
    run.push(2)
    assert run.versions(1) == {3}
    assert run.versions(0) == {3}, "it has had that push"
    assert all(server.mode.clock.step == 3 for server in run.roles.values())


def test_newcomers_do_not_wait_for_a_step_that_nobody_can_push_any_more() -> None:
    """All who had pushed it have died, and the leader, which has decided it, has come back from a snapshot."""
    run = snapshots(3, 2)
    run.say_hello(NEWCOMER, 3)
    run.say_hello(NEWCOMER, 3)
    assert run.versions(1) == {3}
    assert [server.handlers.lost_updates for server in run.roles.values()] == [0, 1]
    run.push(3)
    assert run.versions(0) == run.versions(1) == {4}


def test_newcomers_wait_for_a_step_that_a_member_can_push() -> None:
    run = snapshots(3, 2, workers=2)
    run.say_hello(MEMBER, 2, worker=1)
    run.say_hello(NEWCOMER, 3)
    run.say_hello(NEWCOMER, 3)
    assert run.versions(1) == {2}
    run.push(2, worker=1)
    assert run.versions(1) == {3}
    assert run.roles[1].handlers.lost_updates == 0


def test_newcomers_wait_for_workers_that_have_not_said_yet_where_they_are() -> None:
    run = snapshots(3, 2, workers=2)
    run.say_hello(NEWCOMER, 3)
    run.say_hello(NEWCOMER, 3)
    assert run.versions(1) == {2}
    for waited in (0.0, 1000.0, *[PATIENCE_SECONDS / 4] * 4):  # The machine sleeps: that is no time to say it.
        run.say_hello(NEWCOMER, 3)
        assert run.versions(1) == {2}
        run.look(waited)
    run.say_hello(NEWCOMER, 3)
    assert run.versions(1) == {3}


def test_newcomers_wait_for_the_decision_of_a_step_whose_pushes_are_there() -> None:
    run = snapshots(3, 2, workers=2)
    run.say_hello(MEMBER, 2, worker=1)
    run.push(2, worker=1)
    run.follow(replace(run.view, number=7, workers=(WorkerInfo(0),)))
    run.say_hello(NEWCOMER, 3)
    run.say_hello(NEWCOMER, 3)
    assert run.versions(1) == {2}
    decision = Decision(2, (1,), (0,), run.options, 1.0)
    run.send(Kind.DECIDE, json=decision.as_dict(), worker=SERVER, to=[1], incarnation=7, sequence=1000)
    assert run.versions(1) == {3}
    assert run.roles[1].handlers.lost_updates == 0


@pytest.mark.parametrize("older", [0, 2])
def test_what_a_newer_snapshot_knows_of_steps_ends_with_its_values(older: int) -> None:
    """The other server has gone on from an older one before this one was back, and gives it copies."""
    run = snapshots(older, 5, replication=2, decided=True)
    run.look(1.0)  # The other one notices that it has missed copies.
    assert run.versions(1) == {older}
    assert [server.mode.clock.step for server in run.roles.values()] == [older, older]
    run.say_hello(MEMBER, older)
    run.push(older)
    assert run.versions(0) == run.versions(1) == {older + 1}
    decided = run.roles[1].store.decided
    assert decided is not None
    assert decided["step"] == older
    run.follow(View(7, SERVERS[1:], (WorkerInfo(0),), lost=(0,)))
    run.push(older + 1)
    assert run.versions(1) == {older + 2}


def test_a_newcomer_is_told_where_to_begin_when_all_who_have_come_back_have_said_what_they_know() -> None:
    run = snapshots(0, 5, decided=True, late=True, life=1)
    for _ in range(2):
        run.say_hello(NEW, NO_STEP)
    assert begins(run) == []
    run.follow(View(6, SERVERS, (WorkerInfo(0, 1),)))
    run.say_hello(NEW, NO_STEP)
    assert begins(run) == [5]
    run.say_hello(NEWCOMER | {"first": 5}, 5)
    run.push(5)
    assert run.versions(0) == run.versions(1) == {6}
    assert [server.handlers.lost_updates for server in run.roles.values()] == [5, 0]


def test_a_newcomer_is_not_told_where_to_begin_while_a_server_is_lost_that_may_know_a_later_step() -> None:
    run = snapshots(0, 0)
    lost = run.roles.pop(1)
    run.follow(View(7, SERVERS[:1], (WorkerInfo(0),)))
    for _ in range(2):
        run.say_hello(NEW, NO_STEP)
    assert begins(run) == []
    run.roles[1] = lost
    run.follow(View(8, (SERVERS[0], ServerInfo(1, "1", since=8)), (WorkerInfo(0),)))
    run.say_hello(NEW, NO_STEP)
    assert begins(run) == [0]


def test_newcomers_do_not_wait_for_a_step_that_was_lost_with_all_who_had_its_values() -> None:
    """One has given the second server first values before that had heard that a step was made."""
    run = snapshots(1, 0, life=1, restored=(0,))
    for _ in range(2):
        run.say_hello(NEW, NO_STEP)
    assert begins(run) == [1]
    for _ in range(2):
        run.say_hello(NEWCOMER | {"first": 1}, 1)
    assert {server for server, said, _ in run.welcomes() if not said["ready"]} == {1}


def test_a_newcomer_is_told_where_to_begin_when_all_others_have_said_where_they_are() -> None:
    run = snapshots(3, 3, workers=2)
    run.say_hello(NEW, NO_STEP, worker=1)
    run.say_hello(NEW, NO_STEP, worker=1)
    assert begins(run) == []
    run.say_hello(MEMBER, 8)
    run.told.clear()
    run.say_hello(NEW, NO_STEP, worker=1)
    assert begins(run) == [8]


@pytest.mark.parametrize("dies", [True, False])
def test_nobody_waits_for_a_step_that_a_newcomer_would_have_made_which_has_left(dies: bool) -> None:
    """It was told where to begin when another had not said for long where it is: further on."""
    run = snapshots(3, 3, workers=2)
    run.say_hello(NEW, NO_STEP, worker=1)
    for _ in range(6):
        run.look(PATIENCE_SECONDS / 4)
    run.say_hello(NEW, NO_STEP, worker=1)
    assert begins(run) == [3]
    run.push(3, worker=1)
    assert run.versions(0) == run.versions(1) == {4}
    run.say_hello(MEMBER, 8)
    run.push(4, worker=1)
    if dies:
        run.follow(View(7, SERVERS, (WorkerInfo(0),)))
    else:
        run.send(Kind.LEAVE, worker=1, step=5)
    run.push(8)
    assert run.versions(0) == run.versions(1) == {9}


def test_a_leader_does_not_go_back_to_a_step_of_which_it_has_dropped_the_pushes() -> None:
    """One has pushed it before another has said that it is further on."""
    run = snapshots(3, 3, workers=2)
    run.say_hello(NEWCOMER, 3, worker=1)
    run.push(3, worker=1)
    run.say_hello(MEMBER, 8)
    run.push(8)
    for step in range(4, 9):
        run.push(step, worker=1)
    assert run.versions(0) == run.versions(1) == {9}


def test_a_server_without_slices_learns_from_workers_how_far_they_are() -> None:
    """The leader has come back from a snapshot, and has no decision to tell."""
    run = Servers(specify(PLAIN, 1, servers=7, slice_bytes=1 << 20))
    run.serve(6)
    assert not run.roles[6].store.slices
    run.follow(run.view)
    run.say_hello(MEMBER, 8)
    run.begin(8)
    votes = [(to, text) for to, header, text in run.missed if header.kind == Kind.VOTE]
    assert votes == [(0, {"complete": [[8, 0]]})]


# A leader that dies, maybe with a worker.


def trained(replication: int = 2, lost: Collection[Kind] = ()) -> Servers:
    """Two servers and workers that have made a step, of which some messages between servers were lost."""
    run = fresh(specify(PLAIN, 2, servers=2, replication=replication), workers=(0, 1))
    run.push(0, 0, 1.0)
    run.lost = lambda sender, header: header.kind in lost
    run.push(0, 1, 3.0)
    assert -1.0 in run.values(0), "the leader has made it"
    return run


@pytest.mark.parametrize("lost", [(Kind.DECIDE, Kind.PING), (Kind.DECIDE, Kind.RELAY_BEGIN, Kind.RELAY)])
def test_a_step_is_made_up_of_the_same_workers_on_all_slices_although_only_updates_or_copies_tell_whose_it_is(
    lost: tuple[Kind, ...],
) -> None:
    """The decision is lost; then the leader dies with one whose pushes it has counted."""
    run = trained(lost=lost)
    if Kind.RELAY in lost:
        run.look(1.0)  # It shows the other what that has missed, and sends copies in place of the updates.
    run.without(0, workers=(1,))
    run.push(0)
    assert run.values(1) == {-1.0}


@pytest.mark.parametrize("told", [True, False])
def test_a_leader_that_comes_back_from_a_snapshot_knows_who_made_up_its_last_step(told: bool) -> None:
    """It had told nobody; one of the workers has died with it."""
    run = trained(1, () if told else (Kind.DECIDE, Kind.PING))
    assert run.values(1) == ({-1.0} if told else {0.0})
    store = run.store(0)
    store.restore(deepcopy(run.roles[0].store.contents()))
    run.without(0, workers=(1,))
    run.serve(0, store, restored=True)
    run.lost = lambda sender, header: False
    run.follow(View(3, (ServerInfo(0, "0", since=3), *run.view.servers), run.view.workers))
    run.say_hello(MEMBER)
    run.push(0)
    assert run.values(0) == run.values(1) == {-1.0}


def test_first_values_are_not_taken_where_steps_were_made() -> None:
    """Else the run would begin anew with a part of its parameters."""
    run = trained()
    run.serve(1)
    run.lost = lambda sender, header: header.kind in (Kind.COPY, Kind.PING)
    run.follow(View(2, (run.view.servers[0], ServerInfo(1, "1", since=2)), run.view.workers))
    run.without(0)
    run.initialise()
    assert run.versions(1) == {-1}
