"""Servers that go on from snapshots of different steps, and what workers send them."""

from typing import Any

import pytest
import torch
from training import specify

from cnnstrategies.paramserver.compression import as_bytes
from cnnstrategies.paramserver.core.view import ServerInfo, View, WorkerInfo
from cnnstrategies.paramserver.effects import Effects, Parcel
from cnnstrategies.paramserver.messages import (
    NO_STEP,
    SERVER,
    Encoding,
    Header,
    Kind,
    pack_json,
    pack_keys,
    unpack_json,
)
from cnnstrategies.paramserver.server.decision import Decision
from cnnstrategies.paramserver.server.roll_call import PATIENCE_SECONDS
from cnnstrategies.paramserver.server.server import Server
from cnnstrategies.paramserver.server.store import Store
from cnnstrategies.paramserver.slicing import cut
from cnnstrategies.paramserver.specification import Specification

pytestmark = pytest.mark.light

SERVERS = (ServerInfo(0, "0", since=5), ServerInfo(1, "1", since=6))
NEWCOMER = {"joins": True, "first": 3, "given": False, "request": 3}
MEMBER = {"joins": True, "first": 0, "given": True, "request": 3}


class Run:
    """Two servers that go on from snapshots, and what workers send them.

    Args:
        versions: Of the servers' slices.
        workers: How many there are.
        replication: Servers that have each slice.
        decided: The snapshots hold the last decision, too.
        late: The second server hears of the view later.
        life: Of the workers; those that made the last step had the first.
        restored: Whether the second server goes on from a snapshot.
        backup_workers: Workers that a step does not wait for.

    Attributes:
        begins: The steps that workers were told to begin with by the server that leads.
        lost: The servers that have said that their values are not those of the run.
    """

    def __init__(
        self,
        versions: tuple[int, int],
        workers: int = 1,
        replication: int = 1,
        decided: bool = False,
        late: bool = False,
        life: int = 0,
        restored: bool = True,
        backup_workers: int = 0,
    ) -> None:
        optimizer = {"name": "SGD", "lr": 0.5}
        options = {"replication": replication, "backup_workers": backup_workers}
        self.specification: Specification = specify(optimizer, workers, servers=2, **options)
        self.servers = []
        self.life = life
        self.sequence = 0
        self.now = 0.0
        for server, version in enumerate(versions):
            store = Store(self.specification, [one for one in cut(self.specification) if server in one.servers])
            for key, value in store.values.items():
                store.put(key, torch.zeros_like(value), version)
            if decided and version > 0:
                options = [group.options for group in self.specification.groups]
                store.decided = Decision(version - 1, (0,), (0,), options, 1.0).as_dict()
            self.servers.append(Server(self.specification, server, store, restored or server == 0))
        self.begins: list[int] = []
        self.lost: set[int] = set()
        view = View(6, SERVERS, tuple(WorkerInfo(worker, life) for worker in range(workers)))
        if late:
            self.act(self.servers[0].follow(self.now, view))
        else:
            self.follow(view)

    def follow(self, view: View) -> None:
        """Tell the servers who is a member."""
        for server in self.servers:
            self.act(server.follow(self.now, view))

    def act(self, effects: Effects) -> None:
        """Have the servers hear of each other's messages, and do what is left to be done."""
        for effect in effects:
            if not isinstance(effect, Parcel):
                continue
            if effect.header.kind == Kind.WELCOME:
                told = unpack_json(memoryview(bytearray(effect.payload)), effect.header)
                self.begins += [effect.header.step] if told.get("counted") and told["leader"] else []
                self.lost |= {effect.header.sender - SERVER} if told.get("ready") is False else set()
            elif isinstance(effect.to, int):
                receiver = self.servers[effect.to]
                self.act(receiver.on_message(self.now, b"", "", effect.header, memoryview(bytearray(effect.payload))))
        for server in self.servers:
            if flushed := server.flush():
                self.act(flushed)
            if server.busy:
                self.act(server.work())

    def send(
        self, kind: Kind, payload: bytes = b"", json: dict[str, Any] | None = None, worker: int = 0, **fields: Any
    ) -> None:
        """A message of a worker to both servers, or the slice's."""
        text = b"" if json is None else pack_json(json)
        for server in self.servers:
            if kind == Kind.PUSH and fields["key"] not in server.store.slices:
                continue
            self.sequence += 1
            size = len(text) + len(payload)
            header = Header(
                kind,
                worker,
                self.specification.session,
                self.sequence,
                incarnation=self.life,
                length=size,
                meta=len(text),
                **fields,
            )
            route = str(worker).encode()
            self.act(server.on_message(self.now, route, "", header, memoryview(bytearray(text + payload))))

    def say_hello(self, said: dict[str, Any], step: int, worker: int = 0) -> None:
        """A worker says where it is."""
        self.send(Kind.HELLO, pack_keys([]), said, worker, step=step, base=6, encoding=Encoding.KEYS)

    def push(self, step: int, worker: int = 0) -> None:
        """A worker's pushes of a step."""
        options = [group.options for group in self.specification.groups]
        self.send(Kind.BEGIN, json={"options": options}, worker=worker, step=step, weight=1.0)
        for slice_ in cut(self.specification):
            gradient = bytes(as_bytes(torch.ones(slice_.numel, dtype=slice_.dtype)))
            self.send(Kind.PUSH, gradient, worker=worker, key=slice_.key, step=step, encoding=Encoding.DENSE)

    def versions(self, server: int) -> set[int]:
        """Of a server's slices."""
        return set(self.servers[server].store.versions.values())


