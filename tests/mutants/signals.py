"""Mutants of signals that stop a run: they act in the wrong process, count twice, are kept, or kill too early."""

import contextlib
import signal

from cnnstrategies.paramserver.supervision import Supervision
from cnnstrategies.runtime.stop_signals import Repeated, _SignalThread, leave_to_helpers, passing_on
from tests import test_helper_processes, test_stop_signals
from tests.mutants.faulty import removes, replaces
from tests.paramserver import test_supervision

LIMITED = test_supervision.test_workers_that_stop_after_a_signal_have_the_time_that_they_limit_themselves


@replaces(
    _SignalThread.forget,
    killed_by=test_stop_signals.test_a_forked_process_acts_on_its_own_signals_alone,
    takes_long=True,
)
def a_signal_to_a_forked_process_acts_in_its_parent(original, self):
    signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)


@replaces(Repeated.note, killed_by=test_stop_signals.test_a_signal_counts_as_sent_again_only_later)
def a_signal_that_arrives_twice_within_a_second_kills_the_run(original, self, signum):
    again = self.received is not None
    original(self, signum)
    return again


removes(
    leave_to_helpers,
    "a signal directly after the fork ends a loader worker",
    killed_by=test_helper_processes.test_a_helper_ends_only_by_its_rank,
    method="fork",
)
removes(
    passing_on,
    "a process that has started ranks keeps its signals",
    killed_by=test_stop_signals.test_a_process_that_has_started_ranks_passes_signals_on,
    gives=contextlib.nullcontext(),
)
removes(
    Supervision.send_signal,
    "a supervision process keeps its signals",
    killed_by=LIMITED,
    stop_seconds=0.0,
    limit=70.0,
)


@replaces(Supervision.expect_end, killed_by=LIMITED, stop_seconds=100.0, limit=110.0)
def a_worker_that_saves_its_last_checkpoint_is_killed(original, self, seconds=0.0):
    original(self)
