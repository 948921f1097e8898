"""Measuring the connection between two processes."""

import pytest
import torch

from cnnstrategies.planning.measure_links import measure_local_link


def test_loopback_has_a_plausible_latency_and_bandwidth() -> None:
    link = measure_local_link(torch.device("cpu"), "gloo")
    assert 1e-6 < link.latency < 1.0
    assert 1e6 < link.bandwidth < 1e12


def test_a_backend_that_fails_is_named() -> None:
    with pytest.raises(RuntimeError, match="measuring the link with backend 'carrier-pigeon' failed: exit codes"):
        measure_local_link(torch.device("cpu"), "carrier-pigeon")