def test_a_step_is_decided_again_that_only_a_dead_leader_knew_the_decision_of() -> None:
    """The leader's snapshot is past it, the other server's is not, and the worker was answered by none."""
    run = Run((3, 2))
    run.say_hello(MEMBER, 2)
    run.push(2)
    assert run.versions(1) == {3}
    assert run.versions(0) == {3}, "it has had that push"
    assert all(server.mode.clock.step == 3 for server in run.servers)


def test_newcomers_do_not_wait_for_a_step_that_nobody_can_push_any_more() -> None:
    """All who had pushed it have died, and the leader, which has decided it, has come back from a snapshot."""
    run = Run((3, 2))
    run.say_hello(NEWCOMER, 3)
    run.say_hello(NEWCOMER, 3)
    assert run.versions(1) == {3}
    assert [server.handlers.lost_updates for server in run.servers] == [0, 1]
    run.push(3)
    assert run.versions(0) == run.versions(1) == {4}


def test_newcomers_wait_for_a_step_that_a_member_can_push() -> None:
    run = Run((3, 2), workers=2)
    run.say_hello(MEMBER, 2, worker=1)
    run.say_hello(NEWCOMER, 3)
    run.say_hello(NEWCOMER, 3)
    assert run.versions(1) == {2}
    run.push(2, worker=1)
    assert run.versions(1) == {3}
    assert run.servers[1].handlers.lost_updates == 0


def test_newcomers_wait_for_workers_that_have_not_said_yet_where_they_are() -> None:
    run = Run((3, 2), workers=2)
    run.say_hello(NEWCOMER, 3)
    run.say_hello(NEWCOMER, 3)
    assert run.versions(1) == {2}
    for waited in (0.0, 1000.0, *[PATIENCE_SECONDS / 4] * 4):  # The machine sleeps: that is no time to say it.
        run.say_hello(NEWCOMER, 3)
        assert run.versions(1) == {2}
        run.now += waited
        run.act(run.servers[1].on_time(run.now))
    run.say_hello(NEWCOMER, 3)
    assert run.versions(1) == {3}


def test_newcomers_wait_for_the_decision_of_a_step_whose_pushes_are_there() -> None:
    run = Run((3, 2), workers=2)
    run.say_hello(MEMBER, 2, worker=1)
    run.push(2, worker=1)
    run.follow(View(7, SERVERS, (WorkerInfo(0),)))
    run.say_hello(NEWCOMER, 3)
    run.say_hello(NEWCOMER, 3)
    assert run.versions(1) == {2}
    decision = Decision(2, (1,), (0,), [group.options for group in run.specification.groups], 1.0)
    text = pack_json(decision.as_dict())
    size, session = len(text), run.specification.session
    header = Header(Kind.DECIDE, SERVER, session, 1000, incarnation=7, length=size, meta=size)
    run.act(run.servers[1].on_message(run.now, b"", "", header, memoryview(bytearray(text))))
    assert run.versions(1) == {3}
    assert run.servers[1].handlers.lost_updates == 0


@pytest.mark.parametrize("older", [0, 2])
def test_what_a_newer_snapshot_knows_of_steps_ends_with_its_values(older: int) -> None:
    """The other server has gone on from an older one before this one was back, and gives it copies."""
    run = Run((older, 5), replication=2, decided=True)
    run.now += 1.0
    run.act(run.servers[0].on_time(run.now))  # The other one notices that it has missed copies.
    assert run.versions(1) == {older}
    assert [server.mode.clock.step for server in run.servers] == [older, older]
    run.say_hello(MEMBER, older)
    run.push(older)
    assert run.versions(0) == run.versions(1) == {older + 1}
    decided = run.servers[1].store.decided
    assert decided is not None
    assert decided["step"] == older
    run.follow(View(7, SERVERS[1:], (WorkerInfo(0),), lost=(0,)))
    run.push(older + 1)
    assert run.versions(1) == {older + 2}


