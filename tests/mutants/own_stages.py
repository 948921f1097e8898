"""Networks that are built in parts: each rank has its own stage's values alone, and they are those of the whole."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import test_held_in_turn
import test_own_stage
from lightning.pytorch import LightningModule
from mutants.faulty import replaces
from torch import nn

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.engine import Pipeline
from cnnstrategies.strategies.hybrid_pipeline.layout import LayoutRequest
from cnnstrategies.strategies.hybrid_pipeline.own_stage import Plan, Turns, own_stage_alone, share_stage


@replaces(Turns.hold, killed_by=test_held_in_turn.test_one_at_a_time_holds_memory_while_the_whole_is_built)
def what_belongs_elsewhere_keeps_its_memory_until_the_end(
    right: Callable[[Turns, set[int]], None], self: Turns, touched: set[int]
) -> None:
    pass


@replaces(
    Turns.__torch_dispatch__,
    killed_by=test_held_in_turn.test_what_needs_values_that_are_gone_is_refused_by_name,
    way=test_held_in_turn.scaled,
)
def values_that_are_gone_are_computed_with(
    right: Callable[..., Any],
    self: Turns,
    func: Any,
    types: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    try:
        return right(self, func, types, args, kwargs)
    except ConfigurationError:
        return func(*args, **(kwargs or {}))


@replaces(
    Turns.__torch_dispatch__,
    killed_by=test_held_in_turn.test_what_is_kept_is_whole_and_the_rest_shape_alone,
    first=True,
)
def nothing_is_drawn_for_what_belongs_elsewhere(
    right: Callable[..., Any],
    self: Turns,
    func: Any,
    types: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    drawn = func.overloadpacket.__name__ in ("normal_", "uniform_") and self.is_elsewhere(args[0])
    return args[0] if drawn else right(self, func, types, args, kwargs)


@replaces(
    Turns.__torch_dispatch__,
    killed_by=test_held_in_turn.test_what_is_kept_of_a_checkpoint_is_read_alone,
    noticed_by=(RuntimeError,),
)
def a_checkpoint_is_read_for_other_ranks_as_well(
    right: Callable[..., Any],
    self: Turns,
    func: Any,
    types: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    if func.overloadpacket.__name__ != "copy_" or not self.is_elsewhere(args[0]):
        return right(self, func, types, args, kwargs)
    self.hold({id(args[0].untyped_storage())})
    return func(*args, **(kwargs or {}))


@replaces(own_stage_alone, killed_by=test_own_stage.test_stages_that_are_built_apart_are_those_of_one_process)
@contextmanager
def each_rank_builds_the_whole_network(
    right: Callable[..., Any], plan: Plan, module: LightningModule, path: str, request: LayoutRequest, stage: int
) -> Iterator[list[nn.Parameter]]:
    yield []


@replaces(share_stage, killed_by=test_own_stage.test_replicas_begin_alike_and_go_on_from_a_checkpoint)
def the_replicas_of_a_stage_begin_with_what_each_has_drawn(
    right: Callable[[Pipeline], None], pipeline: Pipeline
) -> None:
    pass
