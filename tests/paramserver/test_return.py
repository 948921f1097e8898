"""Workers of the run that were started again, and begin in the middle of an epoch."""

import pytest
from control_world import Answer, Run, in_epoch

from cnnstrategies.paramserver.coordinator.dispatch import Dispatcher
from cnnstrategies.paramserver.coordinator.meetings import MIDWAY
from cnnstrategies.paramserver.core.node import Peer

pytestmark = pytest.mark.light


def comes_again(run: Run, one: Peer) -> Peer:
    """A worker dies and is started again."""
    run.died(one, replaced=True)
    return run.member(one.role, one.id, one.life + 1)


def starts(run: Run, again: Peer, midway: bool = True) -> Answer:
    """It has made the set-up anew, and asks to be let in; what it is told when all have the newest view."""
    answer = run.collect(again, "start", seal=True, **({MIDWAY: True} if midway else {}))
    run.passes(2.0)
    return answer


def takes(run: Run, worker: Peer, chunks: int, processed: int = 0) -> None:
    for _ in range(chunks):
        run.call(worker, "take", epoch=0, processed=processed)


def test_one_is_let_in_after_a_boundary_with_what_the_others_were_told_there():
    run, zero, one = in_epoch()
    again = comes_again(run, one)
    start = starts(run, again).fields
    assert (start["sequence"], start[MIDWAY], start["joined"], start["admitted"]) == (1, 1, True, [1])
    run.call(again, "epoch", epoch=0, samples=10, chunk=1)
    chunk = run.call(again, "take", epoch=0, processed=0).fields
    assert (chunk["start"], chunk["stop"]) == (1, 2), "what the one before it had taken comes next"
    # From there on it is one of the group.
    gathered = run.collect(zero)
    assert gathered.value is None
    run.collect(again)
    assert gathered.fields["ids"] == [0, 1]


def test_one_waits_for_the_next_boundary_if_it_does_not_say_that_it_can_come_before():
    run, zero, one = in_epoch()
    start = starts(run, comes_again(run, one), midway=False)
    assert start.value is None
    run.collect(zero, "boundary", boundary=True)
    run.passes(2.0)
    assert (start.fields["sequence"], start.fields["admitted"]) == (2, [1])
    assert MIDWAY not in start.fields


def test_one_waits_for_the_next_boundary_when_the_others_have_met_since():
    run, zero, one = in_epoch()
    for peer in (one, zero):
        run.collect(peer)
    assert starts(run, comes_again(run, one)).value is None


def test_one_waits_for_the_next_boundary_when_the_last_has_let_somebody_in():
    run, zero, one = in_epoch(elastic=1)
    for peer in (zero, one):
        run.collect(peer)
    joined, _ = run.joins()
    for peer in (zero, one):
        run.call(peer, "epoch", epoch=1, samples=10, chunk=1)
        run.collect(peer, "boundary", boundary=True)
    run.passes(2.0)
    for peer in (zero, one, joined):
        run.collect(peer, "admitted")
    assert run.coordinator.dispatcher.may_come(1)
    assert starts(run, comes_again(run, one)).value is None


def test_one_waits_for_the_next_boundary_if_the_next_epoch_has_begun_for_anybody():
    run, zero, one = in_epoch()
    run.call(zero, "epoch", epoch=1, samples=10, chunk=1)
    assert starts(run, comes_again(run, one)).value is None


@pytest.mark.parametrize("left", [True, False])
def test_one_that_has_begun_to_load_this_epoch_is_let_in_if_it_has_got_something(left):
    run, zero, one = in_epoch()
    takes(run, zero, 0 if left else 8)
    takes(run, one, 1, processed=1)
    again = comes_again(run, one)
    takes(run, again, 1)
    assert left == (starts(run, again).value is not None)


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
    run, zero, one = in_epoch()
    takes(run, zero, 8)
    again = comes_again(run, one)
    assert starts(run, again).value is not None, "what its life before had taken is left"
    assert not run.call(zero, "take", epoch=0, processed=9).fields["stop"]
    chunk = run.call(again, "take", epoch=0, processed=0).fields
    assert (chunk["start"], chunk["stop"]) == (1, 2)


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
