"""Roles of servers whose messages reach each other at once unless they are lost, and what workers say to them."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from cnnstrategies.paramserver.compression import as_bytes
from cnnstrategies.paramserver.core.view import ServerInfo, View, WorkerInfo
from cnnstrategies.paramserver.messages import (
    SERVER,
    Effects,
    Encoding,
    Header,
    Kind,
    Parcel,
    Say,
    pack_json,
    pack_keys,
    unpack_json,
)
from cnnstrategies.paramserver.server.server import Server
from cnnstrategies.paramserver.server.store import Store
from cnnstrategies.paramserver.slicing import cut
from cnnstrategies.paramserver.specification import Specification

MEMBER = {"joins": True, "first": 0, "given": True, "request": None}
Lost = Callable[[int, Header], bool]


class Servers:
    """Some servers, without sockets and clocks.

    Attributes:
        lost: Says of a server's number and a message to another server whether it is lost.
        told: What workers were told, with the texts that messages hold; `missed`: what servers that did not hear it.
    """

    def __init__(self, specification: Specification) -> None:
        self.specification = specification
        self.slices = cut(specification)
        self.roles: dict[int, Server] = {}
        infos = tuple(ServerInfo(one, str(one), since=1) for one in range(specification.servers))
        self.view = View(1, infos, tuple(WorkerInfo(one) for one in range(specification.workers)))
        self.now = 0.0
        self.lost: Lost = lambda sender, header: False
        self.told: list[tuple[Header, dict[str, Any], bytes]] = []
        self.missed: list[tuple[int, Header, dict[str, Any]]] = []
        self.said: list[str] = []
        self._sequence = 0

    # Servers

    def store(self, number: int, version: int = -1) -> Store:
        """A server's slices, of which each is zeros of a version, or has no value yet."""
        store = Store(self.specification, [one for one in self.slices if number in one.servers])
        for key, value in store.values.items():
            store.put(key, torch.zeros_like(value), version)
        return store

    def serve(self, number: int, store: Store | None = None) -> None:
        """Start a server, in the place of another with that number."""
        self.roles[number] = Server(self.specification, number, store or self.store(number))

    def follow(self, view: View, servers: Collection[int] | None = None) -> None:
        """Show a view to all, or to some."""
        self.view = view
        for number in list(self.roles if servers is None else servers):
            self._act(number, self.roles[number].follow(self.now, view))

    def without(self, server: int, workers: Collection[int] = ()) -> None:
        """A server has died, and some workers, and the others hear of it."""
        del self.roles[server]
        left = tuple(one for one in self.view.servers if one.id != server)
        there = tuple(one for one in self.view.workers if one.id not in workers)
        self.follow(View(self.view.number + 1, left, there, lost=(server,)))

    def look(self, seconds: float = 0.0) -> None:
        """Have all look at the time."""
        self.now += seconds
        for number, role in list(self.roles.items()):
            self._act(number, role.on_time(self.now))

    def _act(self, server: int, effects: Effects) -> None:
        waiting = [(server, effect) for effect in effects]
        while waiting or (waiting := self._worked()):
            sender, effect = waiting.pop(0)
            if isinstance(effect, Say):
                self.said.append(effect.text)
            if not isinstance(effect, Parcel):
                continue
            header, payload = effect.header, memoryview(bytearray(effect.payload))
            if isinstance(effect.to, bytes):
                self.tell(effect.to, sender, header, payload)
            elif effect.to in self.roles and not self.lost(sender, header):
                heard = self.roles[effect.to].on_message(self.now, b"", "", header, payload)
                waiting += [(effect.to, one) for one in heard]
            else:
                self.missed.append((effect.to, header, _text(payload, header)))

    def tell(self, route: bytes, server: int, header: Header, payload: memoryview) -> None:
        """A server says something to a worker."""
        self.told.append((header, _text(payload, header), bytes(payload[header.meta :])))

    def _worked(self) -> list[tuple[int, Any]]:
        """What servers do when nothing is on its way any more."""
        made: list[tuple[int, Any]] = []
        for number, role in self.roles.items():
            made += [(number, effect) for effect in role.flush()]
            while role.busy:
                made += [(number, effect) for effect in role.work()]
        return made

    def versions(self, server: int) -> set[int]:
        """Of a server's slices."""
        return set(self.roles[server].store.versions.values())

    def values(self, server: int) -> set[float]:
        """That a server's slices begin with."""
        return {float(value[0]) for value in self.roles[server].store.values.values()}

    # Workers

    @property
    def options(self) -> list[dict[str, Any]]:
        """The hyperparameters of all steps."""
        return [group.options for group in self.specification.groups]

    def send(
        self, kind: Kind, payload: bytes = b"", json: dict[str, Any] | None = None, worker: int = 0,
        to: Collection[int] | None = None, **fields: Any,
    ) -> None:  # fmt: skip
        """A worker says something to all servers, or to some."""
        text = b"" if json is None else pack_json(json)
        for number in list(self.roles if to is None else to):
            self._sequence += 1
            usual = {"sequence": self._sequence, "length": len(text) + len(payload)}
            header = Header(kind, worker, self.specification.session, meta=len(text), **usual | fields)
            body = memoryview(bytearray(text + payload))
            self._act(number, self.roles[number].on_message(self.now, str(worker).encode(), "", header, body))

    def say_hello(self, said: dict[str, Any], step: int = 0, worker: int = 0) -> None:
        """A worker says where it is."""
        base = self.view.number
        self.send(Kind.HELLO, pack_keys([]), said, worker, step=step, base=base, encoding=Encoding.KEYS)

    def initialise(self) -> None:
        """A worker gives zeros as initial values."""
        for slice_ in self.slices:
            self._send_slice(Kind.VALUE, slice_.key, 0.0, slice_.servers)

    def begin(self, step: int, worker: int = 0) -> None:
        """A worker's pushes of a step follow."""
        self.send(Kind.BEGIN, json={"options": self.options}, worker=worker, step=step, weight=1.0)

    def push(self, step: int, worker: int = 0, gradient: float = 1.0, keys: Sequence[int] | None = None) -> None:
        """A worker's pushes of a step, or some of them."""
        self.begin(step, worker)
        for slice_ in self.slices:
            if keys is None or slice_.key in keys:
                self._send_slice(Kind.PUSH, slice_.key, gradient, slice_.servers, worker=worker, step=step)

    def _send_slice(self, kind: Kind, key: int, value: float, servers: Collection[int], **fields: Any) -> None:
        slice_ = self.slices[key]
        payload = bytes(as_bytes(torch.full((slice_.numel,), value, dtype=slice_.dtype)))
        there = [number for number in servers if number in self.roles]
        self.send(kind, payload, key=key, encoding=Encoding.DENSE, to=there, **fields)

    def welcomes(self) -> list[tuple[int, dict[str, Any], int]]:
        """The servers that have welcomed workers, what they have said, and the step to begin with."""
        texts = [(header, text) for header, text, _ in self.told if header.kind == Kind.WELCOME]
        return [(header.sender - SERVER, text, header.step) for header, text in texts]


def fresh(specification: Specification, workers: Collection[int] = (0,)) -> Servers:
    """Servers with zeros for values, and workers that train."""
    run = Servers(specification)
    for number in range(specification.servers):
        run.serve(number)
    run.follow(run.view)
    run.initialise()
    for worker in workers:
        run.say_hello(MEMBER, worker=worker)
    return run


def _text(payload: memoryview, header: Header) -> dict[str, Any]:
    return unpack_json(payload, header) if header.meta else {}
