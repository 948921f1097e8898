"""Mutants of the guard and of `verify`'s checks of data: faults that the checks then do not see."""

from cnnstrategies._torch_private import class_targets
from cnnstrategies.guarding.constant_batches import ConstantBatches
from cnnstrategies.guarding.forwards import ForwardRecords
from cnnstrategies.guarding.losses import wrong_input
from tests.guarding import test_constant_batches, test_forwards, test_inputs_of_losses
from tests.mutants.faulty import removes

removes(
    wrong_input,
    "a loss may get probabilities in place of scores",
    killed_by=test_inputs_of_losses.test_only_probabilities_in_place_of_scores_are_named,
    loss=test_inputs_of_losses.softmax_twice,
    words="applies softmax",
)


removes(
    ForwardRecords.begin_batch,
    "calls of layers are not recorded",
    killed_by=test_forwards.test_another_precision_and_further_calls_in_each_step_are_named,
    steps=test_forwards.twice,
    expected=[("1", "is called in training mode another number of times in each step than on rank 0", True)],
)


removes(
    ConstantBatches.add,
    "images of a batch may all be equal",
    killed_by=test_constant_batches.test_only_batches_of_equal_images_are_named,
)


removes(
    class_targets,
    "all targets may be equal",
    killed_by=test_constant_batches.test_many_equal_targets_are_named_if_the_loss_gets_them,
    gives=[],
)
