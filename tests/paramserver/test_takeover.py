"""A server that is silent for a little while is replaced by its copies, if these are complete."""

from collections.abc import Mapping

import pytest
from control_world import Run, trained

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.core.node import Peer
from cnnstrategies.paramserver.core.view import ServerInfo, View
from cnnstrategies.paramserver.server.replication import Replicas
from cnnstrategies.paramserver.slicing import Part, Slice
from cnnstrategies.strategies import ParameterServerStrategy

pytestmark = pytest.mark.light
TIMEOUT, TAKEOVER, BEAT = 10.0, 3.0, 1.0


def started(takeover: float = TAKEOVER, **more: int) -> Run:
    """A run of a worker and three servers, each of which holds what the next one has a copy of."""
    run, (worker,) = trained(1, 3, survivable=1, takeover=takeover, timeout=TIMEOUT, **more)
    are_whole(run)
    run.collect(worker, "boundary", boundary=True)
    run.passes(2 * BEAT)
    return run


def are_whole(run: Run, but: Mapping[int, int] = {}) -> None:
    """From now on servers say that all copies are there, some of them of an older view."""
    run.figures = lambda peer: {"step": 1, "whole": but.get(peer.id, run.coordinator.roster.number)}
    run.passes(2 * BEAT)


def servers(run: Run) -> list[tuple[int, int]]:
    """Number and life of each."""
    return sorted((peer.id, peer.life) for peer in run.members if peer.role == "server")


def stops(run: Run, server: int, seconds: float = 1000.0) -> None:
    run.strike("pause", run.world.processes["server", server].peer, seconds)


def test_a_silent_server_is_replaced_by_its_copies_before_the_time_out():
    run = started()
    stops(run, 2)
    run.passes(TAKEOVER - BEAT - 0.1)
    assert servers(run) == [(0, 0), (1, 0), (2, 0)]
    run.passes(BEAT + 0.5)
    assert servers(run) == [(0, 0), (1, 0)]
    status = run.call(run.supervision, "status").fields
    assert status["silent"] == [["server", 2, 0]]
    assert status["ended"] is None


def test_without_takeover_it_is_at_the_time_out():
    run = started(takeover=0.0)
    stops(run, 2)
    run.passes(TIMEOUT - BEAT - 0.1)
    assert servers(run) == [(0, 0), (1, 0), (2, 0)]
    run.passes(BEAT + 1.0)
    assert servers(run) == [(0, 0), (1, 0)]


def test_a_silent_worker_is_missed_at_the_time_out():
    run = started()
    worker = Peer("worker", 0, 0, 7)
    run.strike("pause", worker, 1000.0)
    run.passes(TIMEOUT - BEAT - 0.1)
    assert worker in run.members


@pytest.mark.parametrize("who", range(3))
def test_nobody_takes_over_while_a_copy_is_not_there(who):
    run = started()
    are_whole(run, {who: 0})
    stops(run, 2)
    run.passes(TAKEOVER + 1.0)
    assert servers(run) == [(0, 0), (1, 0), (2, 0)]


def test_nobody_takes_over_from_a_second_server_before_the_first_is_filled_again():
    run = started()
    before = run.coordinator.roster.number
    stops(run, 2)
    run.passes(TAKEOVER + 0.5)
    stops(run, 1, TAKEOVER + 1.0)
    run.passes(TAKEOVER + 1.0)
    assert servers(run) == [(0, 0), (1, 0)], "one is lost already"
    run.died(run.world.processes["server", 2].peer, replaced=True)
    run.member("server", 2, life=1)
    are_whole(run, dict.fromkeys(range(3), before))  # The others speak of the one before.
    stops(run, 1, TAKEOVER + 1.0)
    run.passes(TAKEOVER + 1.0)
    assert servers(run) == [(0, 0), (1, 0), (2, 1)]
    are_whole(run)
    stops(run, 1)
    run.passes(TAKEOVER + 1.0)
    assert servers(run) == [(0, 0), (2, 1)]


def test_a_coordinator_that_was_stopped_itself_misses_nobody():
    run = started()
    run.strike("pause", Peer("coordinator", 0), TAKEOVER + 1.0)
    run.passes(TAKEOVER + 2.0)
    assert servers(run) == [(0, 0), (1, 0), (2, 0)]
    assert not run.coordinator.history.faults


def test_nobody_takes_over_because_a_coordinator_was_not_there():
    """With keys of their own, members register these anew before it hears them: that may take them a while."""
    run = started()
    run.coordinate(1)
    with run.loses(lambda send: send.message.kind == "beat"):
        run.passes(TAKEOVER + 1.0)
    run.passes(2 * BEAT)
    assert servers(run) == [(0, 0), (1, 0), (2, 0)]
    stops(run, 2)
    run.passes(TAKEOVER + 1.0)
    assert servers(run) == [(0, 0), (1, 0)]


def view(number, *since):
    servers = tuple(ServerInfo(one, f"s{one}", "", came) for one, came in enumerate(since) if came)
    return View(number, servers, (), tuple(one for one, came in enumerate(since) if not came), begun=1)


def test_a_server_is_whole_when_each_copy_of_what_it_holds_was_acknowledged():
    slices = {key: Slice(key, (Part(0, 0, 4, (4,)),), (4,), 4, None, servers) for key, servers in PLACES.items()}
    replicas = Replicas(0, slices)
    assert replicas.whole == 0
    replicas.place(view(3, 1, 1, 1))
    assert replicas.whole == 0
    replicas.acknowledged(0, 1, 5)
    assert replicas.whole == 0
    replicas.acknowledged(2, 2, 5)
    assert replicas.whole == 3
    replicas.place(view(4, 1, 1, 1))
    assert replicas.whole == 4
    replicas.place(view(5, 1, 0, 1))
    assert replicas.whole == 0, "a copy is lost"
    replicas.place(view(6, 1, 6, 1))
    assert replicas.whole == 0, "the new one has nothing yet"
    replicas.acknowledged(0, 1, 7)
    assert replicas.whole == 0, "this one holds the slice whose first holder has come back"
    replicas.acknowledged(1, 1, 7)
    assert replicas.whole == 6


PLACES = {0: (0, 1), 1: (1, 0), 2: (0, 2)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"takeover": 1.0}, "takeover=1.0: use at least three heartbeats, 1.5 s, and less than timeout=10"),
        ({"takeover": 10.0}, "takeover=10.0: use at least three heartbeats"),
        ({"replication": 1}, "takeover=3.0 with replication=1: nobody else has what a server holds; use 2"),
        ({"max_restarts": 0}, "takeover=3.0 with max_restarts=0: one that was slow would be gone; use 1"),
    ],
)
def test_takeover_needs_copies_and_restarts(options, message):
    with pytest.raises(ConfigurationError, match=message):
        ParameterServerStrategy(**{"servers": 2, "replication": 2, "max_restarts": 1, "takeover": 3.0, **options})
