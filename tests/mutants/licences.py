"""What a strategy may do sooner or later than one device, because nobody looks."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import test_parameter_server_own_code as own_code
from lightning.pytorch import Callback, LightningModule
from mutants.faulty import replaces

from cnnstrategies.strategies.licences import who_sees_gradients, who_sees_weights
from cnnstrategies.strategies.parameter_server.readers import Readers

Seen = Callable[[LightningModule, Iterable[Callback]], list[str]]


@replaces(
    who_sees_gradients, killed_by=own_code.test_what_a_module_does_is_done_on_one_device,
    kind=own_code.Hooks, callbacks=(own_code.Scaled(),),
)  # fmt: skip
def gradients_leave_before_the_hooks_have_run(
    right: Seen, module: LightningModule, callbacks: Iterable[Callback]
) -> list[str]:
    return []


@replaces(
    who_sees_weights, killed_by=own_code.test_what_a_module_does_is_done_on_one_device,
    kind=own_code.Hooks, callbacks=(),
)  # fmt: skip
def values_come_after_hooks_have_looked_at_them(
    right: Seen, module: LightningModule, callbacks: Iterable[Callback]
) -> list[str]:
    return []


@replaces(
    Readers.__torch_function__, killed_by=own_code.test_what_a_module_does_is_done_on_one_device,
    kind=own_code.Module, callbacks=(),
)  # fmt: skip
def weights_that_no_forward_of_their_own_reads_are_not_waited_for(
    right: Callable[..., Any], self: Readers, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
) -> Any:
    return func(*args, **(kwargs or {}))
