"""A rank that has lost another one lets that end first."""

from types import SimpleNamespace

import pytest

from cnnstrategies.pipeline.transport import PeerError
from cnnstrategies.strategies.hybrid_pipeline import lost_rank

pytestmark = pytest.mark.light


@pytest.mark.parametrize(
    ("start_method", "error", "waits"),
    [
        ("fork", PeerError("Connection closed by peer"), [lost_rank.GRACE]),
        ("fork", PeerError("Timed out waiting 6000ms"), [lost_rank.SILENT]),
        ("popen", PeerError("Connection closed by peer"), []),
        ("fork", ValueError("gone"), []),
    ],
)
def test_only_a_forked_or_spawned_rank_that_has_lost_another_one_waits(monkeypatch, start_method, error, waits):
    waited = []
    monkeypatch.setattr(lost_rank, "_wait_to_be_ended", waited.append)

    @lost_rank.after_the_lost_rank
    def step(strategy):
        raise error

    with pytest.raises(type(error)):
        step(SimpleNamespace(_start_method=start_method))
    assert waited == waits
