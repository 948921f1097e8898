"""What a strategy may do sooner or later than one device, because nobody looks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import test_parameter_server_own_code as own_code
import test_pipeline_own_code as stages
import test_pipeline_refusals
import test_step
from lightning.pytorch import Callback, LightningModule
from mutants.faulty import replaces

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies.hybrid_pipeline.divided_module import DividedModule
from cnnstrategies.strategies.hybrid_pipeline.hooks import HookWatch
from cnnstrategies.strategies.hybrid_pipeline.stand_ins import Layers
from cnnstrategies.strategies.licences import who_sees_gradients, who_sees_weights
from cnnstrategies.strategies.parameter_server.checks import Linear
from cnnstrategies.strategies.parameter_server.step import Readers

Seen = Callable[[LightningModule, Iterable[Callback]], list[str]]


@replaces(
    who_sees_gradients, killed_by=own_code.test_what_a_module_does_is_done_on_one_device,
    kind=own_code.Hooks, callbacks=(own_code.Scaled(),), noticed_by=(ConfigurationError,),
)  # fmt: skip
def gradients_leave_before_the_hooks_have_run(
    right: Seen, module: LightningModule, callbacks: Iterable[Callback]
) -> list[str]:
    return []


@replaces(
    who_sees_weights, killed_by=own_code.test_known_hooks_are_known_and_all_others_are_named,
)  # fmt: skip
def values_come_after_hooks_have_looked_at_them(
    right: Seen, module: LightningModule, callbacks: Iterable[Callback]
) -> list[str]:
    return []


@replaces(
    Readers.__torch_function__,
    killed_by=test_step.test_what_servers_parameters_do_not_allow_is_refused,
    noticed_by=(ConfigurationError,),
)  # fmt: skip
def weights_that_no_forward_of_their_own_reads_are_not_waited_for(
    right: Callable[..., Any], self: Readers, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
) -> Any:
    return func(*args, **(kwargs or {}))


@replaces(HookWatch.watching, killed_by=stages.test_what_would_need_all_stages_is_refused_by_name)
@contextmanager
def hooks_take_the_norm_of_one_stage_for_that_of_all(
    right: Callable[..., Any], self: HookWatch, hook: str, copies_alone: bool = False
) -> Iterator[None]:
    yield


@replaces(HookWatch.paused, killed_by=stages.test_hooks_of_single_parameters_act_as_on_one_device)
@contextmanager
def a_hook_may_not_even_ask_for_what_all_stages_do_together(
    right: Callable[..., Any], self: HookWatch
) -> Iterator[None]:
    yield


@replaces(Layers.__getitem__, killed_by=stages.test_hooks_of_single_parameters_act_as_on_one_device)
def the_first_layer_is_the_first_one_of_a_stage(right: Callable[..., Any], self: Layers, key: Any) -> Any:
    own = [child for child in self.children() if next(child.parameters(), None) is not None]
    return own[key] if isinstance(key, slice) else own[min(key, len(own) - 1)]


@replaces(Layers.__deepcopy__, killed_by=stages.test_what_would_need_all_stages_is_refused_by_name)
def half_a_network_is_copied(right: Callable[..., Any], self: Layers, memo: Any) -> Any:
    return self


@replaces(
    DividedModule.check_groups,
    killed_by=test_pipeline_refusals.are_refused,
    expected=[one for one in test_pipeline_refusals.REFUSED_IN_A_STEP if one[0] is test_pipeline_refusals.Adding],
    replicas=[1],
)
def parameters_are_added_to_an_optimizer_that_other_stages_do_not_know(
    right: Callable[[DividedModule], None], self: DividedModule
) -> None:
    pass


@replaces(
    Linear.__torch_function__,
    killed_by=own_code.test_own_gradients_may_only_be_changed_linearly,
)
def a_hook_clips_each_workers_own_gradient(
    right: Callable[..., Any], self: Linear, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
) -> Any:
    return func(*args, **(kwargs or {}))
