"""All-reduces and the overlap of buckets by hand."""

import pytest

from cnnstrategies.pipeline import gradients
from cnnstrategies.planning.cluster import Cluster, Host
from cnnstrategies.planning.costs import Link
from cnnstrategies.planning.stage_costs import BUCKET_BYTES, Bucket, all_reduce, buckets, reduced_at

pytestmark = pytest.mark.light


def test_the_bucket_is_the_pipelines() -> None:
    assert BUCKET_BYTES == gradients.BUCKET_BYTES


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        ("flat", 2 * 7 * (0.5 + 800 / 8 / 10)),
        ("two_level", 2 * 3 * (0.1 + 800 / 4 / 100) + 2 * 1 * (0.5 + 800 / 2 / 10)),
    ],
)
def test_rings_through_two_machines_of_four(kind: str, seconds: float) -> None:
    cluster = Cluster((Host(4, Link(10, 0.5), Link(100, 0.1)),) * 2, all_reduce=kind)  # type: ignore[arg-type]
    assert all_reduce(cluster, 0, 8)(800) == pytest.approx(seconds)
    assert all_reduce(cluster, 4, 4)(800) == pytest.approx(2 * 3 * (0.1 + 2)), "inside one machine"
    assert all_reduce(cluster, 3, 1)(800) == 0.0


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        ("flat", 2 * 3 * (0.5 + 2 * 800 / 4 / 10)),
        ("two_level", 2 * 1 * (0.1 + 800 / 2 / 100) + 2 * 1 * (0.5 + 2 * 800 / 2 / 10)),
    ],
)
def test_rings_that_cross_the_same_network_at_once_share_it(kind: str, seconds: float) -> None:
    cluster = Cluster((Host(2, Link(10, 0.5), Link(100, 0.1)),) * 2, all_reduce=kind, rings=2)  # type: ignore[arg-type]
    assert all_reduce(cluster, 0, 4)(800) == pytest.approx(seconds)
    assert all_reduce(cluster, 0, 2)(800) == pytest.approx(2 * 1 * (0.1 + 4)), "inside one machine"


def test_gradients_are_gathered_as_the_backward_makes_them() -> None:
    gathered = buckets([(1.0, 10), (2.0, 0), (3.0, 30), (4.0, 30), (5.0, 5)], size=50, first=10)
    assert gathered == [Bucket(1.0, 10), Bucket(4.0, 60), Bucket(5.0, 5)]


def test_a_bucket_waits_for_its_gradients_and_for_the_one_before() -> None:
    parts = [Bucket(1.0, 10), Bucket(2.0, 30), Bucket(9.0, 10)]
    assert reduced_at(parts, 10.0, lambda size: size / 10) == pytest.approx(10.0)
    assert reduced_at(parts, 10.0, lambda size: size / 5) == pytest.approx(11.0)
    assert reduced_at(parts, 10.0, lambda size: size) == pytest.approx(1 + 10 + 30 + 10)
