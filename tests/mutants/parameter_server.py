"""Around the parameter server: nodes that push once, compression, who may say what, own steps."""

import copy
import resource
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import test_combiner
import test_compression
import test_control_sockets
import test_given_out_samples
import test_limits
import test_parameter_server_own_code as own_code
import test_parameter_server_sessions as test_sessions
import test_security
import test_step
import test_supervision
import zmq
from lightning.pytorch import Trainer
from mutants.faulty import replaces
from torch import Tensor
from torch.optim import Optimizer

from cnnstrategies.paramserver.combiner.board import Board
from cnnstrategies.paramserver.compression import Encoder
from cnnstrategies.paramserver.core.node import Message, Peer
from cnnstrategies.paramserver.drivers.control import parse, parse_checked
from cnnstrategies.paramserver.drivers.coordinator import CoordinatorService
from cnnstrategies.paramserver.drivers.sockets import allow_files, allow_threads
from cnnstrategies.paramserver.security import Gatekeeper, KeyPair, check_endpoint, prove
from cnnstrategies.paramserver.services import pass_on_termination
from cnnstrategies.paramserver.slicing import Slice
from cnnstrategies.paramserver.specification import Specification
from cnnstrategies.paramserver.supervision import Watched
from cnnstrategies.paramserver.worker.outgoing import check_range
from cnnstrategies.strategies.parameter_server.base import CoordinatedStrategy
from cnnstrategies.strategies.parameter_server.checks import check_dispatch, check_optimizers
from cnnstrategies.strategies.parameter_server.loader import BatchDispatch, DispatchedLoader, check_order, items_of
from cnnstrategies.strategies.parameter_server.options import Options
from cnnstrategies.strategies.parameter_server.run import WAIT, Layout, Rendezvous, choose_rendezvous
from cnnstrategies.strategies.parameter_server.step import Stepper

# Nodes that push once


@replaces(
    Board.lead,
    killed_by=test_combiner.test_nothing_of_the_living_is_lost_or_counts_twice,
    first=50,
)
def gradients_that_a_dead_leader_has_not_pushed_are_lost(
    right: Callable[[Board, int], None], self: Board, step: int
) -> None:
    for gradient in self.gradients:
        gradient.zero_()
    right(self, step)


# Compression


@replaces(
    Encoder.encode, killed_by=test_compression.test_error_feedback_sends_everything_in_the_end, compression="topk"
)
def what_compression_leaves_out_is_lost(
    right: Callable[[Encoder, Tensor], Any], self: Encoder, gradient: Tensor
) -> Any:
    return right(copy.copy(self), gradient)


@replaces(check_range, killed_by=test_compression.test_a_gradient_beyond_fp16_is_refused_by_name, width=4)
def a_gradient_becomes_infinite_on_its_way(
    right: Callable[[Slice, Tensor, Specification, int], None],
    slice_: Slice,
    values: Tensor,
    specification: Specification,
    step: int,
) -> None:
    pass


# Batches that are given out


@replaces(
    items_of, killed_by=test_given_out_samples.test_all_workers_know_the_same_order_of_an_epoch,
    make=test_given_out_samples.Shuffled,
)  # fmt: skip
def each_worker_gives_out_an_order_of_its_own(
    right: Callable[[Any, int], list[Any]], sampler: Any, epoch: int
) -> list[Any]:
    return [list(sampler.sampler)[place::4] for place in range(4)]


@replaces(check_order, killed_by=test_given_out_samples.test_a_sampler_without_an_order_that_all_know_is_refused)
def a_sampler_may_give_another_order_each_time(
    right: Callable[[Any, CoordinatedStrategy], None], sampler: Any, strategy: CoordinatedStrategy
) -> None:
    pass


@replaces(BatchDispatch.loader, killed_by=test_given_out_samples.test_one_loader_is_given_out_and_several_are_refused)
def two_loaders_share_the_batches_of_one(
    right: Callable[[BatchDispatch, object, Trainer], DispatchedLoader],
    self: BatchDispatch,
    dataloader: object,
    trainer: Trainer,
) -> DispatchedLoader:
    self.has_loader = False
    return right(self, dataloader, trainer)


@replaces(
    check_dispatch,
    killed_by=test_given_out_samples.test_counters_of_steps_are_refused_where_steps_differ,
)
def workers_save_together_at_steps_that_they_make_at_different_times(
    right: Callable[[Trainer, Options], None], trainer: Trainer, options: Options
) -> None:
    if not trainer.checkpoint_callbacks:
        right(trainer, options)


