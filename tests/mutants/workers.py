"""The workers' side of the servers: what they push, wait for and take for values."""

import test_simulation
import test_staging
import test_sync
from mutants.faulty import removes, replaces

from cnnstrategies.paramserver.drivers.staging import Staging
from cnnstrategies.paramserver.worker.connections import Connections
from cnnstrategies.paramserver.worker.outgoing import Outgoing
from cnnstrategies.paramserver.worker.pulls import Pulls
from cnnstrategies.paramserver.worker.worker import WorkerRole

HUNDRED_RUNS = test_simulation.test_workers_and_servers_violate_nothing


@replaces(Pulls.take, killed_by=HUNDRED_RUNS)
def the_answer_to_an_older_question_is_taken(right, self, header, payload):
    return right(self, header._replace(step=self.step), payload)


removes(Connections.lost, "values that are lost for ever are waited for", killed_by=HUNDRED_RUNS)


@replaces(Outgoing.send_again, killed_by=HUNDRED_RUNS)
def a_push_that_was_lost_is_not_sent_again(right, self, keys, step):
    right(self, (), step)


removes(
    Pulls.with_push,
    "nobody waits for what comes of a pipelined push",
    killed_by=test_sync.test_values_come_while_gradients_leave,
)


@replaces(WorkerRole.initialise, killed_by=test_sync.test_optimizer_state_is_resumed_from_one_process_and_back)
def a_resumed_run_begins_without_the_optimizers_state(right, self, optimizer_state):
    right(self, None)


removes(
    Staging.before_use,
    "a device computes with values that are on their way",
    killed_by=test_staging.test_training_on_a_device_equals_training_on_the_host,
)


@replaces(Staging.fetched, killed_by=test_staging.test_training_on_a_device_equals_training_on_the_host)
def gradients_are_sent_that_have_not_come(right, self, wait=False):
    while self._coming:
        index, *_ = self._coming.popleft()
        yield index, self._gradients[index]


@replaces(Staging.fetch, killed_by=test_staging.test_training_on_a_device_equals_training_on_the_host)
def the_memory_of_a_gradient_is_used_again_before_it_is_copied(right, self, index, gradient):
    right(self, index, gradient)
    self._coming[-1] = index, self._gradients[index], self._coming[-1][2]
