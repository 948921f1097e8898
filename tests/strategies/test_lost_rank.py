"""A rank that has lost another one lets that end first."""

from types import SimpleNamespace

import pytest
from lightning.pytorch.strategies import DDPStrategy

from cnnstrategies._lightning_private import MultiProcessingLauncher
from cnnstrategies.pipeline.transport import PeerError
from cnnstrategies.strategies.hybrid_pipeline import steps

pytestmark = pytest.mark.light
FORKED = MultiProcessingLauncher(DDPStrategy(), "fork")


@pytest.mark.parametrize(
    ("launcher", "error", "waits"),
    [
        (FORKED, PeerError("Connection closed by peer"), [steps.GRACE]),
        (FORKED, PeerError("Timed out waiting 6000ms"), [steps.SILENT]),
        (None, PeerError("Connection closed by peer"), []),
        (FORKED, ValueError("gone"), []),
    ],
)
def test_only_a_started_rank_that_has_lost_another_waits(monkeypatch, launcher, error, waits):
    waited = []
    monkeypatch.setattr(steps, "wait_to_be_ended", waited.append)

    @steps.after_the_lost_rank
    def step(strategy):
        raise error

    with pytest.raises(type(error)):
        step(SimpleNamespace(launcher=launcher))
    assert waited == waits
