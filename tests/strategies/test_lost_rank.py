"""Tests of a rank that has lost another rank: it waits, so that the lost rank ends first and is named as the cause."""

from types import SimpleNamespace

import pytest
from lightning.pytorch.strategies import DDPStrategy

from cnnstrategies._lightning_private import MultiProcessingLauncher
from cnnstrategies.runtime.groups import PeerError
from cnnstrategies.strategies import lost_rank

pytestmark = pytest.mark.light
FORKED = MultiProcessingLauncher(DDPStrategy(), "fork")


@pytest.mark.parametrize(
    ("launcher", "error", "waits"),
    [
        (FORKED, PeerError("Connection closed by peer"), [lost_rank.GRACE]),
        (FORKED, PeerError("Timed out waiting 6000ms"), [lost_rank.SILENT]),
        (None, PeerError("Connection closed by peer"), []),
        (FORKED, ValueError("gone"), []),
    ],
)
def test_only_a_rank_of_a_launcher_waits_after_losing_another_rank(monkeypatch, launcher, error, waits):
    waited = []
    monkeypatch.setattr(lost_rank, "wait_to_be_ended", waited.append)

    @lost_rank.after_the_lost_rank
    def step(strategy):
        raise error

    with pytest.raises(type(error)):
        step(SimpleNamespace(launcher=launcher))
    assert waited == waits
