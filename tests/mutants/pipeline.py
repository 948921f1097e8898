"""Mutants of the pipeline's engine: equality with one process, limits of memory, and freedom from deadlocks."""

import importlib
import pickle
from contextlib import nullcontext

from cnnstrategies.codec import decode, from_bytes, loaded_record, with_fields
from cnnstrategies.pipeline.batch_statistics import StatisticsTable
from cnnstrategies.pipeline.channels import Channels
from cnnstrategies.pipeline.early_sums import EarlySums
from cnnstrategies.pipeline.engine_step import Step
from cnnstrategies.pipeline.gradients import BUCKET_BYTES, Bucket, GradientReducer
from cnnstrategies.pipeline.microbatches import CPU
from cnnstrategies.pipeline.placed_call import PlacedCall
from cnnstrategies.pipeline.timetable import Placement, tasks_of
from cnnstrategies.pipeline.transport import RankWatch, Transport
from cnnstrategies.runtime.generator_states import GeneratorStates
from tests import test_codec
from tests.mutants.faulty import removes, replaces
from tests.pipeline import (
    test_batch,
    test_batch_norm,
    test_compiled,
    test_early_sums,
    test_executor,
    test_layouts,
    test_rank_watch,
)
from tests.strategies import test_trainer_on_gpu


@replaces(Step.part_of_loss, killed_by=test_layouts.test_random_layouts_equal_one_process, part=0)
def microbatches_of_different_sizes_get_equal_weights(original, self, outputs, microbatch):
    split = self.batch.split
    count = sum(size > 0 for size in split.sizes)
    return original(self, outputs, microbatch) * (split.samples / split.sizes[microbatch] / count)


@replaces(GradientReducer.__init__, killed_by=test_layouts.test_random_layouts_equal_one_process, part=0)
def replicas_of_a_stage_do_not_sum_their_gradients(original, self, parameters, group, bucket_bytes=BUCKET_BYTES):
    original(self, parameters, None, bucket_bytes)


removes(
    GradientReducer.overlap,
    "gradients are summed only after the last backward",
    killed_by=test_executor.test_replicas_sum_gradients_while_the_last_backward_runs,
    takes_long=True,
)


removes(
    EarlySums.during,
    "gradients of the user's program are summed only after the last backward",
    killed_by=test_early_sums.test_replicas_send_the_first_gradients_before_the_last_are_computed,
    gives=nullcontext(),
    takes_long=True,
    declares=True,
)


@replaces(
    EarlySums._add,  # noqa: SLF001
    killed_by=test_early_sums.test_replicas_send_the_first_gradients_before_the_last_are_computed,
    takes_long=True,
    declares=True,
)
def a_sum_over_the_replicas_has_only_the_last_microbatch(original, self, parameter, index, sums, gradient):
    sums[index] = None
    original(self, parameter, index, sums, gradient)


@replaces(
    StatisticsTable.send,
    killed_by=test_batch_norm.test_running_statistics_of_batch_norm_equal_one_process,
    takes_long=True,
)
def running_statistics_cover_only_the_replicas_own_microbatches(original, self, group):
    original(self, None)


removes(
    GeneratorStates.restore,
    "a recomputed forward draws different random numbers",
    killed_by=test_compiled.test_recomputed_stages_train_the_same_values,
    backend=None,
    batches=(12,),
    takes_long=True,
)


@replaces(
    Step.tracks,
    killed_by=test_compiled.test_recomputed_stages_train_the_same_values,
    backend="eager",
    batches=(12,),
    takes_long=True,
)
def a_compiled_stages_first_forward_runs_without_autograd(original, self, again):
    return not again


@replaces(tasks_of, killed_by=test_executor.test_peak_memory_holds_only_the_microbatches_in_flight, takes_long=True)
def a_stage_under_1f1b_holds_the_activations_of_all_microbatches(
    original, placement, rank, schedule="1f1b", run_ahead=False
):
    return original(placement, rank, "gpipe", run_ahead)


@replaces(Placement.rank_of, killed_by=test_layouts.test_random_layouts_equal_one_process, part=1, takes_long=True)
def messages_are_sent_to_the_ranks_that_equal_shares_imply(original, self, stage, microbatch):
    return self.ranks(stage)[microbatch % self.replicas[stage]]


