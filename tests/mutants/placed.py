"""Mutants of tensors at places: random numbers, reads and messages."""

import test_messages
import test_rules
from mutants.faulty import removes, replaces

from cnnstrategies.placed import draws, messages
from cnnstrategies.placed.places import Places

removes(
    draws.draw_and_drop,
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
    return original(b"")


@replaces(Places.settle_gradients, killed_by=test_rules.test_gradients_are_brought_to_their_parameters)
def gradients_stay_where_they_were_computed(original, self, tensors, why=""):
    pass
