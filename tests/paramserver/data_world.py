"""Roles of servers whose messages arrive at once unless a test loses them, and messages of workers to the servers."""

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
        lost: Returns whether a message between two servers is lost, from the sending server's id and the header.
        to_workers: Messages to workers: header, JSON object and rest of the payload.
        missed: Lost messages between servers: receiving server, header and JSON object.
        reports: Reports of the servers to the person who runs the training.
    """

    def __init__(self, specification: Specification) -> None:
        self.specification = specification
        self.slices = cut(specification)
        self.roles: dict[int, Server] = {}
        infos = tuple(ServerInfo(number, str(number), since=1) for number in range(specification.servers))
        self.view = View(1, infos, tuple(WorkerInfo(number) for number in range(specification.workers)))
        self.now = 0.0
        self.lost: Lost = lambda sender, header: False
        self.to_workers: list[tuple[Header, dict[str, Any], bytes]] = []
        self.missed: list[tuple[int, Header, dict[str, Any]]] = []
        self.reports: list[str] = []
        self._sequence = 0

    # Servers

    def store(self, number: int, version: int = -1) -> Store:
        """Return the store of a server whose slices are zeros of a version; in version -1 they have no values yet."""
        store = Store(self.specification, [slice_ for slice_ in self.slices if number in slice_.servers])
        for key, value in store.values.items():
            store.put(key, torch.zeros_like(value), version)
        return store

    def serve(self, number: int, store: Store | None = None) -> None:
        """Start a server, in place of any server with the same number."""
        self.roles[number] = Server(self.specification, number, store or self.store(number))

    def follow(self, view: View, servers: Collection[int] | None = None) -> None:
        """Show a view to all servers, or to some."""
        self.view = view
        for number in list(self.roles if servers is None else servers):
            self._act(number, self.roles[number].follow(self.now, view))

    def without(self, server: int, workers: Collection[int] = ()) -> None:
        """Remove a server and some workers, and tell the other servers."""
        del self.roles[server]
        left = tuple(member for member in self.view.servers if member.id != server)
        present = tuple(member for member in self.view.workers if member.id not in workers)
        self.follow(View(self.view.number + 1, left, present, lost=(server,)))

    def look(self, seconds: float = 0.0) -> None:
        """Let some seconds pass and let all servers look at the time."""
        self.now += seconds
        for number, role in list(self.roles.items()):
            self._act(number, role.on_time(self.now))

    def _act(self, server: int, effects: Effects) -> None:
        waiting = [(server, effect) for effect in effects]
        while waiting or (waiting := self._worked()):
            sender, effect = waiting.pop(0)
            if isinstance(effect, Say):
                self.reports.append(effect.text)
            if not isinstance(effect, Parcel):
                continue
            header, payload = effect.header, memoryview(bytearray(effect.payload))
            if isinstance(effect.to, bytes):
                self.tell(effect.to, sender, header, payload)
            elif effect.to in self.roles and not self.lost(sender, header):
                heard = self.roles[effect.to].on_message(self.now, b"", "", header, payload)
                waiting += [(effect.to, reaction) for reaction in heard]
            else:
                self.missed.append((effect.to, header, _text(payload, header)))

    def tell(self, route: bytes, server: int, header: Header, payload: memoryview) -> None:
        """Deliver a server's message to a worker."""
        self.to_workers.append((header, _text(payload, header), bytes(payload[header.meta :])))

    def _worked(self) -> list[tuple[int, Any]]:
        """Return the effects of the work that servers do when no message is in transit."""
        made: list[tuple[int, Any]] = []
        for number, role in self.roles.items():
            made += [(number, effect) for effect in role.flush()]
            while role.busy:
                made += [(number, effect) for effect in role.work()]
        return made

    def versions(self, server: int) -> set[int]:
        """Return the versions of a server's slices."""
        return set(self.roles[server].store.versions.values())

    def values(self, server: int) -> set[float]:
        """Return the first element of each slice of a server."""
        return {float(value[0]) for value in self.roles[server].store.values.values()}

    # Workers

    @property
    def options(self) -> list[dict[str, Any]]:
        """Hyperparameters of every step, one dictionary for each parameter group."""
        return [group.options for group in self.specification.groups]

    def send(
        self, kind: Kind, payload: bytes = b"", json: dict[str, Any] | None = None, worker: int = 0,
        to: Collection[int] | None = None, **fields: Any,
    ) -> None:  # fmt: skip
        """Deliver a worker's message to all servers, or to some."""
        text = b"" if json is None else pack_json(json)
        for number in list(self.roles if to is None else to):
            self._sequence += 1
            usual = {"sequence": self._sequence, "length": len(text) + len(payload)}
            header = Header(kind, worker, self.specification.session, meta=len(text), **usual | fields)
            body = memoryview(bytearray(text + payload))
            self._act(number, self.roles[number].on_message(self.now, str(worker).encode(), "", header, body))

    def say_hello(self, contents: dict[str, Any], step: int = 0, worker: int = 0) -> None:
        """Send a worker's HELLO with the worker's step."""
        base = self.view.number
        self.send(Kind.HELLO, pack_keys([]), contents, worker, step=step, base=base, encoding=Encoding.KEYS)

    def initialise(self) -> None:
        """Send zeros as the initial values of all slices."""
        for slice_ in self.slices:
            self._send_slice(Kind.VALUE, slice_.key, 0.0, slice_.servers)

    def begin(self, step: int, worker: int = 0) -> None:
        """Send a worker's BEGIN of a step."""
        self.send(Kind.BEGIN, json={"options": self.options}, worker=worker, step=step, weight=1.0)

    def push(self, step: int, worker: int = 0, gradient: float = 1.0, keys: Sequence[int] | None = None) -> None:
        """Send a worker's BEGIN of a step and its pushes, of all slices or of some."""
        self.begin(step, worker)
        for slice_ in self.slices:
            if keys is None or slice_.key in keys:
                self._send_slice(Kind.PUSH, slice_.key, gradient, slice_.servers, worker=worker, step=step)

    def _send_slice(self, kind: Kind, key: int, value: float, servers: Collection[int], **fields: Any) -> None:
        slice_ = self.slices[key]
        payload = bytes(as_bytes(torch.full((slice_.numel,), value, dtype=slice_.dtype)))
        present = [number for number in servers if number in self.roles]
        self.send(kind, payload, key=key, encoding=Encoding.DENSE, to=present, **fields)

    def welcomes(self) -> list[tuple[int, dict[str, Any], int]]:
        """Return server, JSON object and step to begin with of each WELCOME that was sent to a worker."""
        texts = [(header, text) for header, text, _ in self.to_workers if header.kind == Kind.WELCOME]
        return [(header.sender - SERVER, text, header.step) for header, text in texts]


def fresh(specification: Specification, workers: Collection[int] = (0,)) -> Servers:
    """Return servers whose values are zeros, after the given workers have joined."""
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
