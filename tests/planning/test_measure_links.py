"""Measuring the connection between two processes."""

import pytest
import torch

from cnnstrategies.planning import measure_links
from cnnstrategies.planning.measure_links import MEDIUM, SMALL, measure_cluster, measure_local_link


def test_loopback_has_a_plausible_latency_and_bandwidth() -> None:
    link = measure_local_link(torch.device("cpu"), "gloo")
    assert 1e-6 < link.latency < 10.0
    assert 1e5 < link.bandwidth < 1e13


@pytest.mark.light
def test_held_up_small_messages_make_no_endless_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_links.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(measure_links.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(measure_links, "round_trips", lambda *_: [0.003, 0.002])
    link = measure_cluster(1, torch.device("cpu")).hosts[0].inside
    assert link.bandwidth == pytest.approx((MEDIUM - SMALL) / (0.01 * 0.002 / 2))


def test_a_backend_that_fails_is_named() -> None:
    with pytest.raises(RuntimeError, match="measuring the link with backend 'carrier-pigeon' failed: exit codes"):
        measure_local_link(torch.device("cpu"), "carrier-pigeon")
