"""The workers' side of the servers: what they push, wait for and take for values."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import test_data_simulation
import test_staging
import test_sync
from mutants.faulty import replaces
from torch import Tensor

from cnnstrategies.paramserver.drivers.staging import Staging
from cnnstrategies.paramserver.messages import Header
from cnnstrategies.paramserver.worker.connections import Connections
from cnnstrategies.paramserver.worker.outgoing import Outgoing
from cnnstrategies.paramserver.worker.pulls import Pulls
from cnnstrategies.paramserver.worker.worker import WorkerRole

HUNDRED_RUNS = test_data_simulation.test_nothing_is_violated


@replaces(Pulls.take, killed_by=HUNDRED_RUNS)
def the_answer_to_an_older_question_is_taken(
    right: Callable[[Pulls, Header, memoryview], bool], self: Pulls, header: Header, payload: memoryview
) -> bool:
    return right(self, header._replace(step=self.step), payload)


@replaces(Connections.lost, killed_by=HUNDRED_RUNS)
def values_that_are_lost_for_ever_are_waited_for(
    right: Callable[[Connections, int], None], self: Connections, server: int
) -> None:
    pass


@replaces(Outgoing.send_again, killed_by=HUNDRED_RUNS)
def a_push_that_was_lost_is_not_sent_again(
    right: Callable[[Outgoing, Collection[int], int], None], self: Outgoing, keys: Collection[int], step: int
) -> None:
    right(self, (), step)


@replaces(Pulls.with_push, killed_by=test_sync.test_pipelined_steps_equal_one_process)
def nobody_waits_for_what_comes_of_a_pipelined_push(right: Callable[[Pulls, int], None], self: Pulls, key: int) -> None:
    pass


@replaces(WorkerRole.stand_in, killed_by=test_sync.test_optimizer_state_is_resumed_from_one_process_and_back)
def a_resumed_run_begins_without_the_optimizers_state(
    right: Callable[[WorkerRole, Mapping[str, Any] | None], None],
    self: WorkerRole,
    optimizer_state: Mapping[str, Any] | None,
) -> None:
    right(self, None)


@replaces(Staging.before_use, killed_by=test_staging.test_training_on_a_device_equals_training_on_the_host)
def a_device_computes_with_values_that_are_on_their_way(
    right: Callable[[Staging, int], None], self: Staging, index: int
) -> None:
    pass


@replaces(Staging.fetched, killed_by=test_staging.test_training_on_a_device_equals_training_on_the_host)
def gradients_are_sent_that_have_not_come(
    right: Callable[[Staging, bool], Iterator[tuple[int, Tensor]]], self: Staging, wait: bool = False
) -> Iterator[tuple[int, Tensor]]:
    while self._coming:
        index, *_ = self._coming.popleft()
        yield index, self._gradients[index]


@replaces(Staging.fetch, killed_by=test_staging.test_training_on_a_device_equals_training_on_the_host)
def the_memory_of_a_gradient_is_used_again_before_it_is_copied(
    right: Callable[[Staging, int, Tensor], None], self: Staging, index: int, gradient: Tensor
) -> None:
    right(self, index, gradient)
    self._coming[-1] = index, self._gradients[index], self._coming[-1][2]
