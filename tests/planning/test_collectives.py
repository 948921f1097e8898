"""All-reduces and the overlap of buckets by hand."""

import pytest

from cnnstrategies.pipeline import gradients
from cnnstrategies.planning.cluster import Cluster, Host
from cnnstrategies.planning.costs import Link
from cnnstrategies.planning.stage_costs import BUCKET_BYTES, Bucket, all_reduce, buckets, reduced_at

pytestmark = pytest.mark.light


def test_the_bucket_is_the_pipelines() -> None:
    assert BUCKET_BYTES == gradients.BUCKET_BYTES


def test_rings_through_two_machines_of_four() -> None:
    cluster = Cluster((Host(4, Link(10, 0.5), Link(100, 0.1)),) * 2)
    assert all_reduce(cluster, 0, 8)(800) == pytest.approx(2 * 7 * (0.5 + 800 / 8 / 10))
    assert all_reduce(cluster, 4, 4)(800) == pytest.approx(2 * 3 * (0.1 + 2)), "inside one machine"
    assert all_reduce(cluster, 3, 1)(800) == 0.0


def test_gradients_are_gathered_as_the_backward_makes_them() -> None:
    gathered = buckets([(1.0, 10), (2.0, 0), (3.0, 30), (4.0, 30), (5.0, 5)], size=50, first=10)
    assert gathered == [Bucket(1.0, 10), Bucket(4.0, 60), Bucket(5.0, 5)]


def test_a_bucket_waits_for_its_gradients_and_for_the_one_before() -> None:
    parts = [Bucket(1.0, 10), Bucket(2.0, 30), Bucket(9.0, 10)]
    assert reduced_at(parts, 10.0, lambda size: size / 10) == pytest.approx(10.0)
    assert reduced_at(parts, 10.0, lambda size: size / 5) == pytest.approx(11.0)
    assert reduced_at(parts, 10.0, lambda size: size) == pytest.approx(1 + 10 + 30 + 10)
