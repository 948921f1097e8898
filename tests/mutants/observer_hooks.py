"""Mutants of observer hooks: the user's hooks see gradients and weights at the same moment as on one device."""

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies.parameter_server.checks import Linear
from cnnstrategies.strategies.parameter_server.observer_hooks import gradient_observers, weight_observers
from cnnstrategies.strategies.parameter_server.readers import Readers
from tests.mutants.faulty import removes, replaces
from tests.strategies import test_parameter_server_own_code as own_code

removes(
    gradient_observers,
    "gradients leave before the hooks have run",
    killed_by=own_code.test_a_modules_own_changes_equal_one_device,
    gives=[],
    kind=own_code.Hooks,
    callbacks=(own_code.Scaled(),),
    noticed_by=(ConfigurationError,),
    takes_long=True,
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
    takes_long=True,
)
def weights_read_outside_their_modules_forward_are_not_waited_for(original, self, func, types, args=(), kwargs=None):
    return func(*args, **(kwargs or {}))


@replaces(Linear.__torch_function__, killed_by=own_code.test_a_workers_gradients_may_only_be_changed_linearly)
def a_hook_may_clip_each_workers_gradient_separately(original, self, func, types, args=(), kwargs=None):
    return func(*args, **(kwargs or {}))
