"""Messages of the coordinator to its members and to observers: membership, waits, and reasons for the end."""

import math

import pytest

from cnnstrategies.identity import Identity
from cnnstrategies.paramserver.coordinator.collective_rounds import UNEVEN
from cnnstrategies.paramserver.coordinator.participant import Participant
from cnnstrategies.paramserver.core.node import ControlError, End, Message, Peer
from tests.paramserver.control_world import Run, trained
from tests.paramserver.simulation.faults import Moment

pytestmark = pytest.mark.light


def test_workers_in_different_collectives_get_an_error_that_names_both() -> None:
    run, (first, second) = trained(2)
    waits = run.collect(first, "validation")
    run.collect(second, "reduce sum")
    assert isinstance(waits.value, str)
    assert "`validation`" in waits.value
    assert "`reduce sum`" in waits.value


def test_a_request_with_wrong_contents_gets_an_error() -> None:
    run, (worker,) = trained(1)
    answer = run.call(worker, "take", epoch="first", processed=0)
    assert isinstance(answer.value, str)
    assert answer.value.startswith("`take` has wrong contents: ")


def test_a_worker_of_another_run_is_told_both_names_and_the_run_goes_on() -> None:
    expected, other = Identity("digits", "0123456789ab", "SLURM step 7.0"), Identity("letters", "ba9876543210")
    run = Run(2, max_joiners=1, run=expected.text())
    for text, name in ((other.text(), str(other)), ("", "a program with another version of cnnstrategies")):
        ended = run.ended(run.member("worker", 1, run=text))
        assert ended == End(f"this process of {name} has reached {expected} at here", clean=False, stranger=True)
    assert run.coordinator.roster.missing() == ["worker 0", "worker 1"]
    members = [run.member("worker", worker, run=expected.text()) for worker in range(2)]
    assert run.members == members
    assert run.member("worker", 2) in run.members, "a joiner has chosen the run by its address"


def test_a_process_that_comes_after_all_workers_have_left_is_told() -> None:
    run, workers = trained(2, 1)
    for peer in workers:
        run.call(peer, "leave")
    run.passes(2.0)
    over = End("the session is over: every worker has left", clean=True)
    assert run.ended(Peer("server", 0)) == over, "the server has nothing more to do"
    assert run.ended(run.member("worker", 1, incarnation=1)) == over


@pytest.mark.parametrize("dies", [True, False])
def test_a_server_that_training_did_not_wait_for_gets_copies(dies: bool) -> None:
    """Start training without server 0, whose first process has not registered."""
    run = Run(1, 2, survivable=1)
    run.member("server", 1)
    worker = run.member("worker", 0)
    if dies:
        about = {"role": "server", "id": 0, "incarnation": 0, "process": 4711}
        run.call(run.supervision, "died", **about, how="was killed", replaced=True)
    run.collect(worker, "start", seal=True)
    run.passes(2.0)
    run.member("server", 0, incarnation=int(dies))
    roster = run.coordinator.roster
    (since,) = (member.since for member in roster.members if member.peer[:2] == ("server", 0))
    assert roster.sealed
    assert (since == roster.number > 1) == dies


@pytest.mark.parametrize("copies", [0, 1])
@pytest.mark.parametrize("set_up", [True, False])
def test_a_living_server_that_does_not_follow_views_is_lost(set_up: bool, copies: int) -> None:
    """Check both patiences: a server that is still being set up has as long as processes have to appear."""
    run = Run(1, 2, survivable=copies, supervised=False, appear=100.0)
    run.member("server", 0)
    blind = run.member("server", 1, sees=int(set_up))
    worker = run.member("worker", 0)
    start = run.collect(worker, "start", seal=True)
    patience = 60 if set_up else 100
    run.passes(patience - 2.0)
    assert start.value is None
    assert blind in run.members
    run.passes(4.0)
    how = f"server 1 (process 4711 on here) has not followed view 3 for {patience} s"
    assert how in str(run.ask()["faults"])
    ended = run.ended(worker)
    assert (ended is None) == isinstance(start.value, Message) == bool(copies)
    assert ended is None or ended.reason.startswith(how)


def test_workers_get_a_later_specification_after_all_servers_have_seen_the_change() -> None:
    run, (first, second) = trained(2, 2)
    for number, text in (0, b"six parameters"), (0, b"ignored"), (1, b"eight parameters"), (1, b"ignored"):
        run.call(first, "put", text, number=number)
    blind = run.member("server", 1, incarnation=1, sees=0)
    run.call(first, "put", b"ten parameters", number=2)
    asked = [run.call(peer, "get", number=2) for peer in (first, second, run.world.processes["server", 0].peer)]
    assert [answer.value is None for answer in asked] == [True, True, False], "server 1 has not seen the change"
    roster = run.coordinator.roster
    assert roster.view_message.fields["view"]["specification"] == 2
    assert roster.view_message.fields["view"]["begun"] > 2, "no server holds values, so all servers are equally old"
    run.report_death(blind, replaced=True)
    run.member("server", 1, incarnation=2)
    run.passes(2.0)
    assert [bytes(*answer.value.frames) for answer in asked] == [b"ten parameters"] * 3  # type: ignore[union-attr]


