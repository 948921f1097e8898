"""Samples and microbatches are divided completely, within bounds, and as near to the shares as whole numbers can be."""

import random

import pytest

from cnnstrategies import ConfigurationError
from cnnstrategies.shares.dealing import deal, rotation, turns

pytestmark = pytest.mark.light


@pytest.fixture(name="draws")
def some_shares():
    """Return random shares, each with a number of samples to divide."""
    return [
        ([random.choice([1.0, random.uniform(0.05, 4)]) for _ in range(random.randint(1, 6))], random.randint(0, 130))
        for _ in range(500)
    ]


def test_samples_are_dealt_completely_and_nearest_to_the_shares(draws):
    for shares, samples in draws:
        dealt = deal(samples, shares)
        assert sum(dealt) == samples
        for share, count in zip(shares, dealt, strict=True):
            assert abs(count - samples * share / sum(shares)) < 1
    assert deal(64, [1, 1, 1]) == (22, 21, 21)


def test_lower_and_upper_bounds_hold_where_possible(draws):
    for shares, samples in draws:
        ranks = len(shares)
        least = random.randint(0, 10)
        most = max(least, random.randint(-(-samples // ranks), 130))
        dealt = deal(samples, shares, least, most)
        assert sum(dealt) == samples
        assert min(dealt) >= min(least, samples // ranks)
        assert max(dealt) <= most
        of_each = [count + random.randint(0, 9) for count in deal(samples, [1] * ranks)]
        dealt = deal(samples, shares, least, of_each)
        assert sum(dealt) == samples
        assert all(count <= bound for count, bound in zip(dealt, of_each, strict=True))
    assert deal(100, [100, 1, 1], least=8, most=60) == (60, 20, 20)
    with pytest.raises(
        ConfigurationError,
        match="9 samples cannot be divided among 2 processes that hold at most 4 each: use at most 8",
    ):
        deal(9, [1, 1], most=4)


def test_ranks_take_turns_for_places_and_microbatches(draws):
    for shares, count in draws:
        dealt = deal(count, shares)
        places = turns(dealt)
        assert sorted(place for of_rank in places for place in of_rank) == list(range(count))
        assert [len(of_rank) for of_rank in places] == list(dealt)
        order = rotation(tuple(shares), count)
        of_each = deal(count, shares, least=1)
        assert tuple(order.count(rank) for rank in range(len(shares))) == of_each
        # No rank is ever ahead of its share, or behind it, by two microbatches or more.
        for stretch in range(count):
            for rank, number in enumerate(of_each):
                assert abs(order[:stretch].count(rank) - stretch * number / count) < 2
    assert turns((3, 3)) == [[0, 2, 4], [1, 3, 5]]
    assert rotation((1, 1, 1), 7) == (0, 1, 2, 0, 1, 2, 0)
