"""Tests of the default number of microbatches and of the division of small batches."""

import itertools

import pytest

from cnnstrategies.pipeline.microbatches import Split, default_microbatches
from cnnstrategies.shares.dealing import rotation

pytestmark = pytest.mark.light

REPLICAS = [(1, 1), (2, 2), (3, 1), (1, 3), (1, 2, 1), (2, 3), (4,), (1, 1, 1, 1)]


def smallest(replicas, samples, microbatches):
    return min(Split((samples,) * replicas[0], rotation((1,) * replicas[0], microbatches)).sizes)


def test_with_batch_normalisation_microbatches_have_at_least_eight_images():
    """Each replica of the widest stage runs equally many microbatches, at least one.

    Without batch normalisation, the default is four microbatches per stage and per replica of the widest stage.
    """
    assert default_microbatches((1, 2, 1)) == 24
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


def test_a_smaller_last_batch_fills_fewer_microbatches():
    assert Split((5, 3), rotation((1, 1), 5), usual=16).sizes == (5, 3, 0, 0, 0)
    for rows, microbatches, usual in itertools.product(range(20), range(1, 6), range(1, 20)):
        split = Split((rows,), (0,) * microbatches, usual)
        assert sum(split.sizes) == rows
        assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(split.bounds))
        if rows < usual:
            full = max(Split((usual,), (0,) * microbatches).sizes)
            filled = [size for size in split.sizes if size]
            assert max(split.sizes) <= full + (full == 2), (
                "microbatches need at most the usual memory, or one sample more"
            )
            assert min(filled, default=full) > 1 or full == 1 or rows == 1, (
                "batch normalisation refuses a single sample"
            )
            assert len(filled) <= -(-rows // full)
