"""A server and the coordinator accept or refuse any message of a peer, and an accepted message causes no later error.

The tests change real messages and send them in the name of their senders. Any other exception, such as a `KeyError`, is
a mistake of the role and would end its process; see `test_own_mistakes.py`.
"""

import contextlib
import copy
import json
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from cnnstrategies.paramserver.compression import may_be_lossy, payload_names
from cnnstrategies.paramserver.coordinator.coordinator import Coordinator
from cnnstrategies.paramserver.coordinator.participant import Participant
from cnnstrategies.paramserver.core.node import ControlError, Message, Peer
from cnnstrategies.paramserver.core.view import ServerInfo
from cnnstrategies.paramserver.drivers.control import TAG, encode, parse
from cnnstrategies.paramserver.messages import (
    NO_STEP,
    Bounds,
    Encoding,
    Header,
    InvalidMessageError,
    Kind,
    known_encodings,
    pack_keys,
    unpack,
)
from cnnstrategies.paramserver.security import PROOF_BYTES
from cnnstrategies.paramserver.server.server import Server
from tests.paramserver.data_world import MEMBER, Servers
from tests.paramserver.simulation import control
from tests.paramserver.training import ADAMW, SGD, specify

NUMBERS = [0, 1, 2, 3, 7, -1, 1 << 20, (1 << 63) - 1, 1 << 70, 1.5, -1.0, 1e30, float("nan"), float("inf"), 10**400]
TEXTS = ["", "x", "worker", "server", "ff", "-5", "0/step", "7/step", "x/step", "\ud800"]
LISTS: list[Any] = [[], [0], [[]], ["x"], [[0, 0]], [[0, 0, 0]], [["worker", 0]], {}, {"a": []}, {"a": 1}]
VALUES = [*NUMBERS, *TEXTS, *LISTS, None, True, False]


def changed(value: Any, chance: random.Random) -> Any:
    """Return a JSON value in which something is replaced, left out or doubled."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        name = chance.choice(list(value))
        if chance.random() < 0.15:
            return {key: entry for key, entry in value.items() if key != name}
        return {**value, name: changed(value[name], chance)}
    if isinstance(value, list) and value and chance.random() < 0.8:
        place = chance.randrange(len(value))
        some = [changed(value[place], chance)] * chance.randrange(3)
        return [*value[:place], *some, *value[place + 1 :]]
    return chance.choice(VALUES)


# The coordinator and its members

RUNS = 40
CHANGES = 6  # Changed versions of each rare message; with fewer, chance would decide whether each field is changed.
Calls = list[tuple[str, tuple[Any, ...]]]


@contextlib.contextmanager
def recording(*kinds: Any, copies: bool = True) -> Iterator[dict[Any, tuple[Any, Calls]]]:
    """Record the calls of some classes' roles; give, by role, a copy of its first state and its calls in order."""
    incarnations: dict[Any, tuple[Any, Calls]] = {}

    def recorded(name: str, right: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any) -> Any:
            if self not in incarnations:
                incarnations[self] = copy.deepcopy(self) if copies else None, []
            incarnations[self][1].append((name, args))
            return right(self, *args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for kind in kinds:
            for name in ("start", "on_message", "on_timer", "on_call"):
                if hasattr(kind, name):
                    patch.setattr(kind, name, recorded(name, getattr(kind, name)))
        yield incarnations


def invalid_frame(sender: Peer, message: Message, chance: random.Random) -> bytes:
    """Return the frame of a peer's message with a change of the contents, of their encoding or of any byte."""
    fields, frames = json.loads(json.dumps(message.fields)), [bytes(frame) for frame in message.frames]
    place = chance.randrange(2 * len(frames)) if frames else len(frames)
    if place >= len(frames):
        fields = changed(fields, chance)
    elif frames[place].startswith(b"{"):
        frames[place] = json.dumps(changed(json.loads(frames[place]), chance)).encode()
    else:
        frames[place] = chance.choice([b"", frames[place][:-1], frames[place] + bytes(24), b"\xff" * 24])
    frames = frames if chance.random() < 0.9 else chance.choice([[], frames[:1], frames * 2])
    some = {"session": 0} if chance.random() < 0.8 else {}
    fields = fields | some if isinstance(fields, dict) else some
    request = chance.choice([message.request, chance.randrange(9)])
    frame = bytearray(encode(sender, Message(message.kind, fields, frames, request), bytes(PROOF_BYTES)))
    if chance.random() < 0.2:
        start = len(TAG) + PROOF_BYTES
        (length,) = struct.unpack_from("<I", frame, start)
        text = frame[start + 4 :][:length]
        body = json.dumps(changed(json.loads(text), chance)).encode()
        frame[start : start + 4 + length] = struct.pack("<I", len(body)) + body
    if chance.random() < 0.05:
        frame[chance.randrange(len(frame))] ^= 1 << chance.randrange(8)
        frame = frame[: chance.choice([len(frame), chance.randrange(len(frame))])]
    return bytes(frame)


def test_no_message_of_a_peer_makes_a_role_fail() -> None:
    """Replay the messages of runs with deaths and restarts of the coordinator, mixed with changed messages."""
    chance = random.Random(0)
    with recording(Coordinator, Participant) as incarnations:
        for seed in range(RUNS):
            control.run(*control.drawn(seed), seed)
    dropped = 0
    for role, calls in incarnations.values():
        for name, args in calls:
            if name == "on_message":
                now, sender, message = args
                rare = message.kind in ("leave", "stop", "view")
                for _ in range(CHANGES if rare else chance.random() < 0.02):
                    try:
                        role.on_message(now, *parse(invalid_frame(sender, message, chance)))
                    except ControlError:
                        dropped += 1
            with contextlib.suppress(ControlError):
                getattr(role, name)(*args)
    assert dropped > 1000


# Servers

ATTACKS = 6  # Number of attacks in each mode.
CASES = 100  # Number of messages in each attack.
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "pipelined": {"pipelined": True},
    "clipped": {"clip_norm": 0.3},
    **{f"changes by {name}": {"pull_compression": name} for name in payload_names(pulls=True) if may_be_lossy(name)},
    "chosen": {"pull_compression": "auto"},
    "ssp": {"mode": "ssp", "staleness": 1},
    "async": {"mode": "async"},
}
STEPS = [0, 1, 2, 5, 1 << 31, 1 << 62, (1 << 63) - 1, (1 << 64) - 2, NO_STEP]
HEADERS: dict[str, list[Any]] = {
    "kind": list(Kind), "encoding": known_encodings(), "key": [*range(7), 1 << 20], "weight": [0.0, 1.0, 2.0, 1e308],
    "step": STEPS, "base": STEPS, "incarnation": [0, 1, 2, 3], "level": [0, 1, 255], "question": [0, 1, 2],
}  # fmt: skip


