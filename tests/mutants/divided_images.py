"""Mutants of divided images: rows at the edges, their gradients, statistics and positions."""

import dataclasses

from cnnstrategies._torch_private import is_added_only, is_hooked
from cnnstrategies.spatial import norms
from cnnstrategies.spatial.edges import Edges
from cnnstrategies.spatial.gradient_sums import GradientSums
from cnnstrategies.spatial.parts import SpatialParts
from cnnstrategies.spatial.pooling import _Pool
from cnnstrategies.spatial.requested_rows import RequestedRows
from tests.mutants.faulty import replaces
from tests.spatial import test_gradient_sums, test_random_layers, test_spatial_operations

check_rule = test_spatial_operations.test_rules_give_results_and_gradients_of_one_process


@replaces(RequestedRows.rows, killed_by=check_rule, name="conv2d")
def a_halo_is_one_row_too_thin(original, self, low, high, fill=0, has_own=True):
    rows = original(self, low, high, fill, has_own)
    if self._held[1] < high:
        rows.narrow(self._axis, high - low - 1, 1).fill_(fill)
    return rows


@replaces(SpatialParts.add_returned, killed_by=test_random_layers.test_random_layers_equal_one_process, part=0)
def gradients_of_halos_are_not_added(original, self, total, piece, axis, held, wanted):
    original(self, total.clone(), piece, axis, held, wanted)
    return total


@replaces(Edges.run, killed_by=test_random_layers.test_random_layers_equal_one_process, part=0)
def rows_at_edges_have_zeros_in_place_of_halos(original, self, parts, func, arguments, rows, padding):
    return original(dataclasses.replace(self, strips=()), parts, func, arguments, rows, padding)


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


check_gradients = test_gradient_sums.test_gradients_are_those_of_one_process


@replaces(GradientSums.finish, killed_by=check_gradients, case=test_gradient_sums.backward, message=1 << 20)
def the_last_gradients_are_forgotten(original, self):
    self._gradients.clear()
    original(self)


@replaces(SpatialParts.begin_sum, killed_by=check_gradients, case=test_gradient_sums.backward, message=1)
def nobody_waits_for_sums_of_gradients(original, self, tensor):
    original(self, tensor)
    return lambda: None


@replaces(GradientSums.finish, killed_by=check_gradients, case=test_gradient_sums.with_penalty, message=1)
def sums_take_the_place_of_gradients(original, self):
    for message in self._messages:
        for parameter, *_ in message.gradients:
            parameter.grad = None
    original(self)


@replaces(
    is_hooked, killed_by=check_gradients, noticed_by=(AttributeError, AssertionError),
    case=test_gradient_sums.hook_of_parameter, message=1,
)  # fmt: skip
def hooks_do_not_see_gradients(original, parameter):
    return False


@replaces(
    is_added_only, killed_by=check_gradients, noticed_by=(RuntimeError, AssertionError),
    case=test_gradient_sums.returned_gradients, message=1,
)  # fmt: skip
def returned_gradients_are_added_to_parameters(original, node):
    return True
