"""A leader that knows less than the others decides what they wait for: servers and a worker's messages."""

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
from cnnstrategies.paramserver.specification import Specification

pytestmark = pytest.mark.light

VIEW = View(6, (ServerInfo(0, "0", since=5), ServerInfo(1, "1", since=6)), (WorkerInfo(0),))


class Run:
    """Two servers that go on from snapshots, and what a worker sends them.

    Args:
        versions: Of the servers' slices.
    """

    def __init__(self, versions: tuple[int, int]) -> None:
        self.specification: Specification = specify({"name": "SGD", "lr": 0.5}, 1, servers=2)
        self.servers = []
        self.sequence = 0
        for server, version in enumerate(versions):
            store = Store(self.specification, [one for one in cut(self.specification) if server in one.servers])
            for key, value in store.values.items():
                store.put(key, torch.zeros_like(value), version)
            self.servers.append(Server(self.specification, server, store, restored=True))
        for server in self.servers:
            self.act(server.follow(0.0, VIEW))

    def act(self, effects: Effects) -> None:
        """Have the servers hear of each other's messages, and do what is left to be done."""
        for effect in effects:
            if isinstance(effect, Parcel) and isinstance(effect.to, int):
                receiver = self.servers[effect.to]
                self.act(receiver.on_message(0.0, b"", "", effect.header, memoryview(bytearray(effect.payload))))
        for server in self.servers:
            if flushed := server.flush():
                self.act(flushed)
            if server.busy:
                self.act(server.work())

    def send(self, kind: Kind, payload: bytes = b"", json: dict[str, Any] | None = None, **fields: Any) -> None:
        """A message of the worker to both servers, or the slice's."""
        text = b"" if json is None else pack_json(json)
        for server in self.servers:
            if kind == Kind.PUSH and fields["key"] not in server.store.slices:
                continue
            self.sequence += 1
            size = len(text) + len(payload)
            header = Header(kind, 0, self.specification.session, self.sequence, length=size, meta=len(text), **fields)
            self.act(server.on_message(0.0, b"0", "", header, memoryview(bytearray(text + payload))))


def test_a_step_is_decided_again_that_only_a_dead_leader_knew_the_decision_of() -> None:
    """The leader's snapshot is past it, the other server's is not, and the worker was answered by none."""
    run = Run((3, 2))
    said = {"joins": True, "first": 0, "given": True, "request": 3}
    run.send(Kind.HELLO, pack_keys([]), said, step=2, base=6, encoding=Encoding.KEYS)
    options = [group.options for group in run.specification.groups]
    run.send(Kind.BEGIN, json={"options": options}, step=2, weight=1.0)
    for slice_ in cut(run.specification):
        gradient = bytes(as_bytes(torch.ones(slice_.numel, dtype=slice_.dtype)))
        run.send(Kind.PUSH, gradient, key=slice_.key, step=2, encoding=Encoding.DENSE)
    assert set(run.servers[1].store.versions.values()) == {3}
    assert set(run.servers[0].store.versions.values()) == {3}, "it has had that push"
    assert all(server.mode.clock.step == 3 for server in run.servers)
