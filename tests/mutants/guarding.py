"""Mutants of the guard and of `verify`'s checks of data: faults that the checks then do not see."""

from cnnstrategies._torch_private import class_targets
from cnnstrategies.guarding.batches import BatchRecords
from cnnstrategies.guarding.constant_batches import ConstantBatches
from cnnstrategies.guarding.forwards import ForwardRecords
from cnnstrategies.guarding.loading import lines_about_loading
from cnnstrategies.guarding.losses import wrong_input
from cnnstrategies.guarding.replay import Replay
from cnnstrategies.verifying.contents import other_contents, shares_data_set
from cnnstrategies.verifying.loaders import changes_itself, drawn_samples, is_random
from tests.callbacks import test_guard
from tests.guarding import test_constant_batches, test_forwards, test_inputs_of_losses, test_loading, test_replay
from tests.mutants.faulty import removes
from tests.verifying import test_changing_samples, test_contents, test_verify

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
    ConstantBatches.begin_batch,
    "images of a batch may all be equal",
    killed_by=test_constant_batches.test_only_batches_of_equal_images_are_named,
)


removes(
    class_targets,
    "all targets may be equal",
    killed_by=test_constant_batches.test_many_equal_targets_are_named_if_the_loss_gets_them,
    gives=[],
)


removes(
    Replay.begin_batch,
    "no layer is computed twice",
    killed_by=test_replay.test_only_a_layer_of_which_a_rank_has_all_values_is_computed_twice,
    missing="",
)


removes(
    BatchRecords.repeats_order,
    "epochs may have the same order",
    killed_by=test_guard.test_a_fault_on_one_device_is_found,
    gives=False,
    takes_long=True,
    name="same order",
)


removes(
    other_contents,
    "a rank may load samples with other contents",
    killed_by=test_contents.test_only_equal_samples_with_other_contents_are_named,
    gives="",
    takes_long=True,
)


removes(
    shares_data_set,
    "ranks with data sets of their own are compared",
    killed_by=test_contents.test_data_sets_are_shared_if_a_sampler_divides_them,
    gives=True,
)


for check, fault, where in ((changes_itself, "in place", "training"), (is_random, "random", "validation")):
    removes(
        check,
        f"a data set may change or draw its samples for the {where}",
        killed_by=test_changing_samples.test_only_changed_data_and_random_validations_are_named,
        gives=False,
        noticed_by=(ValueError,),
        train=fault if where == "training" else "plain",
        validation=fault if where == "validation" else "plain",
        words=[f"{where} data"],
    )


removes(
    drawn_samples,
    "ranks may divide the samples of different orders",
    killed_by=test_verify.test_processes_that_divide_different_orders_leave_out_samples,
    takes_long=True,
)


removes(
    lines_about_loading,
    "a state that is not loaded is not named",
    killed_by=test_loading.test_only_a_state_that_is_hardly_loaded_is_named,
    noticed_by=(AssertionError, ValueError),
    gives=[],
    values=test_loading.state("module."),
    strict=False,
    words="has loaded 0 of 7",
)
