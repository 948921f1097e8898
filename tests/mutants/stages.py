"""Mutants of tracing, of stages that call the user's own modules, and of calls of a divided network."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cnnstrategies._torch_private import has_hooks, without_tensor_hooks
from cnnstrategies.pipeline.declared_loss import LossOfCall
from cnnstrategies.pipeline.gradient_check import allowed_difference
from cnnstrategies.pipeline.interleaved_batch import InterleavedBatch
from cnnstrategies.pipeline.placed_call import PlacedCall
from cnnstrategies.pipeline.random_draws import Draws, advance
from cnnstrategies.pipeline.stage_runner import StageRunner
from cnnstrategies.pipeline.stored_terms import CallTerms
from cnnstrategies.pipeline.untouched import Untouched
from cnnstrategies.pipeline.whole_batch import tensors_in
from tests.mutants.faulty import removes, replaces
from tests.pipeline import (
    test_declared_loss,
    test_placed_network,
    test_second_forward,
    test_users_modules,
    test_whole_batch,
)
from tests.strategies import test_pipeline_ways_to_write

removes(
    has_hooks,
    "a cut passes through a module with a hook",
    killed_by=test_users_modules.test_attributes_hooks_and_modes_stay_live,
    gives=False,
    takes_long=True,
)
removes(
    Untouched.__exit__,
    "a trace leaves proxies in attributes",
    killed_by=test_users_modules.test_a_trace_leaves_nothing_behind_and_what_a_graph_cannot_repeat_stays_whole,
    how="stored",
)


@replaces(
    without_tensor_hooks, killed_by=test_whole_batch.test_a_loss_may_compare_all_samples_of_two_calls, takes_long=True
)
@contextmanager
def a_gradient_hook_fires_per_microbatch(original: Any, tensors: Any) -> Iterator[None]:
    yield


removes(
    advance,
    "the generators do not advance after a call that draws",
    killed_by=test_placed_network.check_layouts,
    layouts={("first",): [(1, 1)]},
    takes_long=True,
)


@replaces(Draws.again, killed_by=test_second_forward.test_a_second_forward_changes_nothing, takes_long=True)
@contextmanager
def a_forward_that_runs_again_draws_other_numbers(original: Any, self: Draws, microbatch: int) -> Iterator[None]:
    yield


@replaces(
    LossOfCall.compare,
    killed_by=test_declared_loss.check_layout,
    replicas=(1, 1),
    names=["doubled", "other_values"],
    takes_long=True,
)
def the_check_of_the_declared_loss_is_left_out(original: Any, self: LossOfCall, *args: Any) -> Any:
    return original(self, *args)._replace(kind="factor")


removes(
    allowed_difference,
    "gradients that only rounding makes different stop the order 1f1b",
    killed_by=test_declared_loss.test_gradients_are_those_of_the_declared_loss_up_to_a_factor,
    gives=0.0,
)


@replaces(
    StageRunner.run_tasks,
    killed_by=test_declared_loss.check_layout,
    replicas=(1, 1),
    names=["doubled"],
    takes_long=True,
)
def stages_of_a_declared_loss_store_the_activations_of_all_microbatches(
    original: Any, self: StageRunner, kinds: Any, schedule: Any, *args: Any
) -> None:
    original(self, kinds, "gpipe", *args)


@replaces(
    PlacedCall.backward,
    killed_by=test_pipeline_ways_to_write.test_ordinary_modules_train_the_weights_of_one_device,
    kinds=(test_pipeline_ways_to_write.Probe,),
    replicas=[1, 1],
    microbatches=3,
    takes_long=True,
)
def weights_without_a_gradient_in_this_step_decay_after_an_earlier_gradient(
    original: Any, self: PlacedCall, gradients: Any
) -> Any:
    results = original(self, gradients)
    known = vars(self.network).setdefault("known", set())
    known |= {index for index, result in enumerate(results) if result is not None}
    targets = [*tensors_in(self.images), *self.parameters.values()]
    return [
        torch.zeros_like(target) if result is None and index in known else result
        for index, (target, result) in enumerate(zip(targets, results, strict=True))
    ]


removes(
    InterleavedBatch._has_changed,  # noqa: SLF001
    "ranks do not say before the loss that other parameters have a gradient",
    killed_by=test_declared_loss.check_layout,
    gives=False,
    replicas=(1, 1),
    names=("doubled", "constant"),
    takes_long=True,
)


@replaces(
    PlacedCall._used,  # noqa: SLF001
    killed_by=test_placed_network.check_layouts,
    layouts={("first",): [(1, 1)]},
    takes_long=True,
)
def ranks_agree_on_parameters_with_a_gradient_in_the_first_step_only(
    original: Any, self: PlacedCall, outputs: Any, local_keys: Any, terms: CallTerms
) -> Any:
    assert self._form is not None
    known = self._form.used.get(outputs)
    return original(self, outputs, local_keys, terms) if known is None else known.of_all
