"""Mutants of the data: the division of samples into ranks and batches, and the decoding of shards."""

import torch

from cnnstrategies.data.division import StreamComparison, same_loaders
from cnnstrategies.data.loading import BatchDataset, unshared
from cnnstrategies.data.shards.jpeg import MARGIN, cut
from cnnstrategies.divided_batches import DividedBatches
from cnnstrategies.shares.samplers import OrderedBatches, ShuffledBatches
from tests.data import test_division, test_loading, test_shards
from tests.mutants.faulty import replaces
from tests.shares import test_samplers
from tests.strategies import test_own_batch_samplers

# Samples


@replaces(ShuffledBatches.__iter__, killed_by=test_samplers.test_each_epoch_is_a_permutation_and_each_batch_has_a_seed)
def every_epoch_has_the_same_order(original, self):
    self.epoch = 0
    return original(self)


@replaces(
    ShuffledBatches.__iter__, killed_by=test_loading.test_a_resumed_loader_serves_the_rest_then_whole_epochs, workers=0
)
def a_run_resumed_within_an_epoch_starts_the_epoch_again(original, self):
    self.skip = 0
    return original(self)


@replaces(OrderedBatches.samples, killed_by=test_samplers.test_evaluation_sees_each_sample_once_in_equal_batches)
def an_evaluation_counts_a_sample_twice(original, self, batch, rank):
    samples = original(self, batch, rank)
    return samples + samples[-1:]


@replaces(
    same_loaders, killed_by=test_division.test_divided_data_are_recognised_by_the_sampler_or_by_two_items, name="rows"
)
def data_sets_of_equal_length_count_as_the_same_data(original, first, second):
    return first[0] == second[0]


@replaces(
    DividedBatches.__iter__,
    killed_by=test_own_batch_samplers.test_any_sampler_loads_what_one_device_loads,
    strategy="parameter_server",
    takes_long=True,
)
def every_rank_gets_all_batches_of_a_users_batch_sampler(original, self):
    return iter(self.batches)


@replaces(StreamComparison.decide, killed_by=test_division.test_streams_are_compared_by_their_first_batches)
def streams_that_differ_in_some_values_count_as_the_same_data(original, self):
    return False


# Batches


@replaces(
    BatchDataset.__getitem__, killed_by=test_loading.test_augmentation_depends_only_on_the_epoch_and_not_on_workers
)
def augmentation_depends_on_the_number_of_workers(original, self, request):
    return original(self, request._replace(seed=torch.initial_seed()))


@replaces(unshared, killed_by=test_loading.test_batches_keep_their_values_and_an_unfinished_epoch_has_no_effect)
def memory_of_a_batch_in_use_is_reused(original, batch):
    return batch


# Shards


@replaces(
    cut, killed_by=test_shards.test_a_partly_decoded_crop_equals_the_crop_of_the_whole_image, options=test_shards.SHRUNK
)
def a_crop_differs_from_the_image_at_the_crops_edge(original, data, header, left, top, right, bottom):
    return original(data, header, left + MARGIN, top + MARGIN, right - MARGIN, bottom - MARGIN)
