"""The coordinator's treatment of joiners, and of workers that leave or are started again in the middle of an epoch."""

import pytest

from cnnstrategies.paramserver.coordinator.collective_rounds import MIDWAY
from cnnstrategies.paramserver.coordinator.status import PLACE
from cnnstrategies.paramserver.core.node import Peer
from cnnstrategies.paramserver.server.asynchronous import StaleClock
from tests.paramserver.control_world import Answer, Run, in_epoch

pytestmark = pytest.mark.light


def test_joiners_get_places_while_places_are_free():
    run = Run(2, 1, max_joiners=2)
    offer = run.ask(PLACE)
    assert (offer["place"], offer["incarnation"], offer["workers"]) == (2, 0, 2)
    peer = run.member("worker", 2)
    assert run.ask(PLACE)["place"] == 3
    assert "was registered already" in run.ask("hello", Peer("worker", 2, 0, 8), session=0)["message"]
    run.member("worker", 3)
    assert "place" not in run.ask(PLACE)
    run.call(peer, "leave")
    assert (run.ask(PLACE)["place"], run.ask(PLACE)["incarnation"]) == (2, 1)
    refused = run.ask("hello", Peer("worker", 4), session=0)["message"]
    assert "2 places for workers that join: it does not expect worker 4" in refused
    assert "place" not in Run(2, 1).ask(PLACE)


def test_training_does_not_wait_for_a_joiner():
    run = Run(2, 1, max_joiners=2, supervised=False)
    peer, _ = run.start_joiner()
    members = [run.member("server", 0), *(run.member("worker", number) for number in range(2))]
    run.strike("pause", peer, 60.0)
    run.passes(40.0)
    assert run.members == members
    assert (run.ask()["ended"], run.ask()["missing"]) == (None, [])


def test_a_joiner_is_let_in_after_a_boundary_with_the_boundarys_result():
    run, first, second = in_epoch(max_joiners=2)
    with run.loses(lambda send: send.message.kind == "view"):
        peer, started = run.start_joiner()
        run.passes(2.0)
        assert started.value is None, "a joiner is not let in before all members have its view"
    run.passes(3.0)
    result = started.fields
    assert (result["sequence"], result["midway"], result["joined"]) == (1, 1, True)
    assert (started.workers, result["admitted"]) == ([0, 1], [2])
    run.call(peer, "epoch", epoch=0, samples=10, chunk=1)
    chunk = run.call(peer, "take", epoch=0, processed=0).fields
    assert (chunk["start"], chunk["stop"]) == (2, 3)
    # The workers wait for the joiner at the end of the epoch, until it has left.
    gathered = [run.collect(worker) for worker in (first, second)]
    run.passes(2.0)
    assert not any(answer.value for answer in gathered)
    run.call(peer, "leave", epoch=0, processed=1)
    assert [answer.workers for answer in gathered] == [[0, 1]] * 2


def test_a_joiner_is_not_let_in_after_a_later_collective():
    run, first, second = in_epoch(max_joiners=2)
    for worker in (first, second):
        run.collect(worker)
    peer, started = run.start_joiner()
    run.passes(2.0)
    assert started.value is None
    for worker in (first, second):
        run.collect(worker, "boundary", boundary=True)
    run.passes(2.0)
    assert (started.fields["sequence"], started.fields["admitted"]) == (3, [2])
    assert "midway" not in started.fields
    # The next joiner waits until the joiner that was let in at the boundary has begun.
    _, started = run.start_joiner()
    run.passes(2.0)
    assert started.value is None
    run.call(first, "epoch", epoch=1, samples=10, chunk=1)
    for worker in (first, second, peer):
        run.collect(worker, "admitted")
    run.passes(2.0)
    assert (started.fields["sequence"], started.fields["midway"]) == (4, 3)


def test_a_waiting_joiner_hears_of_the_end_of_the_run():
    run, first, second = in_epoch(max_joiners=2)
    for worker in (first, second):
        run.collect(worker)
    peer, _ = run.start_joiner()
    for worker in (first, second):
        run.call(worker, "leave")
    ended = run.ended(peer)
    assert ended is not None
    assert ended.clean
    assert run.ask(PLACE)["ended"]["clean"]
    assert "place" not in run.ask(PLACE)


def test_the_record_of_joiners_does_not_grow_with_epochs():
    run, *_ = in_epoch(max_joiners=1)
    for incarnation in range(50):
        peer, _ = run.start_joiner()
        assert peer.incarnation == incarnation
        run.call(peer, "leave")
    roster = run.coordinator.roster
    assert list(roster.gone) == [peer]
    assert "counts as dead" in run.ask("hello", peer._replace(incarnation=17), session=0)["message"]
    assert not roster.history.faults


def restart(run: Run, worker: Peer, midway: bool = True) -> Answer:
    """Kill a worker, start it again, let it ask to be let in, and return the result of its request."""
    run.report_death(worker, replaced=True)
    again = run.member(worker.role, worker.id, worker.incarnation + 1)
    answer = run.collect(again, "start", seal=True, **({MIDWAY: True} if midway else {}))
    run.passes(2.0)
    return answer


@pytest.mark.parametrize("why", ["it cannot come midway", "the others' next epoch has begun"])
def test_a_restarted_worker_waits_for_the_next_boundary(why: str) -> None:
    run, first, second = in_epoch()
    if why != "it cannot come midway":
        run.call(first, "epoch", epoch=1, samples=10, chunk=1)
    start = restart(run, second, midway=why != "it cannot come midway")
    assert start.value is None
    run.collect(first, "boundary", boundary=True)
    run.passes(2.0)
    assert (start.fields["sequence"], start.fields["admitted"]) == (2, [1])
    assert MIDWAY not in start.fields


def test_a_restarted_worker_waits_for_a_boundary_if_the_last_boundary_let_a_joiner_in():
    run, first, second = in_epoch(max_joiners=1)
    for peer in (first, second):
        run.collect(peer)
    joined, _ = run.start_joiner()
    for peer in (first, second):
        run.call(peer, "epoch", epoch=1, samples=10, chunk=1)
        run.collect(peer, "boundary", boundary=True)
    run.passes(2.0)
    for peer in (first, second, joined):
        run.collect(peer, "admitted")
    assert run.coordinator.dispatcher.may_join(1)
    assert restart(run, second).value is None


def test_a_joiner_does_not_replace_an_expected_worker():
    clock = StaleClock(1, expected=2)
    clock.join(2)
    clock.join(0)
    assert clock.expects
    clock.join(1)
    assert not clock.expects
