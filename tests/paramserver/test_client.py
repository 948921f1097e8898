"""A worker's side: each layer waits only for its own values, in the order of use, and does not wait for ever."""

import time
from pathlib import Path

import pytest
import torch

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.messages import Kind, unpack_keys
from cnnstrategies.paramserver.slicing import cut
from cnnstrategies.paramserver.worker.connections import Wait
from tests.paramserver.roles import PlainRoles
from tests.paramserver.test_questions import Pair
from tests.paramserver.training import specify


def test_each_parameter_is_waited_for_separately_and_pulls_follow_the_order_of_use() -> None:
    """Check that after a forward in reverse order the worker pulls the parameters in that order."""
    pair = Pair()
    role, count = pair.role, len(pair.values)
    slices = cut(specify({"name": "SGD", "lr": 0.5}, 1))
    first, *others = pair.answers()
    pair.deliver([first])
    come = {part.parameter for part in slices[first.header.key].parts}
    assert [role.pulls.waits_for(index) for index in range(count)] == [index not in come for index in range(count)]
    pair.deliver(others)
    for index in reversed(range(count)):
        assert not role.here(index).waiting()
    role.begin_step([group.options for group in specify({"name": "SGD", "lr": 0.5}, 1).groups], 1.0)
    role.end_step()
    (asked,) = [parcel for parcel in role.connections.take() if parcel.header.kind == Kind.PULL]
    order = [part.parameter for key in unpack_keys(memoryview(asked.payload)) for part in slices[key].parts[-1:]]
    assert order == sorted(order, reverse=True)


def test_a_push_that_servers_would_drop_is_an_error_at_the_worker(tmp_path: Path) -> None:
    """Check the worker's errors: otherwise the step would wait for ever for the push that the servers drop."""
    with PlainRoles(tmp_path) as run:
        with pytest.raises(ConfigurationError, match=r"float64.*float32.*pass the parameters from which"):
            run.connect(0, [torch.zeros(40, dtype=torch.float64)])
        worker, _ = run.joined()
        run.step(worker)
        for rate in (float("nan"), float("inf"), 1e300):
            run.optimizer.param_groups[0]["lr"] = rate
            with pytest.raises(ConfigurationError, match=r"step 1: .* lr=.* in parameter group 0"):
                run.step(worker)
        run.optimizer.param_groups[0]["lr"] = 0.1
        worker.begin_step(run.options, 1)
        for gradient in (torch.ones(40, dtype=torch.float64), torch.ones(2)):
            with pytest.raises(ConfigurationError, match=r"0 is torch\.float32 of shape \(40,\), but its gradient"):
                worker.push(0, gradient)
        worker.push(0, torch.ones(40))
        worker.end_step()
        worker.wait_all()


def test_a_worker_that_sends_for_long_is_not_taken_for_deaf(tmp_path: Path) -> None:
    """Simulate a slow link full of gradients: the server has not read the message that it would answer."""
    with PlainRoles(tmp_path, timeout=2.0) as run:
        worker, _ = run.joined()
        connections = worker.role.connections
        handle = connections.send
        connections.send = lambda server, kind, *a, **k: 0 if kind == Kind.HELLO else handle(server, kind, *a, **k)  # type: ignore
        ends = time.monotonic() + 3.0

        def waiting() -> bool:
            return time.monotonic() < ends

        worker.wait_for(Wait(waiting, lambda: handle(0, Kind.VALUE)))  # Servers do not answer VALUE.
