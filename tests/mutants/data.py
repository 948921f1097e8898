"""Data: who sees which samples, and in which batch."""

from collections.abc import Callable, Iterator

import test_sampling
from mutants.faulty import replaces

from cnnstrategies.data.sampling import BatchRequest, OrderedBatches, ShuffledBatches


@replaces(
    ShuffledBatches.__iter__, killed_by=test_sampling.test_each_epoch_is_another_permutation_and_each_batch_another_seed
)
def every_epoch_has_the_same_order(
    right: Callable[[ShuffledBatches], Iterator[BatchRequest]], self: ShuffledBatches
) -> Iterator[BatchRequest]:
    self.epoch = 0
    return right(self)


@replaces(
    OrderedBatches.samples, killed_by=test_sampling.test_evaluation_sees_every_sample_once_in_equally_many_batches
)
def an_evaluation_counts_samples_twice(
    right: Callable[[OrderedBatches, int, int], list[int]], self: OrderedBatches, batch: int, rank: int
) -> list[int]:
    samples = right(self, batch, rank)
    return samples + samples[-1:]
