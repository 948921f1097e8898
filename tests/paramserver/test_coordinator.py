"""What the coordinator tells its members: who takes part, where the others are, who waits for whom, why it is over."""

import re
from collections import Counter

import pytest
from control_world import LOST, Run, trained
from simulation import control
from simulation.faults import Moment, Network

from cnnstrategies.paramserver.coordinator.watchdog import UNEVEN, Wait, named, stuck
from cnnstrategies.paramserver.core.node import End, Peer, Send

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
def test_a_server_that_training_did_not_wait_for_is_filled(dies: bool) -> None:
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
    assert (came == roster.number > 1) == dies


def test_a_process_that_nobody_expects_is_not_let_in() -> None:
    run = Run(1)
    worker = run.member("worker", 0)
    assert "was registered already" in run.ask("hello", worker._replace(process=8), session=0)["message"]
    assert "no worker 1 is expected" in run.ask("hello", Peer("worker", 1), session=0)["message"]
    assert run.members == [worker]


@pytest.mark.parametrize("comes", [True, False])
def test_the_stopped_miss_a_lost_coordinator_after_a_time_out(comes: bool) -> None:
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


def test_a_circle_is_stuck_and_a_chain_that_ends_is_not():
    chain = [Wait("a", ("w0",), ("w1",)), Wait("b", ("w1",), ("w2",))]
    assert stuck(chain) == []
    circle = [*chain, Wait("c", ("w2",), ("w0", "w3"))]
    assert stuck(circle) == circle
    any_will_do = [*chain, Wait("c", ("w2",), ("w0", "w3"), everyone=False)]
    assert stuck(any_will_do) == []
    assert stuck([Wait("held", ("w0",), ())]) == []


def test_few_are_named_of_many():
    assert named([f"w{one}" for one in range(9)]) == "w0, w1, w2, w3 and 5 more"


@pytest.mark.parametrize("second", ["get", "nothing"])
def test_workers_that_wait_for_each_other_are_named(second: str) -> None:
    run = Run(2)
    zero, one = (run.member("worker", number) for number in range(2))
    run.collect(zero, "barrier")
    if second == "get":
        run.call(one, "get", name="x")
    run.passes(30.0)
    if second == "nothing":
        assert run.ended(one) is None, "worker 1 computes"
        return
    text = "nobody can go on: worker 0 in `barrier` for worker 1; worker 1 in `get x` for worker 0, worker 1"
    assert run.ended(zero) == run.ended(one) == End(text, clean=False)


def end_of_the_run(figures: dict[int, dict[str, float]]) -> str | None:
    """What three workers are told of whom the first two wait in a collective; each says how far it is."""
    run = Run(3)
    run.figures = lambda peer: figures[peer.id]
    peers = [run.member("worker", number) for number in range(3)]
    for peer in peers[:2]:
        run.collect(peer, "boundary")
    run.passes(30.0)
    ended = run.ended(peers[2])
    return None if ended is None else ended.reason


def test_a_worker_that_needs_those_who_wait_for_it_ends_the_run():
    """Who has made as many steps may be on its way, and so may who allows that others are behind."""
    at_five = {"pushed": 5, "needs": 5}
    assert end_of_the_run({0: at_five, 1: at_five, 2: {"pushed": 6, "needs": 6}}) == (
        "nobody can go on: worker 0, worker 1 in `boundary` for worker 2; worker 2 in `step 5` for worker 0, worker 1: "
        + UNEVEN
    )
    text = end_of_the_run({0: at_five, 1: {"pushed": 4, "needs": 4}, 2: at_five})
    assert text is not None
    assert "worker 2 in `step 4` for worker 1: " in text
    for third in (at_five, {"pushed": 6, "needs": 2}, {"step": 9}, {"pushed": 3, "needs": 3}):
        assert end_of_the_run({0: at_five, 1: at_five, 2: third}) is None, third
    assert end_of_the_run({0: {}, 1: {}, 2: {"pushed": 6, "needs": 6}}) is None, "these have not said how far they are"


KINDS = ("hello", "beat", "pong", "view", "collect", "put", "get", "epoch", "take", "leave", "done", "probe", "unknown")


class WithoutTheFirst(Network):
    """Loses the first two messages of each kind."""

    def __init__(self) -> None:
        super().__init__(0, control.TIMEOUT, tcp=False)
        self.sent: Counter[str] = Counter()

    def moment(self, sender: Peer, send: Send) -> Moment | None:
        self.sent[send.message.kind] += 1
        return LOST if self.sent[send.message.kind] <= 2 else None


@pytest.mark.parametrize("restarts", [0, 1])
def test_the_first_of_each_kind_is_lost(restarts: int) -> None:
    """One that is sent only once, or in one case only, is not left to chance."""
    network = WithoutTheFirst()
    outcome = control.run(control.Plan(restarts=restarts), network, pace=0)
    assert outcome.violation is None
    assert outcome.end == "worker 0 comes to the end; worker 1 comes to the end"
    assert all(network.sent[kind] > 2 for kind in KINDS), network.sent


def test_a_coordinator_deaf_to_requests_is_named() -> None:
    run, (worker,) = trained(1)
    with run.loses(lambda send: send.message.kind in ("collect", "probe")):
        waits = run.collect(worker, "end")
        run.passes(29.0)
        assert run.ended(worker) is None
        run.passes(3.0)
    assert isinstance(waits.value, str)
    assert re.fullmatch(
        "worker 0: the coordinator at here has not answered `end` for 3[01] s, although it hears this process's "
        "heartbeats",
        waits.value,
    )


def test_the_silence_of_rank_0_ends_a_run() -> None:
    """Its supervision may be gone with it: then the promise that it would be replaced is nobody's."""
    run, (zero, one) = trained(2)
    run.strike("pause", zero, 1000.0)
    run.passes(25.0)  # The time-out, and as long for a supervision.
    ended = run.ended(one)
    assert ended is not None
    assert "worker 0 (process 4711 on here) was silent for 10 s, and nobody took" in ended.reason
