"""Workers of the run that were started again, and begin in the middle of an epoch."""

from array import array

import pytest
from test_join import HELLO, ONE, SERVER, ZERO, Run

from cnnstrategies.paramserver.coordinator.dispatch import Dispatcher
from cnnstrategies.paramserver.coordinator.memory import MIDWAY, Memory
from cnnstrategies.paramserver.core.node import Message, Peer
from cnnstrategies.paramserver.core.requests import DONE

pytestmark = pytest.mark.light
AGAIN = Peer("worker", 1, 1)


def returns(run, midway=True):
    """Worker 1 dies and is started again: it makes the set-up anew, and asks to be let in."""
    died = {"role": "worker", "id": 1, "incarnation": 0, "process": 4711, "how": "was killed", "replaced": True}
    run.say(Peer("supervision", 0), "died", **died)
    run.say(AGAIN, "hello", **HELLO)
    more = {MIDWAY: True} if midway else {}
    return run.collect(AGAIN, "start", 0, seal=True, boundary=False, **more)


def told(run, effects=()):
    """What the worker that was started again is told of its start, when all have the newest view."""
    found = [*effects, *run.beats(SERVER, ZERO), *run.beats(AGAIN)]
    return [one for one in run.told(found, AGAIN, DONE) if "joined" in one]


def test_one_is_let_in_after_a_boundary_with_what_the_others_were_told_there():
    run = Run(elastic=0)
    run.trains()
    (start,) = told(run, returns(run))
    assert (start["sequence"], start[MIDWAY], start["joined"], start["admitted"]) == (1, 1, True, [1])
    run.say(AGAIN, "epoch", epoch=0, samples=10, chunk=1)
    (chunk,) = run.told(run.say(AGAIN, "take", epoch=0, processed=0, ordinal=0), AGAIN, DONE)
    assert (chunk["start"], chunk["stop"]) == (1, 2), "what the one before it had taken comes next"
    # From there on it is one of the group.
    assert not run.told(run.collect(ZERO, "gather", 2, seal=False, boundary=False), ZERO, DONE)
    effects = run.collect(AGAIN, "gather", 2, seal=False, boundary=False)
    (gathered,) = run.told(effects, ZERO, DONE)
    assert gathered["ids"] == [0, 1]


def test_one_waits_for_the_next_boundary_if_it_does_not_say_that_it_can_come_before():
    run = Run(elastic=0)
    run.trains()
    assert not told(run, returns(run, midway=False))
    (start,) = told(run, run.collect(ZERO, "boundary", 2, seal=False, boundary=True))
    assert (start["sequence"], start["admitted"]) == (2, [1])
    assert MIDWAY not in start


def test_one_waits_for_the_next_boundary_when_the_others_have_met_since():
    run = Run(elastic=0)
    run.trains()
    run.collect(ONE, "gather", 2, seal=False, boundary=False)
    run.collect(ZERO, "gather", 2, seal=False, boundary=False)
    assert not told(run, returns(run))


def test_one_waits_for_the_next_boundary_when_the_last_has_let_somebody_in():
    run = Run(elastic=1)
    run.trains()
    for one in (ZERO, ONE):
        run.collect(one, "gather", 2, seal=False, boundary=False)
    peer, _ = run.joins()
    for one in (ZERO, ONE):
        run.say(one, "epoch", epoch=1, samples=10, chunk=1)
        run.collect(one, "boundary", 3, seal=False, boundary=True)
    run.beats(SERVER, ZERO, ONE, peer)
    for one in (ZERO, ONE, peer):
        run.collect(one, "admitted", 4, seal=False, boundary=False)
    assert run.coordinator.dispatcher.may_come(1)
    effects = returns(run)
    assert not told(run, [*effects, *run.beats(peer)])


def test_one_waits_for_the_next_boundary_if_the_next_epoch_has_begun_for_anybody():
    run = Run(elastic=0)
    run.trains()
    run.say(ZERO, "epoch", epoch=1, samples=10, chunk=1)
    assert not told(run, returns(run))


@pytest.mark.parametrize("left", [True, False])
def test_one_that_has_begun_to_load_this_epoch_is_let_in_if_it_has_got_something(left):
    run = Run(elastic=0)
    run.trains()
    for ordinal in range(1, 9) if not left else ():
        run.say(ZERO, "take", epoch=0, processed=0, ordinal=ordinal)
    run.say(ONE, "take", epoch=0, processed=1, ordinal=1)
    died = {"role": "worker", "id": 1, "incarnation": 0, "process": 4711, "how": "was killed", "replaced": True}
    run.say(Peer("supervision", 0), "died", **died)
    run.say(AGAIN, "hello", **HELLO)
    run.say(AGAIN, "take", epoch=0, processed=0, ordinal=0)
    assert left == bool(told(run, run.collect(AGAIN, "start", 0, seal=True, boundary=False, **{MIDWAY: True})))