@replaces(
    PlacedCall.observe_loss,
    killed_by=test_trainer_on_gpu.test_a_gpu_trains_the_values_of_the_cpu_and_no_step_waits,
    world=2,
    cases=[test_trainer_on_gpu.Case(test_trainer_on_gpu.piped, module=test_trainer_on_gpu.OwnModule)],
    takes_long=True,
)
def a_step_waits_for_the_device_to_read_an_output(original, self, outputs):
    if self.network.runner.last:
        with self.places.local():
            float(outputs[0].sum())
    original(self, outputs)


@replaces(
    Transport.__init__,
    killed_by=test_trainer_on_gpu.test_a_gpu_trains_the_values_of_the_cpu_and_no_step_waits,
    world=2,
    cases=[test_trainer_on_gpu.Case(test_trainer_on_gpu.piped, module=test_trainer_on_gpu.OwnModule)],
    takes_long=True,
)
def sizes_of_a_batch_go_through_nccl(original, self, placement, timeout, device=CPU):
    original(self, placement, timeout, device)
    self.control = None


@replaces(
    Channels.exchange, killed_by=test_layouts.test_a_device_may_be_drained_at_any_moment, case=test_layouts.DRAINED[0]
)
def receives_start_before_transfers_that_other_ranks_need_first(original, self, now, until):
    original(self, now, until + 8)


@replaces(
    Channels.order, killed_by=test_layouts.test_a_device_may_be_drained_at_any_moment, case=test_layouts.DRAINED[0]
)
def each_rank_starts_its_sends_before_its_receives(original, self, sender, source, target):
    turn, kind, *_ = original(self, sender, source, target)
    return turn - (source == self.transport.rank), kind, source, target


@replaces(
    Channels.begin, killed_by=test_layouts.test_a_device_may_be_drained_at_any_moment, case=test_layouts.DRAINED[3]
)
def a_transfer_that_must_follow_a_first_message_starts_before_it(original, self, before=None):
    original(self, None)


removes(
    Step.overlaps,
    "replicas sum their gradients while other ranks need their last message",
    killed_by=test_layouts.test_a_device_may_be_drained_at_any_moment,
    gives=True,
    case=test_layouts.DRAINED[2],
)


@replaces(
    Step.overlaps, killed_by=test_layouts.test_a_device_may_be_drained_at_any_moment, case=test_layouts.DRAINED[4]
)
def replicas_with_unequal_shares_sum_gradients_on_the_schedule_of_equal_shares(original, self, microbatch):
    replicas = self.pipeline.placement.replicas[self.pipeline.place.stage]
    return not any(self.batch.split.sizes[microbatch + replicas :])


@replaces(GradientReducer.ready, killed_by=test_layouts.test_random_layouts_equal_one_process, part=0)
def gradients_are_summed_before_their_last_term_is_added(original, self, parameter, bucket):
    bucket.missing = min(bucket.missing, 1)
    original(self, parameter, bucket)


removes(
    RankWatch.tell,
    "only the neighbour of a lost rank learns about the loss",
    killed_by=test_rank_watch.test_the_other_ranks_end_within_seconds_and_name_the_lost_rank,
    takes_long=True,
)


@replaces(
    Bucket.without_gradient, killed_by=test_layouts.test_random_layouts_equal_one_process, part=0, takes_long=True
)
def a_replica_lacks_gradients_that_only_other_replicas_computed(original, self, reached):
    return [parameter for parameter in self.parameters if parameter not in reached]


@replaces(decode, killed_by=test_batch.test_pickled_objects_of_a_peer_are_not_executed)
def a_peers_object_is_unpickled(original, frames):
    return pickle.loads(frames[0])


@replaces(from_bytes, killed_by=test_batch.test_pickled_objects_of_a_peer_are_not_executed)
def a_peers_batch_or_decision_is_unpickled(original, message):
    return pickle.loads(message)


@replaces(loaded_record, killed_by=test_codec.test_a_message_can_create_only_records, name="this:Never", parts=[])
def a_message_imports_a_module(original, name):
    importlib.import_module(name.partition(":")[0])
    return original(name)


@replaces(with_fields, killed_by=test_codec.test_records_arrive_by_class_and_none_of_their_code_runs)
def a_records_own_code_runs_at_the_receiver(original, cls, names, parts):
    return cls(*parts)