# Optimizers


@replaces(check_optimizers, killed_by=own_code.test_what_servers_cannot_take_is_refused_with_a_remedy)
def options_that_are_not_finite_go_to_servers(
    right: Callable[[list[Optimizer], Options], None], optimizers: list[Optimizer], options: Options
) -> None:
    pass


# Who may say what


@replaces(
    check_endpoint,
    killed_by=test_security.test_any_network_needs_encryption_or_an_explicit_word,
)
def servers_listen_on_the_loopback_without_keys(
    right: Callable[[str, bool, bool], None], endpoint: str, encrypted: bool, insecure: bool = False
) -> None:
    right(endpoint, encrypted, insecure or endpoint.startswith("tcp://127."))


@replaces(Gatekeeper.__init__, killed_by=test_security.test_only_who_is_admitted_gets_a_message_through)
def any_key_is_let_in(
    right: Callable[[Gatekeeper, zmq.Context[zmq.Socket[bytes]], Callable[[str], bool]], None],
    self: Gatekeeper,
    context: zmq.Context[zmq.Socket[bytes]],
    admitted: Callable[[str], bool],
) -> None:
    right(self, context, lambda key: True)


@replaces(
    parse_checked, killed_by=test_security.test_nobody_speaks_in_another_ones_name, key="a member's own",
)  # fmt: skip
def a_member_speaks_in_another_ones_name(
    right: Callable[[bytes | memoryview, str, KeyPair], tuple[Peer, Message]],
    frame: bytes | memoryview,
    key: str,
    run: KeyPair,
) -> tuple[Peer, Message]:
    return parse(frame)


@replaces(prove, killed_by=test_security.test_nobody_speaks_in_another_ones_name, key="a stranger's")
def a_proof_is_anybodys(right: Callable[[KeyPair, str], bytes], run: KeyPair, public_key: str) -> bytes:
    return right(run, run.public)


# Own steps


@replaces(Stepper.outer_step, killed_by=test_step.test_there_is_no_outer_step_without_own_ones)
def the_outer_momentum_moves_the_weights_without_own_steps(right: Callable[[Stepper], None], self: Stepper) -> None:
    self.own_steps = max(self.own_steps, 1)
    right(self)


@replaces(choose_rendezvous, killed_by=test_sessions.test_a_worker_waits_as_long_as_network_wait_says)
def nobody_is_told_how_long_to_wait(
    right: Callable[[Options, Layout, int, bool, str | None], Rendezvous],
    options: Options,
    layout: Layout,
    session: int,
    supervised: bool = False,
    directory: str | None = None,
) -> Rendezvous:
    return replace(right(options, layout, session, supervised, directory), wait=WAIT)


@replaces(allow_files, killed_by=test_limits.test_the_limit_of_files_is_raised_or_the_start_refused)
def the_limit_of_files_stays_as_it_is(right: Callable[[int, str], None], count: int, who: str) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    right(count, who)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@replaces(
    allow_threads,
    killed_by=test_limits.test_a_start_is_refused_where_its_threads_cannot_be,
)
def processes_start_where_their_threads_cannot(right: Callable[[int], None], processes: int) -> None:
    pass


# Signals


@replaces(
    Watched.end_silent,
    killed_by=test_supervision.test_who_is_ended_because_it_was_silent_is_not_called_killed,
    stopped=True,
    seconds=61,
    missed=[],
    why="was stopped, as by SIGSTOP, for 61 s",
)
def who_was_stopped_is_called_killed(right: Callable[[Watched], None], self: Watched) -> None:
    right(self)
    self.why = ""


@replaces(
    pass_on_termination,
    killed_by=test_control_sockets.test_a_server_that_is_told_to_end_has_the_run_stop,
)
def a_server_does_not_hear_that_it_is_to_end(
    right: Callable[[str, Callable[[str, int], None]], None], who: str, announce: Callable[[str, int], None]
) -> None:
    pass


@replaces(
    CoordinatorService.announce,
    killed_by=test_control_sockets.test_a_coordinator_that_is_told_to_end_has_the_run_stop,
)
def a_coordinator_does_not_pass_on_that_it_is_to_end(
    right: Callable[[CoordinatorService, str, int], None], self: CoordinatorService, name: str, value: int
) -> None:
    pass
