"""Mutants of networks that each rank builds for its own stage only: values equal the whole network's values."""

import contextlib

from cnnstrategies.placed.places import Places
from cnnstrategies.strategies.hybrid_pipeline.own_stage import own_stage_alone
from cnnstrategies.strategies.hybrid_pipeline.start_values import share_among_replicas
from tests.mutants.faulty import removes, replaces
from tests.placed import test_registration
from tests.strategies import test_own_stage

removes(
    own_stage_alone,
    "each rank builds the whole network",
    killed_by=test_own_stage.test_replicas_start_equal_and_refusals_name_what_a_rank_cannot_build_or_save,
    gives=contextlib.nullcontext([]),
    takes_long=True,
)
removes(
    share_among_replicas,
    "the replicas of a stage start with different random values",
    killed_by=test_own_stage.test_replicas_start_equal_and_refusals_name_what_a_rank_cannot_build_or_save,
    takes_long=True,
)


@replaces(
    Places.set_place,
    killed_by=test_registration.test_parameters_get_the_values_of_one_process_on_their_own_ranks_only,
)
def a_rank_keeps_values_of_other_ranks_parameters_while_it_builds_a_network(original, self, tensor, place, label):
    original(self, tensor, (*place, self.rank), label)
