"""How many microbatches a step has when nobody says."""

import itertools

import pytest

from cnnstrategies.pipeline.microbatches import Split, default_microbatches

pytestmark = pytest.mark.light

REPLICAS = [(1, 1), (2, 2), (3, 1), (1, 3), (1, 2, 1), (2, 3), (4,), (1, 1, 1, 1)]


def smallest(replicas, samples, microbatches):
    return min(Split((samples,) * replicas[0], microbatches).sizes)


def test_without_batch_normalisation_four_for_each_stage_and_replica():
    assert [default_microbatches(replicas) for replicas in REPLICAS] == [8, 16, 24, 24, 24, 24, 16, 16]


def test_with_it_as_many_as_leave_each_eight_images():
    """And as many for each replica of the widest stage, at least one."""
    for replicas, samples in itertools.product(REPLICAS, (1, 3, 7, 8, 15, 16, 23, 24, 31, 32, 64, 100, 256)):
        widest, usual = max(replicas), default_microbatches(replicas)
        chosen = default_microbatches(replicas, samples)
        case = f"replicas {replicas}, {samples} samples: {chosen} microbatches"
        assert widest <= chosen <= usual, case
        assert chosen % widest == 0, case
        if chosen > widest:
            assert smallest(replicas, samples, chosen) >= 8, case
        if chosen < usual:
            assert smallest(replicas, samples, chosen + widest) < 8, case


def test_the_quickstart_has_eight_of_eight():
    assert default_microbatches((1, 1), 64) == 8
    assert default_microbatches((1, 1), 32) == 4
    assert default_microbatches((2, 2), 32) == 8
