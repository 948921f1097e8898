"""Which rank sees which samples: every one, once, in the same number of batches."""

import itertools

import pytest
import torch

from cnnstrategies import ConfigurationError
from cnnstrategies.data.sampling import OrderedBatches, ShuffledBatches

pytestmark = pytest.mark.light

SIZES = list(itertools.product((1, 2, 3, 7, 16, 63, 64, 65, 1150), (1, 2, 5, 32), (1, 2, 3, 4)))


# Loops and not parameters: each test is a process of its own.
def test_evaluation_sees_each_sample_once_in_equal_batches():
    for size, batch_size, world in SIZES:
        case = f"{size} samples, batch_size {batch_size}, {world} ranks"
        if size < world:
            with pytest.raises(ConfigurationError, match=f"{size} samples cannot be evaluated by {world} processes"):
                OrderedBatches(size, batch_size, world, 0)
            continue
        samplers = [OrderedBatches(size, batch_size, world, rank) for rank in range(world)]
        batches = [[request.indices for request in sampler] for sampler in samplers]
        assert [index for rank in batches for batch in rank for index in batch] == list(range(size)), case
        assert len({len(rank) for rank in batches}) == 1, case
        assert all(len(sampler) == len(rank) for sampler, rank in zip(samplers, batches, strict=True)), case
        lengths = [len(batch) for rank in batches for batch in rank]
        assert min(lengths) >= 1, case
        assert max(lengths) - min(lengths) <= 1, case
        assert max(lengths) <= batch_size + (batch_size == 1), case


def test_training_cuts_one_permutation_into_global_batches():
    def epoch(size, world, batch_size, rank):
        return [request.indices for request in ShuffledBatches(size, batch_size, 5, world, rank, drop_last=False)]

    for size, batch_size, world in SIZES:
        case = f"{size} samples, batch_size {batch_size}, {world} ranks"
        ranks = [epoch(size, world, batch_size, rank) for rank in range(world)]
        single = epoch(size, 1, batch_size * world, 0)
        assert {len(rank) for rank in ranks} == {len(single)}, case
        assert sorted(index for whole in single for index in whole) == list(range(size)), case
        for number, whole in enumerate(single):
            union = [index for rank in ranks for index in rank[number]]
            lengths = [len(rank[number]) for rank in ranks]
            assert max(lengths) - min(lengths) <= 1, case
            if len(whole) >= world:
                assert sorted(union) == sorted(whole), case
            else:
                # Fewer samples than ranks: some are repeated, so that no rank is without.
                assert set(union) == set(whole), case
                assert min(lengths) == 1, case


def test_each_epoch_is_a_permutation_and_each_batch_has_a_seed():
    """Of the number of the epoch and the seed alone, wherever it begins."""

    def epoch(number=0, seed=0, skip=0, world=1, rank=0):
        sampler = ShuffledBatches(100, 10 // world, seed, world, rank, drop_last=False)
        sampler.set_epoch(number)
        sampler.skip = skip
        return list(sampler)

    first, *others = epoch(), epoch(number=1), epoch(seed=1)
    torch.rand(3)
    assert epoch() == first
    assert epoch(skip=4) == first[4:]
    orders = [[index for request in each for index in request.indices] for each in (first, *others)]
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert orders[0] not in orders[1:]
    seeds = [request.seed for each in (first, *others, epoch(world=2, rank=1)) for request in each]
    assert len(set(seeds)) == len(seeds) == 40


def test_drop_last_leaves_the_partial_batch_out():
    assert len(ShuffledBatches(65, 16, 0, 2, 0, drop_last=True)) == 2
    assert len(ShuffledBatches(65, 16, 0, 2, 0, drop_last=False)) == 3
    with pytest.raises(ConfigurationError, match="31 training samples do not fill one global batch of 16 x 2"):
        ShuffledBatches(31, 16, 0, 2, 0, drop_last=True)
