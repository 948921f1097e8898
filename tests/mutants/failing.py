"""Mutants of the end of a run after an exception: ranks that wait forever, and messages that hide the cause."""

from cnnstrategies.commands.run.failures import lost_loader_worker
from cnnstrategies.paramserver.drivers.coordinator import JournalFile
from cnnstrategies.runtime.failure_store import FailureStore
from cnnstrategies.runtime.failure_watch import Countdown, FailureWatch
from cnnstrategies.strategies.failing import FailTogether
from tests.commands import test_command_failures
from tests.mutants.faulty import removes, replaces
from tests.strategies import test_failing, test_parameter_server_sessions

SAVES = test_failing.test_a_checkpoint_is_saved_only_by_all_ranks_together
ALONE = {"arguments": (2, False, ValueError("boom")), "saves": 0}
TOGETHER = test_failing.test_ranks_work_together_after_a_failure_only_if_all_have_failed_at_the_same_step


@replaces(FailTogether.skip_savers, killed_by=SAVES, **ALONE)
def a_failed_rank_saves_a_checkpoint_without_the_other_ranks(original, self, trainer, exception):
    pass


@replaces(
    FailureStore.fail_together, killed_by=TOGETHER, points=["step 3", "step 4", "step 3"], seconds=3, together=False
)
def ranks_that_have_failed_at_different_steps_save_together(original, self, point, seconds):
    return original(self, "any", seconds)


removes(
    Countdown.update,
    "a failed run that does not end by itself goes on",
    killed_by=test_failing.test_a_process_has_some_seconds_to_end_by_itself,
    updates=[(10.0, False, False)],
    deadline=30.0,
)


@replaces(FailureWatch.close, killed_by=test_failing.test_a_process_that_has_left_its_trainer_is_not_ended, failed=0)
def rank_0_leaves_before_the_other_ranks_know_of_its_failure(original, self):
    self._rank = -1
    original(self)


@replaces(
    lost_loader_worker,
    killed_by=test_command_failures.test_torchs_error_about_a_killed_loader_worker_is_recognised,
    noticed_by=(AssertionError, TypeError),
)
def a_killed_loader_worker_ends_in_a_traceback(original, text, rank):
    return None


removes(
    JournalFile.create,
    "a coordinator that is stopped at its start cannot be replaced",
    killed_by=test_parameter_server_sessions.test_a_coordinator_that_is_stopped_at_its_start_can_be_replaced,
    noticed_by=(ValueError,),
)
