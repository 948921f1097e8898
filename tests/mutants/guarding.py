"""Mutants of the guard and of `verify`'s checks of data: faults that the checks then do not see."""

import test_forwards
import test_losses
from mutants.faulty import removes

from cnnstrategies.guarding.forwards import ForwardRecords
from cnnstrategies.guarding.losses import wrong_input

removes(
    wrong_input,
    "a loss may get probabilities in place of scores",
    killed_by=test_losses.test_only_probabilities_in_place_of_scores_are_named,
    loss=test_losses.softmax_twice,
    words="applies softmax",
)


removes(
    ForwardRecords.begin_batch,
    "calls of layers are not recorded",
    killed_by=test_forwards.test_another_precision_and_further_calls_in_each_step_are_named,
    steps=test_forwards.twice,
    expected=[("1", "is called in training mode another number of times in each step than on rank 0", True)],
)
