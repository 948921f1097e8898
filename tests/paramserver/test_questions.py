"""Questions of workers, some of them repeated, and the answers that belong to them."""

from collections.abc import Generator
from typing import Any

import pytest
import torch

from cnnstrategies.paramserver.core.view import ServerInfo, ServersUnreachableError, View, WorkerInfo
from cnnstrategies.paramserver.messages import SERVER, Kind, Parcel, compose, unpack_json
from cnnstrategies.paramserver.server.server import Server
from cnnstrategies.paramserver.server.store import Store
from cnnstrategies.paramserver.slicing import cut
from cnnstrategies.paramserver.specification import Specification
from cnnstrategies.paramserver.worker.connections import Wait
from cnnstrategies.paramserver.worker.worker import WorkerRole
from tests.paramserver.training import specify

pytestmark = pytest.mark.light
PLAIN = {"name": "SGD", "lr": 0.5}


def role_of(specification: Specification, id: int) -> tuple[WorkerRole, list[torch.Tensor]]:
    """Return the role of a worker in a run with one server, and the worker's values."""
    values = [torch.zeros(info.shape, dtype=torch.float64) for info in specification.parameters]
    role = WorkerRole(specification, cut(specification), values, id, 0)
    role.follow(View(1, (ServerInfo(0, "0"),), tuple(map(WorkerInfo, range(specification.workers)))))
    return role, values


def test_a_former_leader_does_not_decide_where_a_worker_begins() -> None:
    """Let a server report that it leads, and then that it does not lead any more."""
    specification = specify(PLAIN, 2)
    role, _ = role_of(specification, 1)
    procedure, wait, steps = role.join(0.0), Wait(lambda: False), []
    # The worker asks for the leader and then for its first step. It asks for both again.
    for number, leads in enumerate([True, False, True, True], 1):
        while not wait.waiting():
            wait = next(procedure)
        role.begin_waiting(number / 10, wait)
        role.on_time(number / 10)
        steps.append(role.step)
        asked = role.connections.take()[-1]
        joins = unpack_json(memoryview(asked.payload), asked.header)["joins"]
        contents = {"ready": True, "lost": False, "leader": leads, "deaf": [], "held": False}
        contents["asked"] = asked.header.sequence
        header, payload = compose(SERVER, specification.session, Kind.WELCOME, number, json=contents, step=7 * joins)
        role.connections.heard(number / 10, 0, header)
        role.on_message(0, header, memoryview(bytearray(payload)))
    assert not wait.waiting()
    next(procedure)
    assert [*steps, role.step] == [0, 0, 0, 0, 7]


def test_a_server_that_serves_late_does_not_count_as_unreachable() -> None:
    """Let a server register and start slowly; then its first message reaches the worker, but not yet the other server.

    The slow server counts as unreachable only after it has demonstrably served for the whole time.
    """
    specification = specify(PLAIN, 1, servers=2, replication=2, mode="async", timeout=10.0)
    late, interval = specification.deaf_after + 1.0, 0.5
    view = View(1, (ServerInfo(0, "0"), ServerInfo(1, "1")), (WorkerInfo(0),))
    values = [torch.zeros(info.shape, dtype=torch.float64) for info in specification.parameters]
    role = WorkerRole(specification, cut(specification), values, 0, 0)
    server = Server(specification, 0, Store(specification, cut(specification)))
    server.follow(0.0, view)
    role.follow(view)

    def hear(first: float, last: float) -> list[object]:
        """Let the slow server send from one time to another; return the silent servers that the other server names."""
        named = []
        for number in range(int(first / interval), int(last / interval)):
            now = number * interval
            role.begin_waiting(now, Wait(lambda: True))
            header, _ = compose(SERVER + 1, specification.session, Kind.PING, number)
            assert role.connections.heard(now, 1, header)
            role.hello(0)
            (hello,) = role.connections.take()
            answers = server.on_message(now, b"0", "", hello.header, memoryview(bytearray(hello.payload)))
            (welcome,) = [answer for answer in answers if isinstance(answer, Parcel) and answer.to == b"0"]
            assert role.connections.heard(now, 0, welcome.header)
            payload = memoryview(bytearray(welcome.payload))
            named += unpack_json(payload, welcome.header)["deaf"]
            role.on_message(0, welcome.header, payload)
        return named

    for number in range(int(late / interval)):
        server.on_time(number * interval)
    assert set(hear(late, late + specification.deaf_after)) == {1}
    with pytest.raises(ServersUnreachableError, match=r"server 0 has heard nothing from server 1 for 20 s"):
        hear(late + specification.deaf_after, late + specification.deaf_after + 2.0)


class Pair:
    """A worker and the only server of a run in mode async; the test delivers each message between the two."""

    def __init__(self) -> None:
        specification = specify(PLAIN, 1, mode="async")
        self.role, self.values = role_of(specification, 0)
        self.server = Server(specification, 0, Store(specification, cut(specification)))
        self.server.follow(0.0, self.role.view)
        self.route = b"0"
        self.role.initialise(None)
        self.run(self.role.join(0.0))
        self.role.begin_step([group.options for group in specification.groups], 1.0)
        for index, info in enumerate(specification.parameters):
            self.role.push(index, torch.ones(info.shape, dtype=torch.float64))
        self.role.end_step()

    def answers(self) -> list[Parcel]:
        """Deliver the worker's waiting messages to the server, and return the server's answers."""
        effects: list[Any] = []
        for parcel in self.role.connections.take():
            effects += self.server.on_message(0.0, self.route, "", parcel.header, memoryview(parcel.payload).cast("B"))
        effects += self.server.flush()
        # Copied, because the values may change before the test delivers the answers.
        return [effect._replace(payload=bytearray(effect.payload)) for effect in effects if isinstance(effect, Parcel)]

    def deliver(self, answers: list[Parcel]) -> None:
        """Deliver answers to the worker, in this order."""
        for answer in answers:
            if self.role.connections.heard(0.0, 0, answer.header):
                self.role.on_message(0, answer.header, memoryview(answer.payload))

    def run(self, procedure: Generator[Wait, None, Any], late: list[Parcel] | None = None) -> None:
        """Run a procedure of the worker to its end; the answers in `late` arrive before those to its own questions."""
        for wait in procedure:
            if wait.waiting():
                self.role.begin_waiting(0.0, wait)
                self.role.on_time(0.0)
                self.deliver([*(late or []), *self.answers()])
                self.deliver(self.answers())
            assert not wait.waiting()


@pytest.mark.parametrize("refreshed", [False, True], ids=["after a step", "after present values"])
def test_a_late_second_answer_is_not_taken_for_current_values(refreshed: bool) -> None:
    """Cut the connection when the worker asks: it asks again and receives two answers."""
    pair = Pair()
    if refreshed:
        pair.deliver(pair.answers())
        procedure = pair.role.refresh()
        next(procedure)
        next(procedure)
    pair.route += b"0"
    again, *answers = pair.answers()
    assert again.header.kind == Kind.WELCOME
    pair.deliver([again])
    late = pair.answers()
    pair.deliver(answers)
    assert {element.header.kind for element in late} == {Kind.PULLED}
    for value in pair.server.store.values.values():
        value.add_(1.0)  # Another worker's update.
    pair.run(pair.role.refresh(), late)
    assert {float(element) for value in pair.values for element in value.unique()} == {0.5}
