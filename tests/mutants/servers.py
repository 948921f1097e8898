"""Mutants of the servers: the gradients of each step, backups, and repeated messages."""

from dataclasses import replace

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.optimizer_trial import mixes_parameters
from cnnstrategies.paramserver.messages import Kind
from cnnstrategies.paramserver.server.asynchronous import StaleClock
from cnnstrategies.paramserver.server.copies import Copies
from cnnstrategies.paramserver.server.decision import SyncClock
from cnnstrategies.paramserver.server.pushes import Backlog
from cnnstrategies.paramserver.server.senders import Senders
from cnnstrategies.paramserver.server.server import Server
from cnnstrategies.paramserver.server.shard import Shard
from cnnstrategies.paramserver.server.store import Changes
from cnnstrategies.paramserver.server.synchronous import Synchronous
from tests.mutants.faulty import removes, replaces
from tests.paramserver import test_changes, test_clocks, test_optimizer_check, test_shard, test_simulation, test_sync

HUNDRED_RUNS = test_simulation.test_no_simulated_run_of_workers_and_servers_violates_an_invariant


@replaces(Shard.pull, killed_by=HUNDRED_RUNS)
def a_worker_gets_values_without_its_own_push(original, self, worker, keys, pull):
    original(self, worker, keys, replace(pull, version=0, member=None))


@replaces(Server.on_message, killed_by=HUNDRED_RUNS, takes_long=True)
def a_repeated_push_is_applied_again(original, self, now, route, user, header, payload):
    sender, seen = (header.sender, header.incarnation), self.store.seen.get(header.key, {})
    if header.kind == Kind.PUSH and sender in seen:
        seen[sender] = min(seen[sender], header.step - 1)
    return original(self, now, route, user, header, payload)


@replaces(StaleClock.may_start, killed_by=HUNDRED_RUNS, takes_long=True)
def a_worker_runs_one_step_further_ahead_than_the_staleness(original, self, clock):
    return original(self, clock - 1)


@replaces(Synchronous.begin, killed_by=test_sync.test_accumulated_gradients_and_ssp_of_staleness_0_are_sync)
def workers_with_different_numbers_of_samples_get_equal_weights(original, self, member, step, begin):
    original(self, member, step, replace(begin, weight=1.0))


removes(
    SyncClock.leave,
    "a step waits for a dead worker",
    killed_by=test_clocks.test_the_members_of_a_step_are_the_living_workers_that_joined_before_it,
)
removes(
    Copies.safe,
    "a worker gets an update that the death of a server can undo",
    killed_by=test_shard.test_a_worker_sees_an_update_when_every_copy_has_it,
    gives=True,
)
removes(Senders.must_repeat, "messages that a server has missed are not repeated", killed_by=HUNDRED_RUNS, gives=False)
removes(Backlog.forget_before, "pushes of all steps are kept", killed_by=HUNDRED_RUNS)
removes(
    Changes.apply,
    "servers do not track the values that workers know",
    killed_by=test_changes.test_validation_has_the_servers_values_and_training_goes_on,
)
removes(
    mixes_parameters,
    "a norm of all parameters is taken of each parameter",
    killed_by=test_optimizer_check.test_an_optimizer_that_mixes_parameters_has_all_of_them_on_one_server,
    noticed_by=(ConfigurationError,),
    gives=False,
)
