"""Mutants of tracing, and of stages that call the user's own modules."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import test_users_modules
import test_whole_batch
from mutants.faulty import removes, replaces

from cnnstrategies._torch_private import has_hooks, without_tensor_hooks
from cnnstrategies.pipeline.untouched import Untouched

removes(
    has_hooks,
    "a cut passes through a module with a hook",
    killed_by=test_users_modules.test_attributes_hooks_and_modes_stay_live,
    gives=False,
)
removes(
    Untouched.__exit__,
    "a trace leaves proxies in attributes",
    killed_by=test_users_modules.test_a_trace_leaves_nothing_behind_and_what_a_graph_cannot_repeat_stays_whole,
    how="stored",
)


@replaces(without_tensor_hooks, killed_by=test_whole_batch.test_a_loss_may_compare_all_samples_of_two_calls)
@contextmanager
def a_gradient_hook_fires_per_microbatch(original: Any, tensors: Any) -> Iterator[None]:
    yield
