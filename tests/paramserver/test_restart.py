"""A coordinator that follows one that was killed: whom it waits for, and who may go before the others know enough."""

import pytest
from control_world import LOST, WHILE, Run, trained
from simulation.faults import Moment

from cnnstrategies.paramserver.coordinator.participant import Participant
from cnnstrategies.paramserver.coordinator.settings import Address
from cnnstrategies.paramserver.core.node import Call, Message, Peer
from cnnstrategies.paramserver.core.view import View

pytestmark = pytest.mark.light
BEAT = 1.0  # seconds


def test_who_leaves_is_kept_until_the_others_know_what_it_alone_could_tell() -> None:
    run, (first, second) = trained(2)
    with run.loses(lambda send: send.to == second and send.message.fields.get("sequence") == 1):
        run.collect(first)
        lost = run.collect(second)
        leaving = run.call(first, "leave")
        run.passes(2 * BEAT)
        assert leaving.value is None
        run.coordinate(1)
    run.passes(3 * BEAT)
    assert lost.fields["ids"] == [0, 1], "the result that only the first knew"
    assert leaving.value is not None


def test_who_leaves_is_kept_until_somebody_else_has_the_view_without_it() -> None:
    run, (first, _) = trained(2)
    run.passes(BEAT)
    with run.loses(lambda send: send.message.kind == "view"):
        leaving = run.call(first, "leave")
        run.passes(2 * BEAT)
        assert leaving.value is None, "the next coordinator would wait for it, and miss it"
    run.passes(3 * BEAT)
    assert leaving.value is not None


def test_a_coordinator_that_is_no_more_is_not_heard() -> None:
    run, (first, second) = trained(2)
    late = Moment("late", 3 * BEAT)
    run.links.fate = lambda send: {first: late, second: LOST}[send.to] if send.message.kind == "done" else None
    waits = run.collect(first)
    run.collect(second)
    run.links.fate = lambda send: None
    run.strike("pause", second, 5 * BEAT)
    run.coordinate(1)
    run.passes(4 * BEAT)
    assert waits.value is None, "the next coordinator may decide otherwise: nobody has told it"
    run.passes(4 * BEAT)
    assert waits.fields["ids"] == [0, 1]


def test_a_restart_waits_for_members_but_not_for_those_that_a_supervision_knows_to_have_ended() -> None:
    run, (first, second, third) = trained(3)
    with run.loses(lambda send: send.message.kind == "view"):
        run.died(third, replaced=False)
    run.strike("mute", second, 2 * BEAT)
    run.coordinate(1)
    run.passes(1.5 * BEAT)
    assert run.coordinator.recovers, "two members of the newest view have not reported"
    run.passes(2 * BEAT)
    assert run.coordinator.recovers
    run.call(run.supervision, "status")
    assert not run.coordinator.recovers, "the supervision tells each coordinator anew"
    assert run.members == [first, second]


def test_who_waits_for_others_and_asks_is_not_silent() -> None:
    """It has no view yet, and sends no heartbeats."""
    run = Run(2)
    run.coordinate(1)
    first = run.member("worker", 0)
    run.passes(25 * BEAT)
    assert run.coordinator.recovers, "nobody knows a view, and the second has not come"
    with run.loses(lambda send: send.to == first):
        second = run.member("worker", 1)
        run.passes(BEAT)
        assert run.members == [first, second]


def test_who_reports_when_a_coordinator_has_given_up_waiting_meets_one_that_has_ended_the_run() -> None:
    """It would be a new member of a run that the coordinator knows nothing of."""
    run, (worker,) = trained(1, timeout=60.0, appear=28.0)  # A heartbeat every 6 s; the coordinator looks every 3 s.
    run.passes(1.0)
    run.coordinate(1)
    run.strike("cut", worker, 28.2)
    run.passes(28.2)
    assert run.coordinator.recovers
    run.passes(1.4)
    ended = [message.fields["message"] for _, message in run.told if message.kind in ("ended", "refused")]
    assert ended
    assert all("worker 0 did not appear" in text for text in ended)
    assert not run.members


