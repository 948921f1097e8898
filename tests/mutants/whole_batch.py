"""Mutants of calls with a whole batch: replicas, rows, stored values, mixed samples, copied networks, and verdicts."""

from typing import Any

from cnnstrategies.pipeline.combining import gradient_of_part
from cnnstrategies.pipeline.late_verdicts import LateVerdicts
from cnnstrategies.pipeline.loss_verdict import settle_late
from cnnstrategies.pipeline.microbatches import Split
from cnnstrategies.pipeline.mixing import MixingProbe
from cnnstrategies.pipeline.network_copies import adopt_copies
from cnnstrategies.pipeline.replicas import StageReplicas
from cnnstrategies.pipeline.second_forward import SecondForwards
from cnnstrategies.pipeline.stored_terms import CallTerms
from cnnstrategies.pipeline.stored_watch import StoredWatch
from cnnstrategies.pipeline.whole_batch import WholeBatch
from cnnstrategies.placed.places import Places
from cnnstrategies.runtime.generator_states import NumpyStates
from tests import test_generator_states
from tests.mutants.faulty import removes, replaces
from tests.pipeline import (
    test_batch_rows,
    test_late_verdicts,
    test_network_copies,
    test_outside,
    test_second_forward,
    test_stored,
)
from tests.placed import test_sums
from tests.strategies import test_exact_resume, test_placed_module, test_trainer_on_gpu

removes(
    StageReplicas.copy_from_first,
    "replicas train parameters outside of the network from their own copies of the loss",
    killed_by=test_placed_module.test_replicas_use_the_first_replicas_gradients_of_parameters_outside_of_the_network,
    takes_long=True,
)


@replaces(
    Places.mark_sum,
    killed_by=test_sums.test_sums_are_computed_when_they_are_needed,
    function=test_sums.read_between,
)
def gradients_of_replicas_are_summed_again_by_the_next_read(
    original: Any, self: Places, tensor: Any, deferred_sum: Any
) -> None:
    if deferred_sum is not None:
        original(self, tensor, deferred_sum)


@replaces(
    Split.global_rows,
    killed_by=test_batch_rows.test_each_microbatch_has_rows_that_its_replica_loads,
    samples=16,
    shares=(3, 1, 1),
    usual=0,
)
def a_microbatch_has_rows_that_another_replica_loads(
    original: Any, self: Split, *microbatches: int, **options: Any
) -> Any:
    return original(self, *microbatches, **options).sort().values


removes(
    settle_late,
    "a checkpoint is saved before all verdicts on gradients are known",
    killed_by=test_trainer_on_gpu.test_a_gpu_trains_the_values_of_the_cpu_and_no_step_waits,
    world=2,
    cases=[test_trainer_on_gpu.Case(test_trainer_on_gpu.piped)],
    takes_long=True,
)


@replaces(LateVerdicts.failure, killed_by=test_late_verdicts.test_verdicts_are_read_when_they_have_arrived)
def verdicts_that_have_not_arrived_count_as_right(original: Any, self: LateVerdicts, wait: bool = False) -> str:
    return original(self)


# A pipeline of three stages trains one kind of layers, without forwards that run again.
TERMS: dict[str, Any] = {"killed_by": test_stored.check_layout, "replicas": (1, 1, 1), "cases_again": []}


@replaces(CallTerms.own_gradients, cases=["terms"], **TERMS, takes_long=True)
def a_stored_term_has_no_gradient(original: Any, self: CallTerms, gradients: Any) -> Any:
    return [None] * len(original(self, gradients))


@replaces(gradient_of_part, cases=["terms"], **TERMS, takes_long=True)
def each_microbatch_gets_the_whole_gradient_of_a_stored_mean(
    original: Any, rule: Any, gradient: Any, *args: Any
) -> Any:
    return gradient if rule.kind == "mean" else original(rule, gradient, *args)


removes(MixingProbe.verdict, "stages that mix samples run parts of a batch", cases=["mixed"], **TERMS, takes_long=True)
removes(StoredWatch.put, "a stored value is that of the last microbatch", cases=["terms"], **TERMS, takes_long=True)
removes(
    StoredWatch.has_changed,
    "changes after the first call are not noticed",
    killed_by=test_outside.test_each_change_is_noticed_in_later_calls,
    gives=False,
    how="list",
    changes_between=False,
)
removes(
    StoredWatch.return_to_known,
    "a number that a module had in an earlier call counts as its number",
    killed_by=test_outside.test_numbers_that_alternate_are_those_of_the_last_call,
    gives=True,
)


@replaces(NumpyStates.state, killed_by=test_generator_states.test_states_change_with_each_draw)
def numpys_state_is_read_once(original: Any, self: NumpyStates) -> Any:
    return self._last[1] or original(self)


removes(
    SecondForwards.check,
    "a second forward may give other results",
    killed_by=test_second_forward.test_a_forward_that_cannot_be_repeated_is_refused,
    takes_long=True,
)
removes(
    adopt_copies,
    "copies of a network that were made before its division are not divided",
    killed_by=test_network_copies.check_layout,
    cuts=["stem"],
    replicas=(1, 1),
    takes_long=True,
)


@replaces(WholeBatch.backward, killed_by=test_exact_resume.test_continued_runs_are_equal_in_each_bit, takes_long=True)
def the_first_backwards_of_a_run_start_from_other_gradients_than_later_ones(
    original: Any, self: WholeBatch, *args: Any
) -> Any:
    return original(self, *args[:4])
