"""Mutants of strategy hybrid_pipeline: to Lightning, all stages together behave like one device."""

import functools

import test_balancing
import test_batch
import test_divided_loaders
import test_hybrid_pipeline
import test_layouts
import test_pipeline_comparison
import test_pipeline_contract
import test_pipeline_shares
import torch
from mutants.faulty import removes, replaces

from cnnstrategies.data.sampling import batches_of
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.engine import Pipeline
from cnnstrategies.strategies import HybridPipelineStrategy
from cnnstrategies.strategies.dealt_loader import by_shares
from cnnstrategies.strategies.hybrid_pipeline.balancing import StageBalance
from cnnstrategies.strategies.hybrid_pipeline.batches import PredictionLoader, StageLoader
from cnnstrategies.strategies.hybrid_pipeline.comparison import compare, copies, differ
from cnnstrategies.strategies.hybrid_pipeline.contract import check_loss, try_optimizer
from cnnstrategies.strategies.hybrid_pipeline.divided_module import DividedModule
from cnnstrategies.strategies.hybrid_pipeline.loading_ranks import LoadingRanks
from cnnstrategies.strategies.hybrid_pipeline.steps import Overflow, clip_by_joint_norm


@replaces(
    clip_by_joint_norm, killed_by=test_hybrid_pipeline.test_accumulated_gradients_equal_one_process_and_are_summed_once
)
def each_stage_is_clipped_by_its_own_norm(original, optimizer, clip_val, counts, device):
    torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip_val)


removes(
    batches_of,
    "a sample counts twice if there are fewer samples than replicas",
    killed_by=test_pipeline_shares.test_any_shares_of_replicas_train_the_weights_of_one_process,
    samples=87,
    accumulated=1,
)


@replaces(
    by_shares,
    killed_by=test_pipeline_shares.test_a_users_loader_is_also_divided_by_shares,
    strategy=functools.partial(test_pipeline_shares.piped, [3, 1, 1]),
    suffix=", rank by rank",
)
def replicas_load_equal_parts_and_run_unequal_ones(original, loader, trainer, deals):
    return loader


removes(
    Pipeline.deal,
    "replicas load and run different shares",
    killed_by=test_layouts.test_random_layouts_equal_one_process,
    part=0,
)
removes(
    StageBalance.load_state_dict,
    "a resumed run starts with equal shares again",
    killed_by=test_balancing.test_a_resumed_run_keeps_its_shares_under_the_same_layout,
)
removes(
    Overflow.share,
    "a stage skips a step only for its own overflow",
    killed_by=test_hybrid_pipeline.test_fp16_skips_a_step_on_all_stages_and_lowers_one_scale,
)


@replaces(DividedModule.whole_state, killed_by=test_hybrid_pipeline.test_metrics_and_best_checkpoint_equal_one_process)
def a_checkpoint_has_only_the_weights_of_the_first_stage(original, self, state):
    whole = original(self, state)
    return {name: value if name in state else torch.zeros_like(value) for name, value in whole.items()}


@replaces(
    DividedModule.restore,
    killed_by=test_hybrid_pipeline.test_fp16_skips_a_step_on_all_stages_and_lowers_one_scale,
)
def after_fit_each_rank_has_only_its_own_stages_weights(original, self, merge):
    original(self, False)


@replaces(
    HybridPipelineStrategy.reduce,
    killed_by=test_hybrid_pipeline.test_ordinary_loaders_give_the_metrics_of_one_process,
)
def a_sum_over_ranks_counts_the_batch_once_per_rank(original, self, tensor, group=None, reduce_op="mean"):
    reduced = original(self, tensor, group, reduce_op)
    return reduced * self.world_size if str(reduce_op).lower() in ("sum", "redoptype.sum") else reduced


removes(
    check_loss,
    "a step may return a different loss from the trained loss",
    killed_by=test_hybrid_pipeline.test_after_a_failed_fit_further_functions_are_refused,
)
removes(
    compare,
    "stages that compute different values are trained",
    killed_by=test_pipeline_comparison.test_behaviour_that_a_trace_has_fixed_is_refused_by_name,
    way="counts",
    message="in training returns another value",
)


@replaces(
    differ,
    killed_by=test_pipeline_comparison.test_different_rounding_of_sums_is_not_refused,
    noticed_by=(ConfigurationError,),
)
def gradients_that_only_rounding_makes_nonzero_must_be_equal(original, expected, actual, largest=0.0):
    return original(expected, actual, 0.0)


@replaces(
    copies,
    killed_by=test_pipeline_comparison.test_the_comparison_runs_in_float64_if_it_can,
    fails="nowhere",
    tried=["float64 cuda"],
)
def a_network_is_compared_only_in_its_own_dtype_and_on_its_own_device(original, network, device):
    return [lambda: network]


removes(
    try_optimizer,
    "an optimizer may use the norm of its stage only",
    killed_by=test_pipeline_contract.test_an_optimizer_that_mixes_parameters_is_refused,
)


@replaces(
    PredictionLoader.__iter__,
    killed_by=test_hybrid_pipeline.test_ordinary_loaders_give_the_rows_of_one_process_in_order,
)
def a_prediction_writer_gets_the_indices_of_one_replica(original, self):
    return StageLoader.__iter__(self)


@replaces(
    LoadingRanks.batches,
    killed_by=test_divided_loaders.test_each_sample_is_evaluated_once_however_the_data_are_divided,
    name="two stages",
)
def only_the_first_stage_loads_what_all_ranks_have_divided(original, self, batches):
    self.all_load = False
    return original(self, batches)


@replaces(
    HybridPipelineStrategy.keeps_sampler,
    killed_by=test_divided_loaders.test_each_sample_is_evaluated_once_however_the_data_are_divided,
    name="three ranks",
)
def what_the_user_has_divided_is_divided_again(original, self, loader):
    return False


@replaces(Pipeline.end_together, killed_by=test_batch.test_batches_that_do_not_fit_together_are_refused_on_every_rank)
def a_rank_without_more_batches_counts_as_a_rank_with_an_empty_batch(original, self):
    self.share(None)
