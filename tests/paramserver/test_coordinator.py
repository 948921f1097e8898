"""What the coordinator tells its members: who may take part, where the others are, and why the run is over."""

import pytest
from control_world import Run, trained
from simulation.faults import Moment

from cnnstrategies.paramserver.core.node import End, Peer

pytestmark = pytest.mark.light


def test_workers_that_do_not_agree_are_told_where_each_is() -> None:
    run, (zero, one) = trained(2)
    waits = run.collect(zero, "validation")
    run.collect(one, "reduce sum")
    assert isinstance(waits.value, str)
    assert "`validation`" in waits.value
    assert "`reduce sum`" in waits.value


def test_one_process_can_end_the_run_for_all() -> None:
    run, (zero, one) = trained(2)
    waits = run.collect(zero)
    run.call(one, "end", message="worker 1 found NaN", clean=False)
    assert waits.value == "worker 1 found NaN"
    assert run.ended(zero) == run.ended(one) == End("worker 1 found NaN", clean=False)


def test_who_comes_after_all_have_left_is_told() -> None:
    run, workers = trained(2, 1)
    for peer in workers:
        run.call(peer, "leave")
    run.passes(2.0)
    over = End("the session is over: every worker has left", clean=True)
    assert run.ended(Peer("server", 0)) == over, "it has nothing more to do"
    assert run.ended(run.member("worker", 1, life=1)) == over


@pytest.mark.parametrize("dies", [True, False])
def test_a_server_that_training_has_begun_without_is_filled_and_one_that_it_has_waited_for_is_not(dies: bool) -> None:
    """The first process of its place has never registered."""
    run = Run(1, 2, survivable=1)
    run.member("server", 1)
    worker = run.member("worker", 0)
    if dies:
        about = {"role": "server", "id": 0, "incarnation": 0, "process": 4711}
        run.call(run.supervision, "died", **about, how="was killed", replaced=True)
    run.collect(worker, "start", seal=True)
    run.passes(2.0)
    run.member("server", 0, life=int(dies))
    roster = run.coordinator.roster
    (came,) = (member.since for member in roster.members if member.peer[:2] == ("server", 0))
    assert roster.sealed
    assert (came > roster.begun > 0) == dies


def test_a_process_that_nobody_expects_is_not_let_in() -> None:
    run = Run(1)
    worker = run.member("worker", 0)
    assert "was registered already" in run.ask("hello", worker._replace(process=8), session=0)["message"]
    assert "no worker 1 is expected" in run.ask("hello", Peer("worker", 1), session=0)["message"]
    assert run.members == [worker]


@pytest.mark.parametrize("comes", [True, False])
def test_who_was_stopped_misses_a_coordinator_that_is_gone_a_time_out_after_it_goes_on(comes: bool) -> None:
    """No sooner: it could not hear it. And no later, whatever had come while it was stopped."""
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
