"""Mutants of training with divided images."""

import torch

from cnnstrategies.runtime.generator_states import GeneratorStates
from cnnstrategies.spatial.norms import statistics
from cnnstrategies.strategies.spatial.groups import ImageGroups
from cnnstrategies.strategies.spatial.replicas import average_gradients, copy_first
from tests.mutants.faulty import removes, replaces
from tests.strategies import test_spatial

two_parts = test_spatial.test_two_parts_train_as_one_process
groups = test_spatial.test_groups_train_as_ddp

removes(average_gradients, "groups keep their own gradients", killed_by=groups, takes_long=True)
removes(
    ImageGroups.same_random_numbers,
    "ranks of a group draw their own random numbers",
    killed_by=test_spatial.test_ranks_of_a_group_get_the_same_batches,
)


@replaces(copy_first, killed_by=groups, takes_long=True)
def each_group_keeps_its_own_running_statistics(original, tensors, group=None):
    if group is None:
        original(tensors)


@replaces(statistics, killed_by=two_parts, takes_long=True)
def batch_norm_sees_one_part(original, parts, rows, dimensions, keepdim=False):
    variance, mean = torch.var_mean(rows, dimensions, correction=0, keepdim=keepdim)
    original(parts, rows, dimensions, keepdim)
    return mean, variance


@replaces(
    GeneratorStates.changed,
    killed_by=test_spatial.test_ranks_of_a_group_get_the_same_batches,
)
def numbers_that_a_loader_draws_are_not_drawn_elsewhere(original, self, later):
    return set()
