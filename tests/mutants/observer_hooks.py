"""What a strategy may do sooner or later than one device, because nobody looks."""

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
    killed_by=own_code.test_what_a_module_does_is_done_on_one_device,
    gives=[],
    kind=own_code.Hooks,
    callbacks=(own_code.Scaled(),),
    noticed_by=(ConfigurationError,),
)
removes(
    weight_observers,
    "values come after hooks have looked at them",
    killed_by=own_code.test_known_hooks_are_known_and_all_others_are_named,
    gives=[],
)


@replaces(
    Readers.__torch_function__,
    killed_by=own_code.test_what_a_module_does_is_done_on_one_device,
    noticed_by=(ConfigurationError,),
    kind=own_code.Following,
    callbacks=(),
)
def weights_that_no_forward_of_their_own_reads_are_not_waited_for(right, self, func, types, args=(), kwargs=None):
    return func(*args, **(kwargs or {}))


removes(
    HookWatch.watching,
    "hooks take the norm of one stage for that of all",
    killed_by=stages.test_what_would_need_all_stages_is_refused_by_name,
    gives=contextlib.nullcontext(),
)
removes(
    HookWatch.paused,
    "a hook may not even ask for what all stages do together",
    killed_by=stages.test_hooks_of_single_parameters_act_as_on_one_device,
    gives=contextlib.nullcontext(),
)


@replaces(Layers.__getitem__, killed_by=stages.test_hooks_of_single_parameters_act_as_on_one_device)
def the_first_layer_is_the_first_one_of_a_stage(right, self, key):
    own = [child for child in self.children() if next(child.parameters(), None) is not None]
    return own[key] if isinstance(key, slice) else own[min(key, len(own) - 1)]


@replaces(Layers.__deepcopy__, killed_by=stages.test_what_would_need_all_stages_is_refused_by_name)
def half_a_network_is_copied(right, self, memo):
    return self


removes(
    DividedModule.check_groups,
    "parameters are added to an optimizer that other stages do not know",
    killed_by=test_pipeline_refusals.test_a_step_that_a_pipeline_cannot_follow_is_refused_by_name,
    expected=[one for one in test_pipeline_refusals.REFUSED_IN_A_STEP if one[0] is test_pipeline_refusals.Adding],
    replicas=[1],
)


@replaces(Linear.__torch_function__, killed_by=own_code.test_own_gradients_may_only_be_changed_linearly)
def a_hook_clips_each_workers_own_gradient(right, self, func, types, args=(), kwargs=None):
    return func(*args, **(kwargs or {}))
