"""What `verify` says is right, and what a trace fixes holds for all microbatches."""

from collections.abc import Callable
from typing import Any

import test_stage
import test_verdict
import torch
from mutants.faulty import replaces
from torch import fx

from cnnstrategies.pipeline.fixed import Decided, UndecidedError, hold_to
from cnnstrategies.pipeline.tracing import LeafTracer
from cnnstrategies.verifying.batches import joined
from cnnstrategies.verifying.verdict import differences


@replaces(joined, killed_by=test_verdict.test_batches_of_ranks_are_joined_by_samples_in_rank_order)
def one_device_gets_the_batches_of_rank_zero(right: Callable[[Any], Any], parts: Any) -> Any:
    return parts[0]


@replaces(differences, killed_by=test_verdict.test_only_rounding_counts_as_equal)
def nothing_differs(right: Callable[..., Any], one: Any, many: Any, dtype: torch.dtype, name: str = "") -> Any:
    return iter(())


@replaces(
    LeafTracer.number, killed_by=test_stage.test_a_network_that_decides_by_values_is_refused_by_name,
    inside=test_stage.Gate(), code="return x if x.sum() > 0",
)  # fmt: skip
def each_microbatch_decides_by_its_own_values(
    right: Callable[[LeafTracer, fx.Proxy], Any], self: LeafTracer, asked: fx.Proxy
) -> Any:
    raise UndecidedError(self.graph, asked.node)


@replaces(hold_to, killed_by=test_stage.test_what_a_network_decides_by_shape_holds_for_its_images)
def images_of_other_shapes_are_taken_for_those_of_the_trace(
    right: Callable[..., None], graph: fx.Graph, decided: Decided, name: str
) -> None:
    pass
