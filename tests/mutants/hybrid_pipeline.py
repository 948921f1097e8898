"""Mutants of strategy hybrid_pipeline: to Lightning, all stages together behave like one device."""

import contextlib
import functools

from torch.utils._pytree import tree_map

from cnnstrategies.pipeline.rehearsal import rehearse
from cnnstrategies.placed import ForeignTensor
from cnnstrategies.shares.samplers import batches_of
from cnnstrategies.strategies import HybridPipelineStrategy
from cnnstrategies.strategies.hybrid_pipeline.loader_messages import end_together
from cnnstrategies.strategies.hybrid_pipeline.loading import PlacedLoader
from cnnstrategies.strategies.hybrid_pipeline.loading_ranks import LoadingRanks
from cnnstrategies.strategies.hybrid_pipeline.placed_batches import continue_with
from cnnstrategies.strategies.hybrid_pipeline.placed_module import PlacedModule
from cnnstrategies.strategies.hybrid_pipeline.stage_shares import StageBalance
from cnnstrategies.strategies.hybrid_pipeline.strategy import predictions_on_rank_zero
from cnnstrategies.strategies.joined_parts import _joined, join_parts
from cnnstrategies.strategies.module_copies import tensors_stay
from cnnstrategies.strategies.share_options import by_shares
from tests.mutants.faulty import removes, replaces
from tests.pipeline import test_outside
from tests.shares import test_rebalancing
from tests.strategies import (
    test_divided_loaders,
    test_example_inputs,
    test_hybrid_pipeline,
    test_pipeline_shares,
    test_placed_loading,
    test_placed_metrics,
)

removes(
    batches_of,
    "a sample counts twice if there are fewer samples than replicas",
    killed_by=test_pipeline_shares.test_any_shares_of_replicas_train_the_weights_of_one_process,
    samples=87,
    accumulated=1,
    takes_long=True,
)


@replaces(
    by_shares,
    killed_by=test_pipeline_shares.test_a_users_loader_is_also_divided_by_shares,
    strategy=functools.partial(test_pipeline_shares.piped, [3, 1, 1]),
    suffix=", rank by rank",
    takes_long=True,
)
def replicas_load_equal_parts_and_run_unequal_ones(original, loader, trainer, history):
    return loader


removes(
    StageBalance.load_state_dict,
    "a resumed run starts with equal shares again",
    killed_by=test_rebalancing.test_a_resumed_run_keeps_its_shares_under_the_same_layout,
)


@replaces(
    PlacedModule.on_rank_zero,
    killed_by=test_hybrid_pipeline.test_metrics_and_best_checkpoint_equal_one_process,
    takes_long=True,
)
def a_checkpoint_has_only_the_weights_of_the_first_stage(original, self, value):
    whole = original(self, value)
    with self.places.local():
        return tree_map(lambda leaf, before: leaf * 0 if isinstance(before, ForeignTensor) else leaf, whole, value)


@replaces(
    PlacedModule.restore,
    killed_by=test_hybrid_pipeline.test_fp16_skips_a_step_on_all_stages_and_lowers_one_scale,
    takes_long=True,
)
def after_fit_each_rank_has_only_its_own_stages_weights(original, self, optimizers):
    foreign = [parameter for parameter in self.module.parameters() if isinstance(parameter, ForeignTensor)]
    original(self, optimizers)
    for parameter in foreign:
        parameter.data.zero_()


@replaces(
    HybridPipelineStrategy.reduce,
    killed_by=test_hybrid_pipeline.test_ordinary_loaders_give_the_metrics_of_one_process,
    takes_long=True,
)
def a_sum_over_ranks_counts_the_batch_once_per_rank(original, self, tensor, group=None, reduce_op="mean"):
    reduced = original(self, tensor, group, reduce_op)
    return reduced * self.world_size if str(reduce_op).lower() in ("sum", "redoptype.sum") else reduced


removes(
    rehearse,
    "stages that compute different values are trained",
    killed_by=test_outside.test_stages_that_pass_values_in_hidden_ways_are_found,
    how="attribute",
)
removes(
    continue_with,
    "random numbers of a loader are drawn on the first stage only",
    killed_by=test_placed_loading.test_random_numbers_go_on_as_on_one_device_after_each_batch,
    name="shuffled",
)
removes(
    end_together,
    "a rank may end an epoch while other ranks continue",
    killed_by=test_placed_loading.test_ranks_that_end_early_or_use_other_loaders_end_with_one_line,
)


@replaces(
    join_parts,
    killed_by=test_placed_loading.test_samples_are_in_the_order_of_one_process_for_one_two_and_three_replicas,
)
def the_parts_of_a_batch_are_joined_one_after_the_other(original, parts, counts):
    return _joined(parts, counts, range(sum(counts)), "batch") if len(parts) > 1 else parts[0]


@replaces(
    PlacedLoader.note_indices,
    killed_by=test_placed_loading.test_prediction_writers_get_the_indices_of_the_global_batch,
)
def a_prediction_writer_gets_the_indices_of_one_replica(original, self, index):
    if self.places.rank:
        original(self, index)


@replaces(
    predictions_on_rank_zero,
    killed_by=test_placed_metrics.test_predictions_exist_once_and_can_be_read_by_rank_0_alone,
)
def predictions_stay_in_the_last_stage(original, places, predictions):
    return predictions


@replaces(
    LoadingRanks.batches,
    killed_by=test_divided_loaders.test_each_sample_is_evaluated_once_however_the_data_are_divided,
    name="two stages",
    takes_long=True,
)
def only_the_first_stage_loads_what_all_ranks_have_divided(original, self, batches):
    self.all_load = False
    return original(self, batches)


@replaces(
    HybridPipelineStrategy.keeps_sampler,
    killed_by=test_divided_loaders.test_each_sample_is_evaluated_once_however_the_data_are_divided,
    name="three ranks",
    takes_long=True,
)
def what_the_user_has_divided_is_divided_again(original, self, loader):
    return False


removes(
    tensors_stay,
    "a step that runs for example inputs changes the weights of rank 0",
    killed_by=test_example_inputs.test_a_step_that_runs_for_example_inputs_changes_no_weights,
    gives=contextlib.nullcontext(),
)
