"""Mutants of tensors at places: random numbers, reads, messages, sums over replicas and steps of optimizers."""

from cnnstrategies.placed import ForeignTensor, messages, runner
from cnnstrategies.placed.hidden import steps_separately
from cnnstrategies.placed.places import Places
from cnnstrategies.placed.rows import _check_finite
from cnnstrategies.placed.sums import DeferredSums
from tests.mutants.faulty import removes, replaces
from tests.placed import test_hidden, test_messages, test_rules, test_scaled_loss, test_sums

removes(
    runner.draw_and_drop,
    "ranks that do not use random numbers do not draw them",
    killed_by=test_rules.test_a_program_gives_at_all_places_what_it_gives_on_one_device,
    program=test_rules.random_numbers,
)

_answers = {}


@replaces(Places.tell, killed_by=test_messages.test_a_value_is_read_after_it_has_been_written)
def a_read_is_answered_with_the_first_value_that_was_read(original, self, place, make, why, details=""):
    key = (id(self), why, details)
    _answers.setdefault(key, original(self, place, make, why, details))
    return _answers[key]


@replaces(messages.digest, killed_by=test_messages.test_tensors_of_equal_shape_in_another_order_are_noticed)
def all_messages_have_the_same_subject(original, text):
    return original("")


@replaces(Places.settle_gradients, killed_by=test_rules.test_gradients_are_brought_to_their_parameters)
def gradients_stay_where_they_were_computed(original, self, tensors, why=""):
    pass


@replaces(
    Places.all_everywhere,
    killed_by=test_rules.test_a_program_gives_at_all_places_what_it_gives_on_one_device,
    program=test_rules.clipped,
)
def a_norm_of_all_gradients_counts_only_those_of_one_stage(original, self, tensors, why="read"):
    tensors = list(tensors)
    copies = original(self, tensors, why)
    if why == "_foreach_norm":
        for tensor in tensors:
            if isinstance(tensor, ForeignTensor):
                copies[id(tensor)].zero_()
    return copies


@replaces(
    _check_finite,
    killed_by=test_scaled_loss.test_an_overflow_on_one_rank_makes_all_ranks_skip_the_step,
    noticed_by=(messages.DivergedError,),
)
def a_stage_skips_a_step_only_for_its_own_overflow(original, runner, func, rows, destinations):
    here = [index for index, place in enumerate(destinations) if place is None or runner.places.rank in place]
    if here:
        (gradients, flag, scale), _ = rows.arguments(here)
        func(gradients, flag, scale)


removes(
    steps_separately,
    "an optimizer that mixes parameters finds those of its stage only",
    killed_by=test_hidden.test_an_optimizer_that_mixes_parameters_sees_all_gradients,
    gives=True,
)


@replaces(
    DeferredSums.defer,
    killed_by=test_sums.test_sums_are_computed_when_they_are_needed,
    function=test_sums.accumulated,
)
def replicas_sum_their_gradients_for_each_batch(original, self, tensor, place, add_up):
    deferred = original(self, tensor, place, add_up)
    self.settle_for([deferred])
    return deferred


@replaces(
    DeferredSums._add,  # noqa: SLF001
    killed_by=test_sums.test_copies_that_differ_do_not_make_sums_differ,
)
def each_replica_adds_its_own_copy_of_a_gradient(original, self, in_place, first, second):
    with self._places.local():
        total = first.add_(second) if in_place else first + second
    deferred = first if self._places.deferred_sum_of(first) is not None else second
    mark = self._places.deferred_sum_of(deferred)
    return self._mark(total, self._places.place_of(deferred), mark.add_up)
