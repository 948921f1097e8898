"""The ranks together see every sample once, and all ranks have the same number of batches."""

import itertools
import math

import pytest
import torch

from cnnstrategies import ConfigurationError
from cnnstrategies.shares.samplers import OrderedBatches, ShuffledBatches

pytestmark = pytest.mark.light

SIZES = list(itertools.product((1, 2, 3, 7, 16, 63, 64, 65, 1150), (1, 2, 5, 32), (1, 2, 3, 4)))


# These tests loop over their cases, because each parametrised case would run in a process of its own.
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


def test_training_cuts_one_permutation_into_steps_and_shares():
    def epoch(size, samples, world, rank, accumulated):
        sampler = ShuffledBatches(size, samples, 5, world, rank, drop_last=False, accumulated=accumulated)
        requests = [request.indices for request in sampler]
        assert len(requests) == len(sampler)
        return sampler, requests

    for size, samples, world, accumulated in itertools.product((1, 7, 64, 65, 230), (5, 6, 13, 64), (1, 2, 3), (1, 2)):
        case = f"{size} samples, {samples} in a step, {world} ranks, {accumulated} accumulated"
        if samples < world * accumulated:
            continue
        ranks = [epoch(size, samples, world, rank, accumulated) for rank in range(world)]
        _, single = epoch(size, samples, 1, 0, 1)
        sampler = ranks[0][0]
        assert sorted(index for whole in single for index in whole) == list(range(size)), case
        for number, whole in enumerate(single):
            of_step = sampler.step_of(number * accumulated)
            counts = [count for batch in of_step for count in sampler.counts(batch)]
            real = [
                index
                for of_rank, requests in ranks
                for batch in of_step
                for index in requests[batch][: of_rank.counts(batch)[of_rank.rank]]
            ]
            assert sorted(real) == sorted(whole), case
            assert len(whole) < samples or max(counts) - min(counts) <= 2, case
            # If there are fewer samples than ranks, samples are repeated with weight 0, so that every rank has one.
            assert all(requests[batch] for _, requests in ranks for batch in of_step), case
            of_all = [of_rank.weight(batch, math.inf, "equal") for of_rank, _ in ranks for batch in of_step]
            exact = [
                world * accumulated * count / len(whole)
                for of_rank, _ in ranks
                for count in own_counts(of_rank, of_step)
            ]
            assert of_all == pytest.approx(exact), case


def own_counts(sampler, batches):
    return [sampler.counts(batch)[sampler.rank] for batch in batches]


def test_each_epoch_is_a_permutation_and_each_batch_has_a_seed():
    """The permutation depends only on the epoch's number and the seed, also if the epoch starts in the middle."""

    def epoch(number=0, seed=0, skip=0, world=1, rank=0):
        sampler = ShuffledBatches(100, 10, seed, world, rank, drop_last=False)
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
    assert len(ShuffledBatches(65, 32, 0, 2, 0, drop_last=True)) == 2
    assert len(ShuffledBatches(65, 32, 0, 2, 0, drop_last=False)) == 3
    with pytest.raises(ConfigurationError, match="31 training samples are less than one global batch of 32"):
        ShuffledBatches(31, 32, 0, 2, 0, drop_last=True)
