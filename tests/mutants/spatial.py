"""Mutants of divided images: rows at the edges, their gradients, statistics and positions."""

import test_random_layers
import test_spatial_operations
from mutants.faulty import replaces

from cnnstrategies.spatial import norms
from cnnstrategies.spatial.parts import SpatialParts
from cnnstrategies.spatial.pooling import _Pool

check_rule = test_spatial_operations.test_rules_give_results_and_gradients_of_one_process


@replaces(SpatialParts.fetch, killed_by=check_rule, name="conv2d")
def a_halo_is_one_row_too_thin(original, self, rows, axis, held, wanted, fill=0):
    window = original(self, rows, axis, held, wanted, fill)
    if held[self.rank][1] < wanted[self.rank][1]:
        window.narrow(axis, window.shape[axis] - 1, 1).fill_(fill)
    return window


@replaces(SpatialParts.give_back, killed_by=check_rule, name="conv_transpose2d")
def gradients_of_halos_are_not_added(original, self, values, axis, held, wanted):
    (start, end), (low, _) = held[self.rank], wanted[self.rank]
    values = values.clone()
    values.narrow(axis, 0, min(max(start - low, 0), values.shape[axis])).zero_()
    kept = min(max(end - low, 0), values.shape[axis])
    values.narrow(axis, kept, values.shape[axis] - kept).zero_()
    return original(self, values, axis, held, wanted)


@replaces(norms.statistics, killed_by=check_rule, name="batch_norm")
def statistics_are_those_of_a_part(original, parts, rows, dimensions, keepdim=False):
    variance, mean = rows.var(dimensions, correction=0, keepdim=keepdim), rows.mean(dimensions, keepdim=keepdim)
    return mean, variance


@replaces(SpatialParts.sums, killed_by=test_random_layers.test_random_layers_equal_one_process, part=0)
def gradients_of_weights_are_those_of_a_part(original, self, tensors):
    return list(tensors)


@replaces(_Pool.moved, killed_by=check_rule, name="max_pool2d")
def positions_of_maxima_are_those_in_a_part(original, self, positions, length, new_length, offset):
    return positions
