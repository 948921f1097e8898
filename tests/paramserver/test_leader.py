"""Steps that a leader has decided: when it dies with what it knew, and when a server begins to lead."""

from collections.abc import Collection
from typing import Any

import pytest
from data_world import MEMBER, Servers, fresh
from training import specify

from cnnstrategies.paramserver.core.view import ServerInfo, View
from cnnstrategies.paramserver.messages import NO_STEP, Kind
from cnnstrategies.paramserver.server.clocks import PATIENCE_SECONDS
from cnnstrategies.paramserver.server.decision import Decision
from cnnstrategies.paramserver.server.synchronous import Synchronous

pytestmark = pytest.mark.light

PLAIN = {"name": "SGD", "lr": 0.5}
SERVERS = (ServerInfo(0, "0", since=5), ServerInfo(1, "1", since=6))
NEW: dict[str, Any] = MEMBER | {"given": False}


def begins_to_lead(version: int, workers: int = 1) -> Servers:
    """Two servers that have the slices in a version, and the last decision; the first one now leads."""
    run = Servers(specify(PLAIN, workers, servers=2))
    for number in range(2):
        run.serve(number, run.store(number, version))
        mode = run.roles[number].mode
        assert isinstance(mode, Synchronous)
        mode.adopt(Decision(version - 1, (0,), (0,), run.options, 1.0))
    run.follow(View(6, SERVERS, run.view.workers))
    return run


def begins(run: Servers) -> list[int]:
    """The steps that workers were told to begin with, by the server that leads."""
    return [step for _, said, step in run.welcomes() if said.get("counted") and said["leader"]]


def test_a_newcomer_is_told_where_to_begin_once_all_have_spoken() -> None:
    run = begins_to_lead(3, workers=2)
    run.say_hello(NEW, NO_STEP, worker=1)
    run.say_hello(NEW, NO_STEP, worker=1)
    assert begins(run) == []
    run.say_hello(MEMBER, 3)
    run.say_hello(NEW, NO_STEP, worker=1)
    assert begins(run) == [3, 3]


def test_a_newcomer_waits_a_bounded_time_for_silent_workers() -> None:
    run = begins_to_lead(3, workers=2)
    for waited in (0.0, 1000.0, *[PATIENCE_SECONDS / 4] * 4):  # The machine sleeps: that is no time to say it.
        run.say_hello(NEW, NO_STEP, worker=1)
        assert begins(run) == []
        run.look(waited)
    run.say_hello(NEW, NO_STEP, worker=1)
    assert begins(run) == [3]


def test_a_server_without_slices_learns_how_far_workers_are() -> None:
    """It has missed the leader's decisions."""
    run = Servers(specify(PLAIN, 1, servers=7, slice_bytes=1 << 20))
    run.serve(6)
    assert not run.roles[6].store.slices
    run.follow(run.view)
    run.say_hello(MEMBER, 8)
    run.begin(8)
    votes = [(to, text) for to, header, text in run.missed if header.kind == Kind.VOTE]
    assert votes == [(0, {"complete": [[8, 0]]})]


# A leader that dies, maybe with a worker.


def trained(lost: Collection[Kind] = ()) -> Servers:
    """Two servers and workers that have made a step, of which some messages between servers were lost."""
    run = fresh(specify(PLAIN, 2, servers=2, replication=2), workers=(0, 1))
    run.push(0, 0, 1.0)
    run.lost = lambda sender, header: header.kind in lost
    run.push(0, 1, 3.0)
    assert -1.0 in run.values(0), "the leader has made it"
    return run


@pytest.mark.parametrize("lost", [(Kind.DECIDE, Kind.PING), (Kind.DECIDE, Kind.RELAY_BEGIN, Kind.RELAY)])
def test_a_step_has_the_same_workers_on_all_slices_by_any_news(
    lost: tuple[Kind, ...],
) -> None:
    """The decision is lost; then the leader dies with one whose pushes it has counted."""
    run = trained(lost=lost)
    if Kind.RELAY in lost:
        run.look(1.0)  # It shows the other what that has missed, and sends copies in place of the updates.
    run.without(0, workers=(1,))
    run.push(0)
    assert run.values(1) == {-1.0}


def test_first_values_are_not_taken_where_steps_were_made() -> None:
    """Else the run would begin anew with a part of its parameters."""
    run = trained()
    run.serve(1)
    run.lost = lambda sender, header: header.kind in (Kind.COPY, Kind.PING)
    run.follow(View(2, (run.view.servers[0], ServerInfo(1, "1", since=2)), run.view.workers))
    run.without(0)
    run.initialise()
    assert run.versions(1) == {-1}
