"""Whatever a member says, a server takes or refuses it: nothing fails later in what is done with it.

Real messages with something changed, from those who have sent them. A `KeyError` is then a mistake of the server's own,
and ends it; see `test_own_mistakes.py`.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from changed_values import changed
from data_world import MEMBER, Servers
from training import ADAMW, SGD, specify

from cnnstrategies.paramserver.core.view import ServerInfo
from cnnstrategies.paramserver.messages import (
    NO_STEP,
    Bounds,
    Effects,
    Encoding,
    Header,
    InvalidMessageError,
    Kind,
    pack_keys,
    unpack,
)
from cnnstrategies.paramserver.server.server import Server

RUNS = 6  # of each mode
CASES = 100  # of each run
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "pipelined": {"pipelined": True},
    "clipped": {"clip_norm": 0.3},
    "changes": {"pull_compression": "onebit"},
    "chosen": {"pull_compression": "auto"},
    "ssp": {"mode": "ssp", "staleness": 1},
    "async": {"mode": "async"},
}
NUMBERS = [0, 1, 2, 5, 1 << 31, 1 << 62, (1 << 63) - 1, (1 << 64) - 2, NO_STEP]
HEADERS: dict[str, list[Any]] = {
    "kind": list(Kind), "encoding": list(Encoding), "key": [*range(7), 1 << 20], "weight": [0.0, 1.0, 2.0, 1e308],
    "step": NUMBERS, "base": NUMBERS, "incarnation": [0, 1, 2, 3], "rung": [0, 1, 255], "question": [0, 1, 2],
}  # fmt: skip


class Tap:
    """A server, and what it was sent."""

    def __init__(self, role: Server) -> None:
        self.role = role
        self.heard: list[tuple[Header, bytes]] = []

    def on_message(self, now: float, route: bytes, user: str, header: Header, payload: memoryview) -> Effects:
        self.heard.append((header, bytes(payload)))
        return self.role.on_message(now, route, user, header, payload)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.role, name)


class Attack:
    """Two servers with two copies amid what two workers do; and what a member says then, in some way wrong."""

    def __init__(self, options: dict[str, Any], seed: int) -> None:
        self.random = random.Random(seed)
        some = self.random.choice([SGD, ADAMW])
        self.run = Servers(specify(some, 2, servers=2, replication=2, slice_bytes=1 << 12, **options))
        self.bounds = Bounds(1 << 20, len(self.run.slices))
        self.taps = [self.serve(number) for number in range(2)]
        self.run.follow(replace(self.run.view, begun=1))
        self.run.initialise()
        for worker in range(2):
            self.run.say_hello(MEMBER, worker=worker)
        steps = self.random.randrange(3)
        for step in range(steps):
            for worker in range(2):
                self.run.push(step, worker)
                self.pull(step + 1, worker)
        for worker in range(self.random.randrange(3)):
            self.run.push(steps, worker, keys=[one.key for one in self.run.slices if self.random.random() < 0.5])
        if self.random.random() < 0.5:
            self.taps[1] = self.serve(1)  # It is another one's place now, and is sent copies.
            infos = self.run.view.servers[0], ServerInfo(1, "1", since=2)
            self.run.follow(replace(self.run.view, number=2, servers=infos))
        self.run.look(1.0)
        self.run.send(Kind.GET_STATE, step=3)

    def serve(self, number: int) -> Tap:
        self.run.serve(number)
        tap: Any = Tap(self.run.roles[number])
        self.run.roles[number] = tap
        return tap

    def pull(self, step: int, worker: int) -> None:
        for server in self.run.roles:
            own = pack_keys([one.key for one in self.run.slices if one.servers[0] == server])
            self.run.send(Kind.PULL, own, worker=worker, step=step, encoding=Encoding.KEYS, to=(server,))

    def changed(self, header: Header, payload: bytes) -> tuple[Header, bytes]:
        """A message with something of its header, its JSON object or what follows that changed."""
        text, rest = payload[: header.meta], payload[header.meta :]
        for _ in range(self.random.choice([1, 1, 2])):
            if text and self.random.random() < 0.6:
                text = json.dumps(changed(json.loads(text), self.random)).encode()
            elif self.random.random() < 0.5:
                name = self.random.choice(list(HEADERS))
                header = header._replace(**{name: self.random.choice(HEADERS[name])})
            else:
                rest = self.random.choice(
                    [b"", rest[:-1], rest + b"\0", rest[:8], bytes(len(rest)), b"\xff" * len(rest)]
                )
        return header._replace(meta=len(text), length=len(text) + len(rest)), text + rest

    def cases(self, count: int) -> Iterator[tuple[int, Header, memoryview]]:
        """To which server what is said; each kind as often as any other, with numbers that are new to it."""
        by_kind: dict[Kind, list[tuple[int, Header, bytes]]] = {}
        last: dict[tuple[int, int], int] = {}
        for to, tap in enumerate(self.taps):
            for header, payload in tap.heard:
                by_kind.setdefault(header.kind, []).append((to, header, payload))
                last[to, header.sender] = max(last.get((to, header.sender), 0), header.sequence)
        for _ in range(count):
            to, header, payload = self.random.choice(by_kind[self.random.choice(list(by_kind))])
            header, payload = self.changed(header, payload)
            last[to, header.sender] += 1
            yield to, header._replace(sequence=last[to, header.sender]), memoryview(bytearray(payload))

    def play(self, count: int) -> None:
        for to, said, payload in self.cases(count):
            tap = self.taps[to]
            try:
                header = unpack(said.pack(), len(payload), said.session, self.bounds)
            except InvalidMessageError:
                continue
            tap.role.on_message(self.run.now, str(header.sender).encode(), "", header, payload)
            if self.random.random() < 0.2:
                self.run.look(0.3)


@pytest.mark.parametrize("options", MODES.values(), ids=MODES.keys())
def test_no_member_makes_a_server_fail(options: dict[str, Any]) -> None:
    for seed in range(RUNS):
        Attack(options, seed).play(CASES)
