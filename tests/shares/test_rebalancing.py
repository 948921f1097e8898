"""Tests of balancing: a rank's memory limits its share, and a resumed run keeps its shares."""

from math import inf

import pytest
import torch

from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.shares import rebalancing
from cnnstrategies.shares.history import ShareHistory
from cnnstrategies.strategies.hybrid_pipeline.stage_shares import StageBalance

pytestmark = pytest.mark.light
GIB = 2**30


def test_the_number_of_samples_that_fit_follows_from_peak_memory(monkeypatch):
    """8 samples took 2 GiB, and 1 GiB does not depend on samples. The process may use nine tenths of 8 GiB."""
    device = torch.device("cuda", 0)
    for name, value in (
        ("memory_allocated", 1 * GIB),
        ("max_memory_allocated", 3 * GIB),
        ("memory_reserved", 4 * GIB),
        ("mem_get_info", (4 * GIB, 80 * GIB)),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda of, value=value: value)
    assert rebalancing.fitting(8, device) == 24  # 6.2 GiB are left, and each sample takes 0.25 GiB.
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda of: 1 * GIB)
    assert rebalancing.fitting(8, device) == inf, "before the first step the peak is unknown"
    assert rebalancing.fitting(8, torch.device("cpu")) == inf


def test_no_proposed_share_exceeds_a_ranks_memory():
    now, seconds = (32, 32), [1.0, 4.0]
    for fits, most, shares in (
        ((inf, inf), inf, (51, 13)),
        ((40.0, inf), inf, (40, 24)),
        ((40.0, inf), 36, (36, 28)),
        ((inf, inf), (45, 64), (45, 19)),
        ((20.0, 9.0), inf, None),  # Each rank keeps its share.
    ):
        proposal = rebalancing.propose(now, ShareHistory([1, 1], 1, most), seconds, 128.0, fits)
        assert (proposal and proposal.shares) == shares


def test_a_resumed_run_keeps_its_shares_under_the_same_layout():
    """Under a different layout, shares would belong to different ranks, so they start equal."""

    def balance(*replicas):
        history = ShareHistory([1, 1, 1])
        return history, StageBalance(
            history, Placement(replicas, microbatches=9), torch.device("cpu"), lambda row: [row]
        )

    history, before = balance(2, 1)
    history.change(0, 9, [7, 2, 9])
    for replicas, shares in (((2, 1), (7, 2, 9)), ((1, 2), (1, 1, 1))):
        history, after = balance(*replicas)
        after.load_state_dict(before.state_dict())
        assert history.shares == shares


def test_a_run_with_another_number_of_ranks_begins_without_the_bets_of_the_checkpoint():
    def balance(ranks):
        return rebalancing.Balance(ShareHistory([1] * ranks), torch.device("cpu"), lambda row: [row])

    saved = balance(2).state_dict()
    saved["bets"] |= {"lost": 1, "blocks": [[0.1, [0.01, 0.03]]], "shares_before": [32, 32], "steps_before": [0.2]}
    for ranks, bets in ((2, saved["bets"]), (3, balance(3).state_dict()["bets"])):
        resumed = balance(ranks)
        resumed.load_state_dict(saved)
        assert resumed.state_dict()["bets"] == bets
    old = balance(2)
    old.load_state_dict({"since": saved["since"]})
    assert old.state_dict() == balance(2).state_dict(), "checkpoints of earlier versions have no bets"
