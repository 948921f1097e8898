"""Microbatches are dealt anew as the timetable gains by it, which can be worked out by hand."""

from math import inf

import pytest

from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.planning.redeal import redeal

pytestmark = pytest.mark.light


def found(placement, times, step=0.0, most=(inf, inf, inf, inf)):
    """With a backward that takes twice as long as the forward."""
    seconds = [[time / 3 for time in times], [2 * time / 3 for time in times]]
    return redeal(placement, "gpipe", False, [(0, 1)], seconds, step, most)


def test_replicas_of_a_stage_are_dealt_what_they_are_quick_at():
    """One of the first stage takes three times as long for each: 4 of 3 s become 2, beside 6 of 1 s."""
    now = Placement((2, 1), microbatches=8)
    proposed = found(now, [1.0, 3.0, 0.03])
    assert proposed.shares == (6, 2, 8)
    assert proposed.gain == pytest.approx(12.0 / 6.0 - 1, abs=0.02)
    # What a step takes beyond its timetable it takes afterwards, too.
    assert found(now, [1.0, 3.0, 0.03], step=24.0).gain == pytest.approx(24.0 / 18.0 - 1, abs=0.02)


def test_shares_are_those_of_ranks_however_these_are_numbered():
    now = Placement((2, 2), "replicas", microbatches=8)
    assert now.ranks(0) == [0, 2]
    assert found(now, [1.0, 0.5, 3.0, 0.5]).shares == (6, 4, 2, 4)


def test_no_rank_runs_more_microbatches_than_it_can_hold():
    now = Placement((2, 1), microbatches=8)
    assert found(now, [1.0, 3.0, 0.03], most=[5, 9, 9]).shares == (5, 3, 8)
    assert found(now, [1.0, 3.0, 0.03], most=[4, 9, 9]) is None
    assert found(now, [1.0, 3.0, 0.03], most=[5, 2, 3]).shares == (5, 3, 8), "what it holds now it can hold"


@pytest.mark.parametrize(
    ("shares", "times"),
    [
        ((), [1.0, 1.0, 0.1]),
        ((6, 2, 8), [1.0, 3.0, 0.03]),  # They have that.
        ((), [1.0, 3.0, 2.0]),  # The second stage takes longer.
        ((), [1.0, 1.02, 0.1]),
    ],
)
def test_nothing_is_dealt_anew_where_a_step_gains_little(shares, times):
    assert found(Placement((2, 1), microbatches=8, shares=shares), times) is None