def test_a_newcomer_is_told_where_to_begin_when_all_who_have_come_back_have_said_what_they_know() -> None:
    run = Run((0, 5), decided=True, late=True, life=1)
    for _ in range(2):
        run.say_hello({"joins": True}, NO_STEP)
    assert run.begins == []
    run.follow(View(6, SERVERS, (WorkerInfo(0, 1),)))
    run.say_hello({"joins": True}, NO_STEP)
    assert run.begins == [5]
    run.say_hello({**NEWCOMER, "first": 5, "request": 5}, 5)
    run.push(5)
    assert run.versions(0) == run.versions(1) == {6}
    assert [server.handlers.lost_updates for server in run.servers] == [5, 0]


def test_a_newcomer_is_not_told_where_to_begin_while_a_server_is_lost_that_may_know_a_later_step() -> None:
    run = Run((0, 0))
    lost = run.servers.pop()
    run.follow(View(7, SERVERS[:1], (WorkerInfo(0),)))
    for _ in range(2):
        run.say_hello({"joins": True}, NO_STEP)
    assert run.begins == []
    run.servers.append(lost)
    run.follow(View(8, (SERVERS[0], ServerInfo(1, "1", since=8)), (WorkerInfo(0),)))
    run.say_hello({"joins": True}, NO_STEP)
    assert run.begins == [0]


def test_newcomers_do_not_wait_for_a_step_that_was_lost_with_all_who_had_its_values() -> None:
    """One has given the second server first values before that had heard that a step was made."""
    run = Run((1, 0), life=1, restored=False)
    for _ in range(2):
        run.say_hello({"joins": True}, NO_STEP)
    assert run.begins == [1]
    for _ in range(2):
        run.say_hello({**NEWCOMER, "first": 1, "request": 1}, 1)
    assert run.lost == {1}


def test_a_newcomer_is_told_where_to_begin_when_all_others_have_said_where_they_are() -> None:
    run = Run((3, 3), workers=2)
    run.say_hello({"joins": True}, NO_STEP, worker=1)
    run.say_hello({"joins": True}, NO_STEP, worker=1)
    assert run.begins == []
    run.say_hello({**MEMBER, "request": 8}, 8)
    run.begins.clear()
    run.say_hello({"joins": True}, NO_STEP, worker=1)
    assert run.begins == [8]


@pytest.mark.parametrize("dies", [True, False])
def test_nobody_waits_for_a_step_that_a_newcomer_would_have_made_which_has_left(dies: bool) -> None:
    """It was told where to begin when another had not said for long where it is: further on."""
    run = Run((3, 3), workers=2)
    run.say_hello({"joins": True}, NO_STEP, worker=1)
    for _ in range(6):
        for server in run.servers:
            run.act(server.on_time(run.now))
        run.now += PATIENCE_SECONDS / 4
    run.say_hello({"joins": True}, NO_STEP, worker=1)
    assert run.begins == [3]
    run.push(3, worker=1)
    assert run.versions(0) == run.versions(1) == {4}
    run.say_hello({**MEMBER, "request": 8}, 8)
    run.push(4, worker=1)
    if dies:
        run.follow(View(7, SERVERS, (WorkerInfo(0),)))
    else:
        run.send(Kind.LEAVE, worker=1, step=5)
    run.push(8)
    assert run.versions(0) == run.versions(1) == {9}


def test_a_leader_does_not_go_back_to_a_step_of_which_it_has_dropped_the_pushes() -> None:
    """One has pushed it before another has said that it is further on."""
    run = Run((3, 3), workers=2)
    run.say_hello(NEWCOMER, 3, worker=1)
    run.push(3, worker=1)
    run.say_hello({**MEMBER, "request": 8}, 8)
    run.push(8)
    for step in range(4, 9):
        run.push(step, worker=1)
    assert run.versions(0) == run.versions(1) == {9}


def test_a_server_without_slices_learns_from_workers_how_far_they_are() -> None:
    """The leader has come back from a snapshot, and has no decision to tell."""
    specification = specify({"name": "SGD", "lr": 0.5}, 1, servers=7, slice_bytes=1 << 20)
    assert all(6 not in slice_.servers for slice_ in cut(specification))
    server = Server(specification, 6, Store(specification, []))
    server.follow(0.0, View(1, tuple(ServerInfo(one, str(one)) for one in range(7)), (WorkerInfo(0),)))
    hello = pack_json({**MEMBER, "request": None}), {"encoding": Encoding.KEYS}
    begin = pack_json({"options": [group.options for group in specification.groups]}), {"weight": 1.0}
    for sequence, (kind, (text, fields)) in enumerate(((Kind.HELLO, hello), (Kind.BEGIN, begin)), 1):
        size, session = len(text), specification.session
        header = Header(kind, 0, session, sequence, step=8, base=0, length=size, meta=size, **fields)  # type: ignore[arg-type]
        server.on_message(0.0, b"0", "", header, memoryview(bytearray(text)))
    told = [effect for effect in server.flush() if isinstance(effect, Parcel)]
    assert [(one.to, one.header.kind) for one in told] == [(0, Kind.VOTE)]
    assert unpack_json(memoryview(bytearray(told[0].payload)), told[0].header) == {"complete": [[8, 0]]}
