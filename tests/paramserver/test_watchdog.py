"""Members that wait for each other are found and named; those that wait for somebody who computes are not disturbed."""

import pytest

from cnnstrategies.paramserver.coordinator.coordinator import Coordinator
from cnnstrategies.paramserver.coordinator.settings import CoordinatorSettings
from cnnstrategies.paramserver.coordinator.watchdog import UNEVEN, Wait, named, stuck
from cnnstrategies.paramserver.core.node import Message, Peer, Send

pytestmark = pytest.mark.light


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


def say(coordinator: Coordinator, now: float, worker: int, kind: str, request: int, **fields: object) -> None:
    message = Message(kind, {"session": 0, "floor": request, **fields}, (), request)
    coordinator.on_message(now, Peer("worker", worker), message)


@pytest.mark.parametrize("second", ["get", "nothing"])
def test_workers_that_wait_for_each_other_end_the_run_and_are_named(second: str):
    coordinator = Coordinator(CoordinatorSettings("here", 2, 0, timeout=1.0))
    coordinator.start(0.0)
    for worker in range(2):
        say(coordinator, 0.0, worker, "hello", 1, process=1, host="here", endpoint="", public_key="")
    say(coordinator, 0.0, 0, "collect", 2, sequence=0, operation="barrier")
    if second == "get":
        say(coordinator, 0.0, 1, "get", 2, name="x")
    ended = []
    for tick in range(60):
        for worker in range(2):
            say(coordinator, tick / 20, worker, "beat", 0, here=0, seen=0, notices=0, told=0)
        effects = coordinator.on_timer(tick / 20, "tick")
        ended += [one.message for one in effects if isinstance(one, Send) and one.message.kind == "ended"]
    if second == "nothing":
        assert not ended, "worker 1 computes"
        return
    text = "nobody can go on: worker 0 in `barrier` for worker 1; worker 1 in `get x` for worker 0, worker 1"
    assert [one.fields["message"] for one in ended] == [text] * 2


def end_of_the_run(figures: dict[int, dict[str, float]]) -> str | None:
    """What three workers are told of whom the first two wait in a collective; each says how far it is."""
    coordinator = Coordinator(CoordinatorSettings("here", 3, 0, timeout=1.0))
    coordinator.start(0.0)
    for worker in range(3):
        say(coordinator, 0.0, worker, "hello", 1, process=1, host="here", endpoint="", public_key="")
    for worker in range(2):
        say(coordinator, 0.0, worker, "collect", 2, sequence=0, operation="boundary")
    ended = set()
    for tick in range(60):
        for worker in range(3):
            beat = {"here": 0, "seen": 0, "notices": 0, "told": 0, "figures": figures[worker]}
            say(coordinator, tick / 20, worker, "beat", 0, **beat)
        effects = coordinator.on_timer(tick / 20, "tick")
        ended |= {
            one.message.fields["message"] for one in effects if isinstance(one, Send) and one.message.kind == "ended"
        }
    return ended.pop() if ended else None


def test_a_worker_that_needs_a_step_of_those_who_wait_for_it_ends_the_run():
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
