"""Nodes that push once for all their workers: each worker's gradient is in each step once, whichever worker dies."""

from unittest.mock import Mock

import pytest
import torch

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.combiner import worker as worker_module
from cnnstrategies.paramserver.combiner.shared_state import SharedState, open_shared, size_of
from cnnstrategies.paramserver.combiner.worker import CombinedWorker
from cnnstrategies.paramserver.core.view import RemovedError, ServersUnreachableError
from cnnstrategies.paramserver.drivers.staging import Staging
from tests.paramserver.node_simulation import DENSE, LateCopies, simulate


@pytest.mark.parametrize("nodes", [None, 1])
def test_no_living_workers_gradient_is_lost_or_counts_twice(nodes: int | None) -> None:
    """Check runs of several nodes, and of a single node, which leaves out no step even when steps are pipelined."""
    for seed in range(10):
        simulate(seed, nodes)


def test_workers_notice_their_own_removal_and_a_leader_that_went_back() -> None:
    parameters, alive = [torch.zeros(2)], {0, 1, 2}
    shared_states = {rank: SharedState(memoryview(bytearray(size_of(parameters))), parameters) for rank in range(3)}
    worker = CombinedWorker(2, shared_states, parameters, lambda on_arrival: Mock(), lambda: alive, lambda: None, DENSE)
    shared_states[0].publish_value(0, torch.ones(2), 2 * 7)
    shared_states[0].lead(7)
    assert worker.join() == 7
    assert parameters[0].tolist() == [1.0, 1.0]
    alive.discard(2)
    with pytest.raises(RemovedError, match="worker 2 counts as dead"):
        worker.begin_step((), 1)
    alive.symmetric_difference_update({0, 2})
    shared_states[1].lead(5)
    with pytest.raises(ServersUnreachableError, match="gone back to step 5, but this node has already begun step 7"):
        worker.begin_step((), 1)


def test_a_new_leader_ends_its_own_copies_before_the_servers_values_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, a late copy of the earlier leader's value would overwrite the value from the servers."""
    parameters, alive, copies = [torch.zeros(2)], {0, 1}, LateCopies()
    monkeypatch.setattr(worker_module, "staging_for", lambda values: Staging(values, copies))
    states = {rank: SharedState(memoryview(bytearray(size_of(parameters))), parameters) for rank in range(2)}
    engine = Mock()
    engine.join = lambda has: parameters[0].fill_(2.0) is None or 7
    worker = CombinedWorker(1, states, parameters, lambda on_arrival: engine, lambda: alive, lambda: None, DENSE)
    states[0].publish_value(0, torch.ones(2), 2 * 7)
    states[0].lead(7)
    assert worker.join() == 7
    assert parameters[0].tolist() == [0.0, 0.0], "the copy is late"
    alive.discard(0)
    worker.begin_step((), 1)
    for event in list(copies.queue):
        event.synchronize()
    assert parameters[0].tolist() == [2.0, 2.0]


def test_memory_of_another_nodes_process_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigurationError, match=r"`combine_per_node: true` needs the shared memory of worker 3 \(process 1 on other\)"
    ):
        open_shared([3], {3: ["other", 1, 99]}, 64)
