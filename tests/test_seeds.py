"""Seeds that are mixed from neighbouring numbers are all different."""

from cnnstrategies.runtime.seeds import mixed_seed


def test_every_tuple_has_a_seed_of_its_own_and_always_the_same():
    seeds = {mixed_seed(seed, step, rank) for seed in range(5) for step in range(100) for rank in range(4)}
    assert len(seeds) == 2000
    assert all(0 <= seed < 2**63 for seed in seeds)
    # The value must never change: a resumed run draws the numbers that the uninterrupted run would have drawn.
    assert mixed_seed(1, 2, 3) == 733464669408481064
