"""Mutants of networks that each rank builds for its own stage only: values equal the whole network's values."""

import contextlib

import test_own_stage
import test_registration
from mutants.faulty import removes, replaces

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.placed.places import Places
from cnnstrategies.strategies.hybrid_pipeline.own_stage import Turns, own_stage_alone, share_stage

removes(
    Turns.hold,
    "parameters of other stages keep their memory until the network is built",
    killed_by=test_own_stage.test_one_parameter_at_a_time_holds_memory_while_the_network_is_built,
)


@replaces(
    Turns.__torch_dispatch__, killed_by=test_own_stage.test_initialisation_that_needs_deleted_values_is_refused_by_name
)
def deleted_values_are_used_in_computations(original, self, func, types, args=(), kwargs=None):
    try:
        return original(self, func, types, args, kwargs)
    except ConfigurationError:
        return func(*args, **(kwargs or {}))


@replaces(
    Turns.__torch_dispatch__, killed_by=test_own_stage.test_kept_parameters_have_their_values_and_others_only_shapes
)
def random_values_of_other_stages_parameters_are_not_drawn(original, self, func, types, args=(), kwargs=None):
    drawn = func.overloadpacket.__name__ in ("normal_", "uniform_") and self.is_elsewhere(args[0])
    return args[0] if drawn else original(self, func, types, args, kwargs)


@replaces(
    Turns.__torch_dispatch__,
    killed_by=test_own_stage.test_only_kept_parameters_are_read_from_a_checkpoint,
    noticed_by=(RuntimeError,),
)
def a_checkpoint_is_read_for_other_ranks_as_well(original, self, func, types, args=(), kwargs=None):
    if func.overloadpacket.__name__ != "copy_" or not self.is_elsewhere(args[0]):
        return original(self, func, types, args, kwargs)
    self.hold({id(args[0].untyped_storage())})
    return func(*args, **(kwargs or {}))


removes(
    own_stage_alone,
    "each rank builds the whole network",
    killed_by=test_own_stage.test_replicas_start_equal_and_hold_only_their_stage,
    gives=contextlib.nullcontext([]),
)
removes(
    share_stage,
    "the replicas of a stage start with different random values",
    killed_by=test_own_stage.test_replicas_start_equal_and_hold_only_their_stage,
)


@replaces(
    Places.set_place,
    killed_by=test_registration.test_parameters_get_the_values_of_one_process_on_their_own_ranks_only,
)
def a_rank_keeps_values_of_other_ranks_parameters_while_it_builds_a_network(original, self, tensor, place, label):
    original(self, tensor, (*place, self.rank), label)
