"""Mutants around the parameter server: combined pushes of a node, compression, security and local steps."""

import contextlib
import copy
import resource
import signal

from cnnstrategies.paramserver.combiner.shared_state import SharedState
from cnnstrategies.paramserver.compression import Encoder, may_be_lossy
from cnnstrategies.paramserver.core.view import RunEnded
from cnnstrategies.paramserver.drivers.control import parse, parse_checked
from cnnstrategies.paramserver.drivers.sockets import allow_files
from cnnstrategies.paramserver.security import Gatekeeper, check_endpoint, prove
from cnnstrategies.paramserver.services import passed_on_termination
from cnnstrategies.paramserver.supervision import Watched
from cnnstrategies.shares.loaders import items_of
from cnnstrategies.strategies.parameter_server.joint_scaler import JointScaler
from cnnstrategies.strategies.parameter_server.loader import check_data
from cnnstrategies.strategies.parameter_server.step import Stepper
from cnnstrategies.strategies.parameter_server.torch_group import WorkerExchange
from tests.mutants.faulty import FAILURES, removes, replaces
from tests.paramserver import (
    test_codecs,
    test_combiner,
    test_control_sockets,
    test_security,
    test_shared_slices,
    test_supervision,
)
from tests.strategies import test_given_out_samples, test_parameter_server_precision, test_step, test_torch_group

# Combined pushes of a node


@replaces(
    SharedState.lead,
    killed_by=test_combiner.test_no_living_workers_gradient_is_lost_or_counts_twice,
    nodes=1,
    takes_long=True,
)
def gradients_that_a_dead_leader_did_not_push_are_lost(original, self, step):
    for gradient in self.gradients:
        gradient.zero_()
    original(self, step)


# Compression


@replaces(
    Encoder.encode, killed_by=test_codecs.test_sent_and_kept_parts_add_up_to_the_gradients_in_any_encoding, seed=0
)
def gradients_that_compression_leaves_out_are_lost(original, self, gradient):
    return original(copy.copy(self), gradient)


removes(
    may_be_lossy,
    "gradients that compression leaves out go to wrong parameters of a shared slice",
    killed_by=test_shared_slices.test_small_parameters_share_a_slice_unless_the_compression_is_lossy,
    gives=False,
)


# Batches that the coordinator distributes


@replaces(
    items_of,
    killed_by=test_given_out_samples.test_all_workers_draw_the_same_order_of_an_epoch,
    make=test_given_out_samples.Shuffled,
)
def each_worker_distributes_its_own_order_of_samples(original, sampler, epoch):
    return [list(sampler.sampler)[place::4] for place in range(4)]


removes(
    check_data,
    "the coordinator distributes positions in data sets that differ from worker to worker",
    killed_by=test_given_out_samples.test_a_data_set_that_differs_from_worker_to_worker_is_refused,
)


# Collectives of torch.distributed


@replaces(
    WorkerExchange.gather,
    killed_by=test_torch_group.test_a_collective_without_a_lost_worker_ends_the_run_unless_it_is_a_barrier,
)
def the_tensors_of_a_lost_worker_are_made_up(original, self, tensors, operation):
    with contextlib.suppress(RunEnded):
        return original(self, tensors, operation)
    return [tensors, tensors]


# Security


@replaces(check_endpoint, killed_by=test_security.test_any_network_needs_encryption_or_explicit_permission)
def servers_listen_on_the_loopback_without_keys(original, endpoint, encrypted, insecure=False):
    original(endpoint, encrypted, insecure or endpoint.startswith("tcp://127."))


@replaces(Gatekeeper.__init__, killed_by=test_security.test_a_process_without_the_members_own_key_is_refused)
def any_key_is_admitted(original, self, context, admitted):
    original(self, context, lambda key: True)


@replaces(
    parse_checked, killed_by=test_security.test_nobody_can_send_messages_in_the_name_of_a_member, key="a member's own"
)
def a_member_may_send_in_another_members_name(original, frame, key, run):
    return parse(frame)


@replaces(prove, killed_by=test_security.test_nobody_can_send_messages_in_the_name_of_a_member, key="a stranger's")
def a_strangers_proof_is_accepted(original, run, public_key):
    return original(run, run.public)


# Local steps


@replaces(Stepper.outer_step, killed_by=test_step.test_there_is_no_outer_step_without_local_steps)
def the_outer_momentum_moves_the_weights_after_no_local_step(original, self):
    self.unfinished.own_steps = max(self.unfinished.own_steps, 1)
    original(self)


@replaces(allow_files, killed_by=test_control_sockets.test_the_limit_of_open_files_is_raised_or_the_start_is_refused)
def the_limit_of_open_files_is_not_raised(original, count, process):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    original(count, process)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


# Signals


@replaces(
    Watched.end_silent,
    killed_by=test_supervision.test_a_silent_process_that_is_ended_is_not_reported_as_killed,
    stopped=True,
    seconds=61,
    missed=[],
    why="was stopped, as by SIGSTOP, for 61 s",
)
def a_stopped_process_is_reported_as_killed(original, self):
    original(self)
    self.reason = ""


@replaces(
    passed_on_termination,
    killed_by=test_control_sockets.test_a_termination_signal_to_a_server_stops_the_run,
    early=False,
)
def a_server_ignores_the_termination_signal(original):
    return contextlib.nullcontext(contextlib.nullcontext)


@replaces(
    passed_on_termination,
    killed_by=test_control_sockets.test_a_termination_signal_to_a_server_stops_the_run,
    early=True,
    takes_long=True,  # A busy machine may start the server before the signal, which then survives.
)
@contextlib.contextmanager
def a_server_ignores_the_termination_signal_while_it_starts(original):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.ExitStack() as registered:

        def passed_to(membership):
            membership.wait_registered()
            return registered.enter_context(original())(membership)

        yield passed_to


# Steps that a gradient scaler skips


@replaces(
    JointScaler.agree,
    killed_by=test_parameter_server_precision.test_all_workers_skip_the_steps_of_one_process,
    noticed_by=(*FAILURES, FileNotFoundError),  # The run ends without a checkpoint.
    case=test_parameter_server_precision.CASES["clipping"],
)
def only_the_worker_with_the_infinite_gradient_skips_the_step(original, self, is_infinite):
    return is_infinite


removes(
    JointScaler.__init__,
    "the gradients of fused optimizers are sent without division by the loss scale",
    killed_by=test_parameter_server_precision.test_all_workers_skip_the_steps_of_one_process,
    noticed_by=(*FAILURES, FileNotFoundError),
    case=test_parameter_server_precision.CASES["fused, on a simulated GPU"],
)
