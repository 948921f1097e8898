"""Stragglers, failures and prices against published and known figures."""

import pytest

from cnnstrategies.planning.candidates import checkpoint_interval, goodput, price_per_hour, slowed_by_stragglers
from cnnstrategies.planning.cluster import Cluster, Failures, Host
from cnnstrategies.planning.costs import Link

pytestmark = pytest.mark.light

LINK = Link(1e9, 1e-5)


@pytest.mark.parametrize(("devices", "sigmas"), [(1, 0.0), (16, 1.766), (64, 2.350), (512, 3.045)])
def test_the_slowest_of_n_is_its_expected_maximum(devices: int, sigmas: float) -> None:
    cluster = Cluster((Host(devices, LINK, LINK),), jitter=0.1)
    assert slowed_by_stragglers(cluster, devices) == pytest.approx(1 + 0.1 * sigmas, rel=2e-3)


@pytest.mark.parametrize(("hours", "minutes"), [(24, 117), (6, 57), (0.25, 9.1)])
def test_dalys_interval_is_that_of_his_paper(hours: float, minutes: float) -> None:
    """Checkpoints of 5 minutes."""
    assert checkpoint_interval(300, hours * 3600) / 60 == pytest.approx(minutes, rel=0.01)


def test_goodput_falls_with_the_devices_and_the_interval_is_the_best() -> None:
    failures = Failures(50_000 * 3600.0, 600.0, 60.0)
    shares = [goodput(failures, devices) for devices in (1, 1000, 16384)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.999
    assert 0.85 < shares[2] < 0.95, "16,384 devices with a failure every 3 hours"
    assert goodput(failures, 10**9) == 0.0
    assert goodput(None, 10**9) == 1.0
    assert goodput(failures, 16384, survives=True) > 0.999


def test_a_restart_costs_all_devices_or_those_alone_that_fail() -> None:
    survivors = Failures(1000.0, 250.0, 1.0)
    assert goodput(survivors, 8, survives=True) == pytest.approx(1000 / (1000 + 250))
    shares = [goodput(Failures(1000.0, restart, 1.0), 8) for restart in (0.0, 5.0, 50.0)]
    assert shares == sorted(set(shares), reverse=True)


def test_only_the_machines_in_use_are_paid() -> None:
    cluster = Cluster((Host(2, LINK, LINK, price=1.0), Host(2, LINK, LINK, price=3.0)))
    assert [price_per_hour(cluster, devices) for devices in (1, 2, 3, 4)] == [3.0, 3.0, 4.0, 4.0]
