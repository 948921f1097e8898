"""What fits into a rank's memory bounds its share, and a run goes on with those that it had."""

from math import inf

import pytest
import torch

from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.shares import Deals
from cnnstrategies.strategies import balancing
from cnnstrategies.strategies.hybrid_pipeline.balancing import StageBalance

pytestmark = pytest.mark.light
GIB = 2**30


def test_the_peak_of_a_step_tells_how_many_samples_fit(monkeypatch):
    """8 samples took 2 GiB beside 1 GiB that stays; of 8 GiB for this process nine tenths are to be used."""
    device = torch.device("cuda", 0)
    for name, value in (
        ("memory_allocated", 1 * GIB),
        ("max_memory_allocated", 3 * GIB),
        ("memory_reserved", 4 * GIB),
        ("mem_get_info", (4 * GIB, 80 * GIB)),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda of, value=value: value)
    assert balancing.fitting(8, device) == 24  # 6.2 GiB of 0.25 GiB each
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda of: 1 * GIB)
    assert balancing.fitting(8, device) == inf, "nothing is known yet"
    assert balancing.fitting(8, torch.device("cpu")) == inf


def test_no_rank_is_proposed_more_than_fits():
    now, seconds = (32, 32), [1.0, 4.0]
    for fits, most, shares in (
        ((inf, inf), inf, (51, 13)),
        ((40.0, inf), inf, (40, 24)),
        ((40.0, inf), 36, (36, 28)),
        ((20.0, 9.0), inf, None),  # Each goes on with what it has held.
    ):
        found = balancing.propose(now, Deals([1, 1], 1, most), seconds, 128.0, fits)
        assert (found and found.shares) == shares


def test_a_run_goes_on_with_the_shares_of_its_ranks():
    """Under another layout a share would be another rank's."""

    def balance(*replicas):
        deals = Deals([1, 1, 1])
        return deals, StageBalance(deals, Placement(replicas, microbatches=9), torch.device("cpu"), lambda row: [row])

    deals, before = balance(2, 1)
    deals.change(0, 9, [7, 2, 9])
    for replicas, shares in (((2, 1), (7, 2, 9)), ((1, 2), (1, 1, 1))):
        deals, after = balance(*replicas)
        after.load_state_dict(before.state_dict())
        assert deals.shares == shares
