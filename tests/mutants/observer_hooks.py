"""Mutants of observer hooks: the user's hooks see gradients and weights at the same moment as on one device."""

import contextlib

import test_parameter_server_own_code as own_code
import test_pipeline_own_code as stages
import test_pipeline_refusals
from mutants.faulty import removes, replaces

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies.hybrid_pipeline.divided_module import DividedModule
from cnnstrategies.strategies.hybrid_pipeline.hooks import HookWatch
from cnnstrategies.strategies.hybrid_pipeline.placeholders import Layers
from cnnstrategies.strategies.observer_hooks import gradient_observers, weight_observers
from cnnstrategies.strategies.parameter_server.checks import Linear
from cnnstrategies.strategies.parameter_server.step import Readers

removes(
    gradient_observers,
    "gradients leave before the hooks have run",
    killed_by=own_code.test_a_modules_own_changes_equal_one_device,
    gives=[],
    kind=own_code.Hooks,
    callbacks=(own_code.Scaled(),),
    noticed_by=(ConfigurationError,),
)
removes(
    weight_observers,
    "hooks read weights before the pulled values arrive",
    killed_by=own_code.test_hooks_of_known_callbacks_are_ignored_and_all_others_are_named,
    gives=[],
)


@replaces(
    Readers.__torch_function__,
    killed_by=own_code.test_a_modules_own_changes_equal_one_device,
    noticed_by=(ConfigurationError,),
    kind=own_code.Following,
    callbacks=(),
)
def weights_read_outside_their_modules_forward_are_not_waited_for(original, self, func, types, args=(), kwargs=None):
    return func(*args, **(kwargs or {}))


removes(
    HookWatch.watching,
    "hooks use the norm of one stage as the norm of the network",
    killed_by=stages.test_a_hook_that_needs_all_stages_is_refused_by_name,
    gives=contextlib.nullcontext(),
)
removes(
    HookWatch.paused,
    "a hook may not call what all stages do together",
    killed_by=stages.test_hooks_of_single_parameters_act_as_on_one_device,
    gives=contextlib.nullcontext(),
)


@replaces(Layers.__getitem__, killed_by=stages.test_hooks_of_single_parameters_act_as_on_one_device)
def index_zero_of_a_sequential_is_the_first_layer_of_the_stage(original, self, key):
    layers = [child for child in self.children() if next(child.parameters(), None) is not None]
    return layers[key] if isinstance(key, slice) else layers[min(key, len(layers) - 1)]


@replaces(Layers.__deepcopy__, killed_by=stages.test_a_hook_that_needs_all_stages_is_refused_by_name)
def a_stage_is_copied_in_place_of_the_whole_network(original, self, memo):
    return self


removes(
    DividedModule.check_groups,
    "a hook adds parameters to an optimizer of one stage only",
    killed_by=test_pipeline_refusals.test_a_step_that_a_pipeline_cannot_follow_is_refused_by_name,
    expected=[case for case in test_pipeline_refusals.REFUSED_IN_A_STEP if case[0] is test_pipeline_refusals.Adding],
    replicas=[1],
)


@replaces(Linear.__torch_function__, killed_by=own_code.test_a_workers_gradients_may_only_be_changed_linearly)
def a_hook_may_clip_each_workers_gradient_separately(original, self, func, types, args=(), kwargs=None):
    return func(*args, **(kwargs or {}))
