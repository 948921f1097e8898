"""The pipeline's strategy: Lightning gets from the stages together what it gets from one device."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import test_hybrid_pipeline_features
import test_pipeline_comparison
import test_pipeline_optimizers
import test_replicas
import torch
from mutants.faulty import replaces
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.optim import Optimizer

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.batch import Images
from cnnstrategies.pipeline.engine import Pipeline
from cnnstrategies.pipeline.stage import Blueprint
from cnnstrategies.strategies import HybridPipelineStrategy
from cnnstrategies.strategies.hybrid_pipeline.batches import PredictionLoader, StageLoader
from cnnstrategies.strategies.hybrid_pipeline.comparison import compare, copies, differ
from cnnstrategies.strategies.hybrid_pipeline.contract import check_loss, try_optimizer
from cnnstrategies.strategies.hybrid_pipeline.divided_module import DividedModule
from cnnstrategies.strategies.hybrid_pipeline.steps import Overflow, clip_by_joint_norm


@replaces(
    clip_by_joint_norm,
    killed_by=test_hybrid_pipeline_features.test_accumulated_gradients_are_those_of_one_process_once,
)
def each_stage_is_clipped_by_its_own_norm(
    right: Callable[[Optimizer, int | float, bool, torch.device], None],
    optimizer: Optimizer,
    clip_val: int | float,
    counts: bool,
    device: torch.device,
) -> None:
    torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip_val)


@replaces(
    Overflow.share,
    killed_by=test_hybrid_pipeline_features.test_fp16_skips_a_step_on_all_stages_and_lowers_one_scale,
)
def a_stage_skips_a_step_for_its_own_overflow_alone(
    right: Callable[[Overflow, Sequence[Tensor | None], bool], None],
    self: Overflow,
    gradients: Sequence[Tensor | None],
    more: bool,
) -> None:
    pass


@replaces(
    DividedModule.whole_state,
    killed_by=test_hybrid_pipeline_features.test_metrics_and_best_checkpoint_equal_one_process,
)
def a_checkpoint_has_what_the_first_stage_has_learned_alone(
    right: Callable[[DividedModule, dict[str, Any]], dict[str, Any]], self: DividedModule, state: dict[str, Any]
) -> dict[str, Any]:
    whole = right(self, state)
    return {name: value if name in state else torch.zeros_like(value) for name, value in whole.items()}


@replaces(
    DividedModule.restore,
    killed_by=test_hybrid_pipeline_features.test_an_own_module_trains_and_its_parent_has_all_weights,
)
def after_fit_each_rank_has_the_weights_of_its_own_stage_alone(
    right: Callable[[DividedModule, bool], None], self: DividedModule, merge: bool
) -> None:
    right(self, False)


@replaces(
    HybridPipelineStrategy.reduce,
    killed_by=test_hybrid_pipeline_features.test_ordinary_loaders_give_the_rows_of_one_process_in_order,
)
def a_sum_over_ranks_counts_the_batch_once_for_each(
    right: Callable[[HybridPipelineStrategy, Any, Any, ReduceOp | str | None], Any],
    self: HybridPipelineStrategy,
    tensor: Any,
    group: Any = None,
    reduce_op: ReduceOp | str | None = "mean",
) -> Any:
    reduced = right(self, tensor, group, reduce_op)
    return reduced * self.world_size if str(reduce_op).lower() in ("sum", "redoptype.sum") else reduced


@replaces(
    check_loss,
    killed_by=test_hybrid_pipeline_features.test_after_a_failure_no_part_of_the_network_goes_on,
)
def another_loss_than_the_one_that_is_trained_is_returned_unnoticed(
    right: Callable[[Tensor, float, bool], None], returned: Tensor, trained: float, by_method: bool
) -> None:
    pass


@replaces(compare, killed_by=test_pipeline_comparison.test_what_a_trace_has_fixed_is_refused_by_name)
def stages_that_compute_something_else_are_trained(
    right: Callable[[Blueprint, Images, torch.device], None],
    blueprint: Blueprint,
    images: Images,
    device: torch.device,
) -> None:
    pass


@replaces(
    differ,
    killed_by=test_pipeline_comparison.test_sums_in_another_order_are_not_refused,
    noticed_by=(ConfigurationError,),
)
def gradients_that_are_zero_but_for_rounding_must_be_the_same(
    right: Callable[[Any, Any, float], bool], expected: Any, actual: Any, largest: float = 0.0
) -> bool:
    return right(expected, actual, 0.0)


@replaces(
    copies,
    killed_by=test_pipeline_comparison.test_it_runs_in_float64_or_as_near_as_it_can,
    fails="nowhere",
    tried=["float64 cuda"],
)
def a_network_is_compared_where_it_happens_to_be(
    right: Callable[[nn.Module, torch.device], list[Callable[[], nn.Module]]], network: nn.Module, device: torch.device
) -> list[Callable[[], nn.Module]]:
    return [lambda: network]


@replaces(try_optimizer, killed_by=test_pipeline_optimizers.test_one_that_mixes_parameters_is_refused_and_no_other)
def an_optimizer_knows_the_norm_of_its_stage_alone(
    right: Callable[..., None], optimizer: Optimizer, device: torch.device
) -> None:
    pass


@replaces(
    PredictionLoader.__iter__,
    killed_by=test_hybrid_pipeline_features.test_ordinary_loaders_give_the_rows_of_one_process_in_order,
)
def a_writer_is_told_the_indices_of_one_replica(
    right: Callable[[PredictionLoader], Iterator[Any]], self: PredictionLoader
) -> Iterator[Any]:
    return StageLoader.__iter__(self)


@replaces(
    Pipeline.end_together,
    killed_by=test_replicas.test_a_rank_that_has_no_further_batch_is_named_on_every_rank,
)
def a_rank_that_has_ended_counts_as_one_without_samples(right: Callable[[Pipeline], None], self: Pipeline) -> None:
    self.share(None)
