"""Tests of rebalancing microbatches between replicas, with gains that can be worked out by hand."""

from math import inf

import pytest

from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.planning.stage_shares import propose_stage_shares

pytestmark = pytest.mark.light


def proposed_for(placement, times, step=0.0, most=(inf, inf, inf, inf)):
    """Return the proposed rebalancing if each rank takes these seconds per microbatch, two thirds in the backward."""
    seconds = [[time / 3 for time in times], [2 * time / 3 for time in times]]
    return propose_stage_shares(placement, "gpipe", False, [(0, 1)], seconds, step, most)


def test_a_fast_replica_gets_more_microbatches_than_a_slow_replica():
    """The second replica takes 3 s per microbatch, the first 1 s: shares of 4 and 4 become 6 and 2."""
    now = Placement((2, 1), microbatches=8)
    proposed = proposed_for(now, [1.0, 3.0, 0.03])
    assert proposed.shares == (6, 2, 8)
    assert proposed.gain == pytest.approx(12.0 / 6.0 - 1, abs=0.02)
    # The time of a step outside the timetable stays the same.
    assert proposed_for(now, [1.0, 3.0, 0.03], step=24.0).gain == pytest.approx(24.0 / 18.0 - 1, abs=0.02)


def test_shares_belong_to_ranks_under_any_placement():
    now = Placement((2, 2), "replicas", microbatches=8)
    assert now.ranks(0) == [0, 2]
    assert proposed_for(now, [1.0, 0.5, 3.0, 0.5]).shares == (6, 4, 2, 4)


def test_no_rank_runs_more_microbatches_than_it_can_hold():
    now = Placement((2, 1), microbatches=8)
    assert proposed_for(now, [1.0, 3.0, 0.03], most=[5, 9, 9]).shares == (5, 3, 8)
    assert proposed_for(now, [1.0, 3.0, 0.03], most=[4, 9, 9]) is None
    assert proposed_for(now, [1.0, 3.0, 0.03], most=[5, 2, 3]).shares == (5, 3, 8), (
        "the current number of microbatches fits"
    )


@pytest.mark.parametrize(
    ("shares", "times"),
    [
        ((), [1.0, 1.0, 0.1]),
        ((6, 2, 8), [1.0, 3.0, 0.03]),  # The shares are already the best.
        ((), [1.0, 3.0, 2.0]),  # The second stage is the slowest.
        ((), [1.0, 1.02, 0.1]),
    ],
)
def test_shares_stay_if_a_step_gains_little(shares, times):
    assert proposed_for(Placement((2, 1), microbatches=8, shares=shares), times) is None