def test_one_that_was_told_that_nothing_is_left_of_an_epoch_it_has_begun_to_load_is_not_let_in():
    dispatcher = Dispatcher()
    dispatcher.begin(0, 2, 1)
    dispatcher.meet()
    for ordinal in range(2):
        dispatcher.take(0, 0, 0, (0, 2), ordinal, 0.0)
    dispatcher.take(2, 0, 0, (0, 2), 0, 0.0)
    assert not dispatcher.take(1, 0, 0, (0, 2), 0, 0.0)
    dispatcher.lose(2)  # Something is left after all.
    assert dispatcher.can_spare((0, 1), others=False)
    assert not dispatcher.may_come(1)
    assert dispatcher.may_come(3)


def test_each_that_comes_back_finds_a_chunk_of_its_own():
    run = Run(elastic=0)
    run.trains()
    for ordinal in range(1, 9):
        run.say(ZERO, "take", epoch=0, processed=0, ordinal=ordinal)
    assert told(run, returns(run)), "what its life before had taken is left"
    assert not run.told(run.say(ZERO, "take", epoch=0, processed=9, ordinal=9), ZERO, DONE)[0]["stop"]
    (chunk,) = run.told(run.say(AGAIN, "take", epoch=0, processed=0, ordinal=0), AGAIN, DONE)
    assert (chunk["start"], chunk["stop"]) == (1, 2)


def test_one_waits_for_the_next_boundary_when_nothing_is_left():
    run = Run(elastic=0)
    run.trains()
    for ordinal in range(1, 9):
        run.say(ZERO, "take", epoch=0, processed=0, ordinal=ordinal)
    run.say(ONE, "take", epoch=0, processed=1, ordinal=1)
    assert not told(run, returns(run))


def test_who_comes_back_counts_among_those_for_whom_something_must_be_left():
    dispatcher = Dispatcher()
    dispatcher.begin(0, 3, 1)
    dispatcher.meet()
    for ordinal in range(2):
        dispatcher.take(0, 0, 0, (0,), ordinal, 0.0)
    assert dispatcher.may_come(1)
    assert dispatcher.can_spare((0, 1), others=False)
    assert not dispatcher.can_spare((0, 1, 2), others=False), "one chunk for two"
    assert not dispatcher.can_spare((0, 1), others=True)


def test_what_was_taken_before_it_was_known_in_which_epoch_the_others_are_is_given_out_again():
    dispatcher = Dispatcher()
    dispatcher.begin(0, 4, 1)
    early = dispatcher.take(1, 0, 0, (0,), 0, 0.0)
    dispatcher.begin(1, 4, 1)
    dispatcher.give_back(1, before=1)
    assert dispatcher.take(0, 1, 0, (0, 1), 0, 0.0) == early
    mine = dispatcher.take(1, 1, 0, (0, 1), 0, 0.0)
    dispatcher.give_back(1, before=1)  # The same message comes again, late.
    assert dispatcher.take(0, 1, 1, (0, 1), 1, 0.0) != mine


def test_what_one_leaves_behind_that_dies_when_the_next_epoch_has_begun_comes_in_that():
    dispatcher = Dispatcher()
    dispatcher.begin(0, 2, 1)
    left = dispatcher.take(1, 0, 0, (0, 1), 0, 0.0)
    dispatcher.take(0, 0, 0, (0, 1), 0, 0.0)
    dispatcher.begin(1, 2, 1)
    dispatcher.lose(1)
    assert dispatcher.take(0, 1, 0, (0,), 0, 0.0) == left


def test_one_that_has_come_midway_can_hand_over_what_the_others_were_told():
    memory = Memory()
    fields = {"sequence": 7, "ids": [0, 1], "sizes": [1, 1], "view": 3, "joined": True, "admitted": [1], MIDWAY: 7}
    memory.answered(Message("collect", {"seal": True, MIDWAY: True}), Message(DONE, fields, (b"x", b"y")))
    item = memory.item("round 7")
    assert item is not None
    assert item[0] == {"sequence": 7, "ids": [0, 1], "sizes": [1, 1], "view": 3, "admitted": []}
    assert item[1] == (b"x", b"y")


def test_chunks_that_were_given_back_are_told_no_coordinator():
    memory = Memory()
    for epoch in (0, 1):
        memory.answered(Message("epoch", {"epoch": epoch, "samples": 8, "chunk": 1}), Message(DONE))
        take = Message("take", {"epoch": epoch, "processed": 0})
        memory.answered(take, Message(DONE, {"epoch": epoch, "start": 2, "stop": 3}))
    memory.answered(Message("give_back", {"epoch": 1}), Message(DONE))
    report, (_, chunks) = memory.report(0, 0, {})
    assert [one[0] for one in report["epochs"]] == [1]
    assert array("q", [1, 2, 3]).tobytes() == chunks