class Attack:
    """Two servers that back each other up, in the middle of a run with two workers, and changed messages to them."""

    def __init__(self, options: dict[str, Any], seed: int) -> None:
        self.random = random.Random(seed)
        some = self.random.choice([SGD, ADAMW])
        self.run = Servers(specify(some, 2, servers=2, replication=2, slice_bytes=1 << 12, **options))
        self.bounds = Bounds(1 << 20, len(self.run.slices))
        with recording(Server, copies=False) as incarnations:
            self.begin()
        self.heard: list[tuple[int, Header, bytes]] = [
            (number, header, bytes(payload))
            for number, role in self.run.roles.items()
            for _, (*_, header, payload) in incarnations[role][1]
        ]

    def begin(self) -> None:
        for number in range(2):
            self.run.serve(number)
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
            self.run.push(steps, worker, keys=[slice_.key for slice_ in self.run.slices if self.random.random() < 0.5])
        if self.random.random() < 0.5:
            self.run.serve(1)  # A new server takes the place and receives copies.
            infos = self.run.view.servers[0], ServerInfo(1, "1", since=2)
            self.run.follow(replace(self.run.view, number=2, servers=infos))
        self.run.look(1.0)
        self.pull(3, 0, base=1, level=1)

    def pull(self, step: int, worker: int, **fields: int) -> None:
        for server in self.run.roles:
            keys = pack_keys([slice_.key for slice_ in self.run.slices if slice_.servers[0] == server])
            self.run.send(Kind.PULL, keys, worker=worker, step=step, encoding=Encoding.KEYS, to=(server,), **fields)

    def changed(self, header: Header, payload: bytes) -> tuple[Header, bytes]:
        """Return a message with changes in its header, its JSON object or the rest of its payload."""
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
        """Yield changed messages with their receivers: all kinds equally often, with new sequence numbers."""
        by_kind: dict[Kind, list[tuple[int, Header, bytes]]] = {}
        last: dict[tuple[int, int], int] = {}
        for to, header, payload in self.heard:
            by_kind.setdefault(header.kind, []).append((to, header, payload))
            last[to, header.sender] = max(last.get((to, header.sender), 0), header.sequence)
        for _ in range(count):
            to, header, payload = self.random.choice(by_kind[self.random.choice(list(by_kind))])
            header, payload = self.changed(header, payload)
            last[to, header.sender] += 1
            yield to, header._replace(sequence=last[to, header.sender]), memoryview(bytearray(payload))

    def play(self, count: int) -> None:
        for to, sent_header, payload in self.cases(count):
            try:
                header = unpack(sent_header.pack(), len(payload), sent_header.session, self.bounds)
            except InvalidMessageError:
                continue
            self.run.roles[to].on_message(self.run.now, str(header.sender).encode(), "", header, payload)
            if self.random.random() < 0.2:
                self.run.look(0.3)


@pytest.mark.parametrize("options", MODES.values(), ids=MODES.keys())
def test_no_message_of_a_member_makes_a_server_fail(options: dict[str, Any]) -> None:
    for seed in range(ATTACKS):
        Attack(options, seed).play(CASES)