@pytest.mark.parametrize("comes", [True, False])
def test_a_stopped_worker_misses_the_coordinator_a_time_out_after_going_on(comes: bool) -> None:
    """Check that the worker waits a whole time-out after it goes on, also if a message arrived during the stop."""
    run, (worker,) = trained(1)
    run.links.fate = lambda send: Moment("late", 0.3) if comes and send.message.kind == "done" else None
    run.call(worker, "epoch", epoch=0, samples=4, chunk=1)
    run.strike("pause", worker, 8.0)
    run.world.kill(run.world.processes["coordinator", 0])
    run.passes(8.0 + 8.0)
    assert run.ended(worker) is None
    run.passes(3.5)
    ended = run.ended(worker)
    assert ended is not None
    assert "was silent for 10 s" in ended.reason


def end_of_the_run(figures: dict[int, dict[str, float]]) -> str | None:
    """Return the reason with which a run of three workers ends, or None.

    Two workers wait in a collective for the third. `figures` holds the progress that each worker reports.
    """
    run = Run(3)
    run.figures = lambda peer: figures[peer.id]
    peers = [run.member("worker", number) for number in range(3)]
    for peer in peers[:2]:
        run.collect(peer, "boundary")
    run.passes(30.0)
    ended = run.ended(peers[2])
    return None if ended is None else ended.reason


def test_workers_that_wait_for_each_other_end_the_run():
    """Check also that a worker that does not wait for the others does not end the run: it may still come."""
    at_five = {"pushed": 5, "needs": 5}
    assert end_of_the_run({0: at_five, 1: at_five, 2: {"pushed": 6, "needs": 6}}) == (
        "no worker can go on: worker 0, worker 1 in `boundary` for worker 2; "
        "worker 2 in `step 5` for worker 0, worker 1: " + UNEVEN
    )
    text = end_of_the_run({0: at_five, 1: {"pushed": 4, "needs": 4}, 2: at_five})
    assert text is not None
    assert "worker 2 in `step 4` for worker 1: " in text
    for third in (at_five, {"pushed": 6, "needs": 2}, {"step": 9}, {"pushed": 3, "needs": 3}):
        assert end_of_the_run({0: at_five, 1: at_five, 2: third}) is None, third
    assert end_of_the_run({0: {}, 1: {}, 2: {"pushed": 6, "needs": 6}}) is None, (
        "the waiting workers have not reported their progress"
    )


# Observers


def test_an_observer_sees_members_waits_and_deaths() -> None:
    run, (first, second) = trained(2, 1, survivable=1)
    figures = {"step": 3, "samples": 24.0, "sent": 1000, "received": 900, "waited": 0.5, "staleness": 2}
    run.figures = lambda peer: figures if peer == first else {}
    run.collect(first, "metric")
    run.report_death(Peer("server", 0, 0, 7), replaced=True)
    run.passes(2.0)
    run.member("server", 0, incarnation=1)
    answer = run.ask()
    assert (answer["training"], answer["ended"], answer["missing"]) == (True, None, [])
    assert answer["seconds"] == pytest.approx(run.world.now)
    assert answer["waits"] == [["metric", "worker 0", "worker 1"]]
    members = answer["members"]
    assert [(member["role"], member["id"], member["incarnation"]) for member in members] == [
        ("server", 0, 1),
        (*first[:3],),
        (*second[:3],),
    ]
    _, shown, other = members
    assert (shown["process"], shown["host"], shown["takes_part"], shown["figures"]) == (4711, "here", True, figures)
    assert 0 < shown["silent"] <= 1.0
    assert 0 < answer["seconds"] - shown["measured"] <= 1.1, "figures are as old as the last heartbeat"
    assert other["figures"] == {}
    (died_at, death), (replaced_at, replacement) = answer["faults"]
    assert death == "server 0 (process 4711 on here) was killed"
    assert replacement == "server 0 (process 4711 on here) has replaced the earlier process of server 0"
    assert 2.0 < died_at - replaced_at < 2.1
    assert answer["losses"] == 1


def test_a_heartbeat_with_invalid_figures_is_dropped_as_a_whole() -> None:
    run, (worker,) = trained(1)
    beat = {"session": 0, "here": 9, "seen": 9, "signal": 0}
    run.coordinator.on_message(run.world.now, worker, Message("beat", {**beat, "figures": {"step": 1}}))
    values = ("1", True, None, [1], -1, 1 << 63, math.nan, math.inf)
    for figures in ([], "step", 5, {"bytes": 1}, *({"step": value} for value in values)):
        with pytest.raises(ControlError):
            run.coordinator.on_message(run.world.now, worker, Message("beat", {**beat, "seen": 10, "figures": figures}))
    (member,) = run.coordinator.roster.members
    assert (member.figures, member.acknowledged) == ({"step": 1}, 9)


def test_members_hear_of_a_restarted_coordinator() -> None:
    run, (worker,) = trained(1)
    run.coordinate(1)
    run.passes(2.0)
    answer = run.ask()
    assert (answer["restarts"], answer["losses"], [member["role"] for member in answer["members"]]) == (
        1,
        1,
        ["worker"],
    )
    ((_, text),) = answer["faults"]
    assert text == "the coordinator was started again"
    role = run.world.processes[worker[:2]].role
    assert isinstance(role, Participant)
    assert role.losses == 1
