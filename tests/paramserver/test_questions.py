"""What a worker asks, maybe twice, and which answer belongs to which question."""

from collections.abc import Generator, Iterator
from typing import Any

import pytest
import torch
from training import specify

from cnnstrategies.paramserver.core.view import ServerInfo, View, WorkerInfo
from cnnstrategies.paramserver.messages import SERVER, Header, Kind, Parcel, pack_json, unpack_json
from cnnstrategies.paramserver.server.server import Server
from cnnstrategies.paramserver.server.store import Store
from cnnstrategies.paramserver.slicing import cut
from cnnstrategies.paramserver.worker.worker import Wait, WorkerRole

pytestmark = pytest.mark.light


class Joining:
    """A worker that joins a run at step 7, and its only server, which answers what it is given."""

    def __init__(self) -> None:
        specification = specify({"name": "SGD", "lr": 0.5}, 2, servers=1)
        values = [torch.zeros(info.shape) for info in specification.parameters]
        self.role = WorkerRole(specification, cut(specification), values, 1, 1)
        self.now = 0.0
        self._session, self._sequence = specification.session, 0
        self.role.follow(0.0, View(1, (ServerInfo(0, "0"),), (WorkerInfo(0), WorkerInfo(1, 1))))
        self._procedure: Iterator[Wait] = self.role.join(0.0)
        self._wait: Wait | None = None
        self._go_on()

    def _go_on(self) -> None:
        while self._wait is None or not self._wait.waiting():
            self._wait = next(self._procedure)
            self.role.begin_waiting(self.now, self._wait)

    def hears(self, seconds: float) -> list[Parcel]:
        """What the server hears of it, some time later."""
        self.now += seconds
        self.role.on_time(self.now)
        self._go_on()
        return self.role.connections.take()

    def answer(self, parcel: Parcel, leads: bool = True) -> None:
        """Answer a hello as the server does."""
        joins = unpack_json(memoryview(parcel.payload), parcel.header)["joins"]
        told = {"ready": True, "lost": False, "leader": leads, "counted": joins, "deaf": [], "held": False}
        text = pack_json({**told, "asked": parcel.header.sequence})
        self._sequence += 1
        step, size = 7 if joins else 0, len(text)
        header = Header(Kind.WELCOME, SERVER, self._session, self._sequence, step=step, length=size, meta=size)
        self.role.connections.heard(self.now, 0, header)
        self.role.on_message(0, header, memoryview(text))
        self._go_on()


def test_who_leads_no_more_does_not_say_where_a_worker_begins() -> None:
    """It has said that it leads; then the view has changed, or it was replaced."""
    joining = Joining()
    joining.answer(joining.hears(0.1)[-1])
    joining.answer(joining.hears(0.1)[-1], leads=False)
    assert joining.role.step == 0
    for _ in range(2):  # Who is there, and again from which step on.
        joining.answer(joining.hears(0.1)[-1])
    assert joining.role.step == 7


class Pair:
    """A worker and the only server of a run in mode async; each message between them is handed over by hand."""

    def __init__(self) -> None:
        specification = specify({"name": "SGD", "lr": 0.5}, 1, mode="async")
        slices = cut(specification)
        self.values = [torch.zeros(info.shape, dtype=torch.float64) for info in specification.parameters]
        self.role = WorkerRole(specification, slices, self.values, 0, 0)
        self.server = Server(specification, 0, Store(specification, slices))
        view = View(1, (ServerInfo(0, "0"),), (WorkerInfo(0),))
        self.role.follow(0.0, view)
        self.server.follow(0.0, view)
        self.route = b"0"
        self.run(self.role.initialise(0.0, None))
        self.run(self.role.join(0.0))
        self.role.begin_step([group.options for group in specification.groups], 1.0)
        for index, value in enumerate(self.values):
            self.role.push(index, torch.ones_like(value))
        self.role.end_step()

    def answers(self) -> list[Parcel]:
        """What the server answers to what the worker has to send."""
        effects: list[Any] = []
        for parcel in self.role.connections.take():
            effects += self.server.on_message(0.0, self.route, "", parcel.header, memoryview(parcel.payload).cast("B"))
        effects += self.server.flush()
        # The values may change before they leave.
        return [one._replace(payload=bytearray(one.payload)) for one in effects if isinstance(one, Parcel)]

    def deliver(self, answers: list[Parcel]) -> None:
        """Hand them to the worker, in this order."""
        for answer in answers:
            if self.role.connections.heard(0.0, 0, answer.header):
                self.role.on_message(0, answer.header, memoryview(answer.payload))

    def run(self, procedure: Generator[Wait, None, Any], late: list[Parcel] | None = None) -> None:
        """A procedure to its end, with answers that come late before those to what it asks."""
        for wait in procedure:
            if wait.waiting():
                self.role.begin_waiting(0.0, wait)
                self.role.on_time(0.0)
                self.deliver([*(late or []), *self.answers()])
                self.deliver(self.answers())
            assert not wait.waiting()

    def answered_twice(self) -> list[Parcel]:
        """What the worker has asked is answered; then again, since the connection was cut when it asked."""
        self.route += b"0"
        again, *answers = self.answers()
        assert again.header.kind == Kind.WELCOME
        self.deliver([again])
        late = self.answers()
        self.deliver(answers)
        assert {one.header.kind for one in late} == {Kind.PULLED}
        return late


@pytest.mark.parametrize("refreshed", [False, True], ids=["after a step", "after present values"])
def test_a_late_second_answer_is_not_taken_for_present_values(refreshed: bool) -> None:
    pair = Pair()
    if refreshed:
        pair.deliver(pair.answers())
        procedure = pair.role.refresh()
        next(procedure)
        next(procedure)
    late = pair.answered_twice()
    for value in pair.server.store.values.values():
        value.add_(1.0)  # Another worker's update.
    pair.run(pair.role.refresh(), late)
    assert [value.unique().tolist() for value in pair.values] == [[0.5]] * len(pair.values)
