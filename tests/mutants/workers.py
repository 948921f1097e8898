"""Mutants of the workers' side of the parameter server: pushes, pulls, waits and the copies on a device."""

import math

from cnnstrategies.paramserver.core.view import ServersUnreachableError
from cnnstrategies.paramserver.drivers.staging import Staging
from cnnstrategies.paramserver.worker.connections import Connections
from cnnstrategies.paramserver.worker.outgoing import Outgoing
from cnnstrategies.paramserver.worker.pulls import Pulls
from cnnstrategies.paramserver.worker.worker import WorkerRole
from tests.mutants.faulty import removes, replaces
from tests.paramserver import test_questions, test_simulation, test_staging, test_sync

HUNDRED_RUNS = test_simulation.test_no_simulated_run_of_workers_and_servers_violates_an_invariant


@replaces(Pulls.take, killed_by=HUNDRED_RUNS, takes_long=True)
def the_reply_to_an_older_pull_is_accepted(original, self, header, payload):
    return original(self, header._replace(step=self.step), payload)


removes(Connections.lost, "a worker waits for values that are lost", killed_by=HUNDRED_RUNS, takes_long=True)


@replaces(
    Connections.check_deaf,
    killed_by=test_questions.test_a_server_that_serves_late_does_not_count_as_unreachable,
    noticed_by=(ServersUnreachableError,),
)
def a_server_that_serves_late_counts_as_unreachable(original, self, server, deaf):
    self._received = {other: (-math.inf, last) for other, (_, last) in self._received.items()}
    original(self, server, deaf)


@replaces(Outgoing.send_again, killed_by=HUNDRED_RUNS)
def a_push_that_was_lost_is_not_sent_again(original, self, keys, step):
    original(self, (), step)


removes(
    Pulls.expect_after_push,
    "a worker does not wait for the update of a pipelined push",
    killed_by=test_sync.test_values_arrive_before_all_gradients_have_left,
)


@replaces(WorkerRole.initialise, killed_by=test_sync.test_optimizer_state_is_resumed_from_one_process_and_back)
def a_resumed_run_starts_without_the_optimizers_state(original, self, optimizer_state):
    original(self, None)


removes(
    Staging.before_use,
    "a device computes with values whose copy is not complete",
    killed_by=test_staging.test_training_on_a_device_equals_training_on_the_host,
)


@replaces(Staging.fetched, killed_by=test_staging.test_training_on_a_device_equals_training_on_the_host)
def gradients_are_sent_before_their_copy_from_the_device_is_complete(original, self, wait=False):
    while self._to_host:
        index, *_ = self._to_host.popleft()
        yield index, self._gradients[index]


@replaces(Staging.fetch, killed_by=test_staging.test_training_on_a_device_equals_training_on_the_host)
def a_gradients_memory_is_reused_before_its_copy_is_complete(original, self, index, gradient):
    original(self, index, gradient)
    self._to_host[-1] = index, self._gradients[index], self._to_host[-1][2]
