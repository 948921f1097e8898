"""Messages and memory of a process do not grow with the number of steps, and little with the number of processes."""

from collections import Counter, deque
from pathlib import Path

import pytest
import torch

from cnnstrategies.paramserver.core.node import Peer, Send
from cnnstrategies.paramserver.slicing import cut
from tests.paramserver.data_world import fresh
from tests.paramserver.roles import PlainRoles
from tests.paramserver.simulation.data import run
from tests.paramserver.simulation.faults import Moment, Network
from tests.paramserver.training import specify

pytestmark = pytest.mark.light
PLAIN = (str, bytes, bytearray, int, float, type(None), torch.Tensor, memoryview, torch.dtype)


class Counting(Network):
    """A network without faults that counts messages by receiver and kind."""

    def __init__(self) -> None:
        super().__init__(0, run.TIMEOUT, tcp=True)
        self.sent: dict[str, Counter[str]] = {}

    def moment(self, sender: Peer, send: Send) -> Moment | None:
        self.sent.setdefault(str(send.to), Counter())[send.message.kind] += 1
        return None


@pytest.mark.parametrize(("workers", "servers"), [(2, 2), (4, 3)])
def test_a_step_costs_a_push_for_each_slice_and_two_messages(workers: int, servers: int) -> None:
    network, plan = Counting(), run.Plan(workers, servers, parameters=2 * servers)
    assert run.run(plan, network, pace=0).violation is None
    for server in range(servers):
        sent = network.sent[f"server {server}"]
        steps = sent["BEGIN"]
        assert steps > 10 * workers
        assert sent["PUSH"] == steps * sum(slice_.servers[0] == server for slice_ in cut(plan.specification))
        assert steps <= sent["PULL"] <= steps + 2 * workers, "one pull per step, and one when a worker joins and leaves"
        if server == 0:
            assert sent["VOTE"] <= steps * (servers - 1), "one vote of each other server"
        else:
            assert sent["DECIDE"] <= 2 * steps / workers + servers


def objects_in(subject: object, seen: set[int] | None = None) -> int:
    """Return the number of objects that an object refers to, directly or through other objects."""
    seen = set() if seen is None else seen
    if isinstance(subject, PLAIN) or id(subject) in seen:
        return 0
    seen.add(id(subject))
    if isinstance(subject, dict):
        held = [*subject.keys(), *subject.values()]
    elif isinstance(subject, list | tuple | set | frozenset | deque):
        held = list(subject)
    else:
        held = list(getattr(subject, "__dict__", {}).values())
    return len(held) + sum(objects_in(item, seen) for item in held)


def test_nothing_on_a_server_grows_with_the_steps() -> None:
    world = fresh(specify({"name": "SGD", "lr": 0.5}, 2, servers=2, replication=2), workers=(0, 1))
    counts = []
    for step in range(30):
        for worker in range(2):
            world.push(step, worker)
        counts.append(max(map(objects_in, world.roles.values())))
    assert world.versions(0) == {30}
    assert max(counts[15:]) <= max(counts[:15])


def test_nothing_on_a_worker_grows_with_the_steps(tmp_path: Path) -> None:
    with PlainRoles(tmp_path, (40, 30)) as roles:
        worker, _ = roles.joined()
        counts = []
        for _ in range(30):
            roles.step(worker)
            counts.append(objects_in(worker.role))
    assert max(counts[15:]) <= max(counts[:15])
