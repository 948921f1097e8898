import pytest

from cnnstrategies.paramserver.server.roll_call import PATIENCE_SECONDS, RollCall

pytestmark = pytest.mark.light


def test_nobody_is_waited_for_where_nothing_was_lost() -> None:
    roll = RollCall()
    roll.follow({0, 1})
    assert roll.complete


def test_all_workers_of_the_first_view_are_waited_for_but_those_that_go() -> None:
    roll = RollCall()
    roll.begin()
    roll.follow({0, 1, 2})
    roll.here(0)
    assert not roll.complete
    roll.follow({0, 1, 3})
    assert not roll.complete, "worker 1"
    roll.here(1)
    assert roll.complete, "worker 3 came later"


def test_the_patience_ends() -> None:
    roll = RollCall()
    roll.begin()
    roll.follow({0, 1})
    assert not roll.expire(5.0)
    assert not roll.expire(5.0 + PATIENCE_SECONDS / 2)
    assert not roll.complete
    assert roll.expire(5.0 + PATIENCE_SECONDS)
    assert roll.complete
    assert not roll.expire(50.0), "only once"


def test_a_call_waits_for_those_that_are_named() -> None:
    """Of a server that begins to lead: it may have met only some of the members."""
    roll = RollCall()
    roll.follow({0, 1, 2})
    roll.call({1, 2})
    assert not roll.expire(5.0)
    roll.here(2)
    assert not roll.complete
    roll.call({1})
    assert not roll.expire(5.0 + PATIENCE_SECONDS), "the patience begins anew"
    roll.here(1)
    assert roll.complete