def test_who_was_taken_for_dead_is_not_asked_for_what_others_know_too() -> None:
    run, (first, second, third) = trained(3)
    with run.loses(lambda send: send.to == first and send.message.fields.get("sequence") == 1):
        lost, *_ = [run.collect(peer) for peer in (first, second, third)]
        run.strike("pause", second, 25 * BEAT)
        run.passes(25 * BEAT - WHILE)
        assert second not in run.members
        run.coordinate(1)
    run.passes(5 * BEAT)
    assert lost.fields["sequence"] == 1, "the third knows it, too"


def test_one_that_comes_again_is_let_in_when_the_others_have_made_the_end_of_the_set_up_once_more() -> None:
    """The coordinator was killed when all had contributed, and before it had told them."""
    run = Run(3)
    first, dead, slow = (run.member("worker", one) for one in range(3))
    with run.loses(lambda send: "sequence" in send.message.fields and send.to.role == "worker"):
        started = [run.collect(peer, "start", seal=True) for peer in (first, dead, slow)]
        run.coordinate(1)
    with run.loses(lambda send: send.to == slow and send.message.kind in ("done", "unknown")):
        run.died(dead, replaced=True)
        again = run.member("worker", 1, life=1)
        run.passes(2 * BEAT)
        joined = run.collect(again, "start", seal=True)
    run.passes(3 * BEAT)
    assert started[0].fields["ids"] == started[2].fields["ids"] == [0, 2]
    for peer in (first, slow):
        run.collect(peer, "boundary", boundary=True)
    run.passes(3 * BEAT)
    assert joined.fields["admitted"] == [1]


def test_what_a_member_gives_before_it_is_registered_is_kept_until_that_says_whether_it_must_be() -> None:
    for restarts, kept in ((True, {"specification": False}), (False, {})):
        worker = Participant(Address("here", "worker", 0, timeout=10.0), 7, {})
        worker.start(0.0)
        worker.on_call(0.0, Call(1, "put", {"name": "specification"}))
        worker.on_message(0.0, Peer("coordinator", 0), Message("done", {}, request=2))
        assert worker.memory.report(0, 0, {})[0]["values"] == {"specification": False}
        registered = {"view": View(1, (), ()).as_dict(), "keep": restarts}
        worker.on_message(0.0, Peer("coordinator", 0), Message("done", registered, request=1))
        assert worker.memory.report(0, 0, {})[0]["values"] == kept


@pytest.mark.parametrize("restartable", [True, False])
def test_without_restarts_nothing_is_kept_for_them(restartable: bool) -> None:
    run, (worker,) = trained(1, restartable=restartable)
    role = run.world.processes[worker[:2]].role
    assert isinstance(role, Participant)
    assert role.memory.report(0, 0, {})[0]["rounds"] == [0] * restartable
    assert run.call(worker, "leave").value is not None


def test_a_server_that_training_has_waited_for_is_as_old_as_the_others_and_one_that_comes_again_is_not() -> None:
    """Whoever is equally old has its share of the slices: none of them had state when training began."""
    run = Run(1, 2, survivable=1)
    worker, _ = run.member("worker", 0), run.member("server", 0)
    run.collect(worker, "start", seal=True)
    server = run.member("server", 1)
    run.passes(BEAT)
    ages = []
    for life in (0, 1):
        (view,) = [message.fields["view"] for _, message in run.told if message.kind == "view"][-1:]
        newest = View.from_dict(view)
        ages.append([newest.age(one) for one in newest.servers])
        if not life:
            run.died(server, replaced=True)
            run.member("server", 1, life=1)
            run.passes(BEAT)
    (first, late), (old, again) = ages
    assert first == late
    assert old < again


def test_what_one_held_that_was_lost_before_a_restart_is_given_to_another() -> None:
    run, (first, second) = trained(2)
    for peer in (first, second):
        run.call(peer, "epoch", epoch=0, samples=4, chunk=1)
    run.call(second, "take", epoch=0, processed=0)
    run.strike("pause", second, 22 * BEAT)  # Longer than the time-out: it is missed.
    run.passes(21 * BEAT)
    run.strike("mute", first, 3 * BEAT)  # The other one reports first.
    run.coordinate(1)
    run.passes(6 * BEAT)
    chunks = [run.call(first, "take", epoch=0, processed=done) for done in range(4)]
    assert [chunk.fields["start"] for chunk in chunks] == [0, 1, 2, 3]
