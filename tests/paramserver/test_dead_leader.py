"""Leaders that die with what they have decided, and first values that come when steps were made."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from training import specify

from cnnstrategies.paramserver.compression import as_bytes
from cnnstrategies.paramserver.core.view import ServerInfo, View, WorkerInfo
from cnnstrategies.paramserver.effects import Effects, Parcel
from cnnstrategies.paramserver.messages import Encoding, Header, Kind, pack_json, pack_keys
from cnnstrategies.paramserver.server.server import Server
from cnnstrategies.paramserver.server.store import Store
from cnnstrategies.paramserver.slicing import cut

pytestmark = pytest.mark.light
SERVERS = (ServerInfo(0, "0", since=1), ServerInfo(1, "1", since=1))


class Run:
    """Two servers, whose messages come in their order, and what two workers send them.

    Args:
        replication: Copies of each slice.
    """

    def __init__(self, replication: int = 2) -> None:
        self.specification = specify({"name": "SGD", "lr": 0.5}, 2, servers=2, replication=replication)
        self.slices = cut(self.specification)
        self.servers = [
            Server(self.specification, one, Store(self.specification, [s for s in self.slices if one in s.servers]))
            for one in range(2)
        ]
        self.alive = [0, 1]
        self.lost: Callable[[int, Header], bool] = lambda sender, header: False
        self._sequence = 0
        self.follow(View(1, SERVERS, (WorkerInfo(0), WorkerInfo(1))))

    def follow(self, view: View) -> None:
        for server in self.alive:
            self.act(server, self.servers[server].follow(0.0, view))

    def act(self, server: int, effects: Effects) -> None:
        waiting = [(server, effect) for effect in effects]
        while waiting or (waiting := self._worked()):
            sender, effect = waiting.pop(0)
            if isinstance(effect, Parcel) and effect.to in self.alive and not self.lost(sender, effect.header):
                assert isinstance(effect.to, int)
                payload = memoryview(bytearray(effect.payload))
                told = self.servers[effect.to].on_message(0.0, b"", "", effect.header, payload)
                waiting += [(effect.to, one) for one in told]

    def _worked(self) -> list[tuple[int, Any]]:
        """What the servers send when nothing is on its way any more."""
        made: list[tuple[int, Any]] = []
        for one in self.alive:
            role = self.servers[one]
            made += [(one, effect) for effect in role.flush()]
            while role.busy:
                made += [(one, effect) for effect in role.work()]
        return made

    def send(self, worker: int, server: int, kind: Kind, payload: bytes = b"", **fields: Any) -> None:
        described = fields.pop("json", None)
        text = b"" if described is None else pack_json(described)
        self._sequence += 1
        size, session = len(text) + len(payload), self.specification.session
        header = Header(kind, worker, session, self._sequence, meta=len(text), length=size, **fields)
        route = str(worker).encode()
        self.act(server, self.servers[server].on_message(0.0, route, "", header, memoryview(bytearray(text + payload))))

    def initialise(self) -> None:
        for server in self.alive:
            for slice_ in self.slices:
                value = bytes(as_bytes(torch.zeros(slice_.numel, dtype=slice_.dtype)))
                self.send(0, server, Kind.VALUE, value, key=slice_.key, encoding=Encoding.DENSE)

    def push(self, worker: int, gradient: float) -> None:
        """A worker's whole first step."""
        said = {"joins": True, "first": 0, "given": True, "request": None}
        options = {"options": [group.options for group in self.specification.groups]}
        for server in self.alive:
            number = self.servers[server].view.number
            self.send(worker, server, Kind.HELLO, pack_keys([]), json=said, base=number, encoding=Encoding.KEYS)
            self.send(worker, server, Kind.BEGIN, json=options, weight=1.0)
            for slice_ in self.slices:
                value = bytes(as_bytes(torch.full((slice_.numel,), gradient, dtype=slice_.dtype)))
                self.send(worker, server, Kind.PUSH, value, key=slice_.key, encoding=Encoding.DENSE)

    def lose_leader(self) -> None:
        """It dies with the worker that has pushed last, before anything else is said."""
        assert -1.0 in self.values(0), "it has made the step"
        self.alive = [1]
        self.follow(View(2, SERVERS[1:], (WorkerInfo(0),), lost=(0,)))
        self.push(0, 1.0)

    def values(self, server: int) -> set[float]:
        return {float(value[0]) for value in self.servers[server].store.values.values()}


def test_a_step_is_made_up_of_the_same_workers_on_all_slices_although_only_updates_tell_whose_it_is() -> None:
    """The decision is lost; then the leader dies with one whose pushes it has counted."""
    run = Run()
    run.initialise()
    run.push(0, 1.0)
    run.lost = lambda sender, header: header.kind in (Kind.DECIDE, Kind.PING)
    run.push(1, 3.0)
    run.lose_leader()
    assert run.values(1) == {-1.0}


def test_a_step_is_made_up_of_the_same_workers_on_all_slices_although_only_copies_tell_whose_it_is() -> None:
    """The updates are lost with the decision; the leader has sent copies in their place, and no more."""
    run = Run()
    run.initialise()
    run.push(0, 1.0)
    run.lost = lambda sender, header: header.kind in (Kind.DECIDE, Kind.RELAY_BEGIN, Kind.RELAY)
    run.push(1, 3.0)
    run.act(0, run.servers[0].on_time(1.0))  # It shows the other what that has missed.
    run.lose_leader()
    assert run.values(1) == {-1.0}


@pytest.mark.parametrize("told", [True, False])
def test_a_leader_that_comes_back_from_a_snapshot_knows_who_made_up_its_last_step(told: bool) -> None:
    """It had told nobody; one of the workers has died with it."""
    run = Run(replication=1)
    run.initialise()
    run.push(0, 1.0)
    run.lost = lambda sender, header: not told and header.kind in (Kind.DECIDE, Kind.PING)
    run.push(1, 3.0)
    assert run.values(0) == {-1.0}
    assert run.values(1) == ({-1.0} if told else {0.0})
    snapshot = copy.deepcopy(run.servers[0].store.contents())
    run.alive = [1]
    run.follow(View(2, SERVERS[1:], (WorkerInfo(0),), lost=(0,)))
    store = Store(run.specification, [one for one in run.slices if 0 in one.servers])
    store.restore(snapshot)
    run.servers[0] = Server(run.specification, 0, store, restored=True)
    run.alive, run.lost = [1, 0], lambda sender, header: False
    run.follow(View(3, (ServerInfo(0, "0", since=3), SERVERS[1]), (WorkerInfo(0),)))
    run.push(0, 1.0)
    assert run.values(0) == run.values(1) == {-1.0}


def test_first_values_are_not_taken_where_steps_were_made() -> None:
    """Else the run would begin anew with a part of its parameters."""
    run = Run()
    run.initialise()
    run.push(0, 1.0)
    run.push(1, 3.0)
    assert run.values(1) == {-1.0}
    run.servers[1] = Server(run.specification, 1, Store(run.specification, run.slices))
    late = (SERVERS[0], ServerInfo(1, "1", since=2))
    run.lost = lambda sender, header: header.kind in (Kind.COPY, Kind.PING)
    run.follow(View(2, late, (WorkerInfo(0), WorkerInfo(1))))
    run.alive = [1]
    run.follow(View(3, late[1:], (WorkerInfo(0), WorkerInfo(1)), lost=(0,)))
    run.initialise()
    assert set(run.servers[1].store.versions.values()) == {-1}
