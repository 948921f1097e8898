"""Mutants of `verify` and of tracing: equal runs, and properties that a trace has fixed for all microbatches."""

from cnnstrategies.pipeline.graph_checks import UndecidedError, hold_to
from cnnstrategies.pipeline.leaf_tracer import LeafTracer
from cnnstrategies.verifying.batches import joined
from cnnstrategies.verifying.loaded_batches import LoadedBatches
from cnnstrategies.verifying.verdict import differences
from tests.mutants.faulty import removes, replaces
from tests.pipeline import test_stage
from tests.verifying import test_likely_causes, test_verdict


@replaces(joined, killed_by=test_verdict.test_batches_of_ranks_are_joined_by_samples_in_rank_order)
def one_device_gets_the_batches_of_rank_zero_only(original, parts):
    return parts[0]


removes(differences, "nothing differs", killed_by=test_verdict.test_only_rounding_counts_as_equal, gives=())


@replaces(
    LeafTracer.number, killed_by=test_stage.test_behaviour_that_a_trace_would_fix_is_refused, how="branch by value"
)
def each_microbatch_takes_its_own_branch_by_value(original, self, asked):
    raise UndecidedError(self.graph, asked.node, {})


removes(
    hold_to,
    "images of other shapes are accepted by a trace",
    killed_by=test_stage.test_branches_on_shapes_hold_for_images_of_the_traced_shape,
    takes_long=True,
)


removes(
    LoadedBatches.equals,
    "errors of rounding on other batches are used",
    killed_by=test_likely_causes.test_runs_load_the_same_batches_if_all_files_of_all_ranks_are_equal,
    gives=True,
)
