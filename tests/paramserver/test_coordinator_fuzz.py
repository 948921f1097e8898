"""Whatever comes over the control plane's wire, the coordinator neither fails nor keeps it, and the run goes on."""

import contextlib
import functools
import json
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from changed_values import changed
from simulation import control

from cnnstrategies.paramserver.coordinator.coordinator import Coordinator
from cnnstrategies.paramserver.coordinator.participant import Participant
from cnnstrategies.paramserver.coordinator.settings import CoordinatorSettings
from cnnstrategies.paramserver.core.node import ControlError, Message, Peer
from cnnstrategies.paramserver.core.requests import REFUSED
from cnnstrategies.paramserver.drivers.control import TAG, Loop, encode, parse
from cnnstrategies.paramserver.security import PROOF_BYTES

pytestmark = pytest.mark.light
KINDS = [
    word
    for line in (
        "hello beat leave collect put get epoch take notice end died left status",
        "stop probe over done view nonsense watch",
    )
    for word in line.split()
]
# Of what a member says, and of what nobody should.
FIELDS = [
    word
    for line in (
        "role id incarnation process host endpoint public_key how replaced here seen notices",
        "sequence operation seal boundary name value epoch samples chunk processed ordinal message",
        "clean members ids floor told sizes view admitted figures events",
    )
    for word in line.split()
]
NUMBERS = [0, 1, 2, -1, 1 << 62, 1 << 70, 1.5]
VALUES = [*NUMBERS, None, True, "", "worker", "server", [], [0], [[]], {}, {"a": []}, [None] * 9]


def frame(chance: random.Random) -> bytes:
    sender = [
        chance.choice(["worker", "server", "coordinator", "watcher", "x"]),
        *chance.choices([0, 1, 7, -1, 1 << 40], k=3),
    ]
    fields = {name: chance.choice(VALUES) for name in chance.sample(FIELDS, chance.randrange(9))}
    fields |= {"session": chance.choice([0, 0, 0, *VALUES])}
    sender, request = chance.choice([sender, sender, sender, *VALUES]), chance.choice([0, 1, 5, *VALUES])
    sizes = [1] * chance.randrange(3)
    about = [chance.choice(KINDS), sender, request, sizes, fields]
    if chance.random() < 0.1:
        about[chance.randrange(5)] = chance.choice(VALUES)
    body = json.dumps(about).encode()
    if chance.random() < 0.05:
        body = chance.randbytes(chance.randrange(60))
    length = len(body) if chance.random() < 0.95 else chance.randrange(1 << 32)
    rest = body + b"x" * (len(sizes) if chance.random() < 0.95 else 2)
    return TAG + bytes(PROOF_BYTES) + struct.pack("<I", length) + rest


def test_nonsense_is_refused_or_dropped_and_members_go_on():
    chance, sent = random.Random(0), []
    coordinator = Coordinator(CoordinatorSettings("here", 2, 1, timeout=1e9, appear=1e9))
    loop = Loop(coordinator, lambda peer, message: sent.append((peer, message)))
    loop.start()
    me = Peer("worker", 0, 0, 77)
    hello = {"session": 0, "floor": 1, "process": 1, "host": "here", "endpoint": "", "public_key": ""}
    loop.message(me, Message("hello", hello, (), 1))
    dropped = 0
    for _ in range(20_000):
        try:
            loop.message(*parse(frame(chance)))
        except ControlError:
            dropped += 1
    assert 1000 < dropped < 20_000
    assert me in [member.peer for member in coordinator.members]
    assert coordinator.entries < 50
    sent.clear()
    loop.message(me, Message("take", {"session": 0, "floor": 9}, (), 9))
    assert [(peer, message.kind) for peer, message in sent] == [(me, REFUSED)], "an answer, not silence"


RUNS = 40
CHANGES = 6  # of a message that is rare: with fewer it would depend on chance whether each field is hit
Life = tuple[Any, list[tuple[str, tuple[Any, ...]]]]
"""A role as it was made, and what its driver has called of it, one after the other."""


@contextlib.contextmanager
def noting(kind: Any, lives: list[Life]) -> Iterator[None]:
    """All roles of a kind that are made meanwhile are noted."""
    calls: dict[Any, list[tuple[str, tuple[Any, ...]]]] = {}
    made = kind.__init__

    def make(self: Any, *args: Any, **more: Any) -> None:
        made(self, *args, **more)
        calls[self] = []
        lives.append((functools.partial(kind, *args, **more), calls[self]))

    def noted(name: str, right: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any) -> Any:
            calls.setdefault(self, []).append((name, args))  # Of one that was read from a journal, for nothing.
            return right(self, *args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "__init__", make)
        for name in ("start", "on_message", "on_timer", "on_call"):
            patch.setattr(kind, name, noted(name, getattr(kind, name)))
        yield


def wrong(message: Message, chance: random.Random) -> Message:
    """What a peer has said, with something changed."""
    fields, frames = json.loads(json.dumps(message.fields)), [bytes(one) for one in message.frames]
    place = chance.randrange(2 * len(frames)) if frames else len(frames)
    if place >= len(frames):
        fields = changed(fields, chance)
    elif frames[place].startswith(b"{"):
        frames[place] = json.dumps(changed(json.loads(frames[place]), chance)).encode()
    else:
        frames[place] = chance.choice([b"", frames[place][:-1], frames[place] + bytes(24), b"\xff" * 24])
    frames = frames if chance.random() < 0.9 else chance.choice([[], frames[:1], frames * 2])
    fields = fields if isinstance(fields, dict) else {}
    some = {"session": 0} if chance.random() < 0.8 else {}
    return Message(message.kind, fields | some, frames, chance.choice([message.request, chance.randrange(9)]))


def test_nothing_that_a_peer_says_fails_later() -> None:
    """What runs with deaths and restarts of the coordinator have told a role, with changed messages among it."""
    chance = random.Random(0)
    lives: list[Life] = []
    with noting(Coordinator, lives), noting(Participant, lives):
        for seed in range(RUNS):
            control.simulate(seed)
    for make, calls in lives:
        role = make()
        for name, args in calls:
            if name != "on_message":
                getattr(role, name)(*args)
                continue
            now, sender, message = args
            rare = message.kind in ("leave", "stop", "view")
            changes = CHANGES if rare else chance.random() < 0.02
            for one in (*(wrong(message, chance) for _ in range(changes)), message):
                with contextlib.suppress(ControlError):
                    role.on_message(now, sender, one)


def test_what_is_sent_is_what_comes():
    message = Message("collect", {"session": 0, "sequence": 3}, (b"a", b"b"), 4)
    sender = Peer("worker", 1, 2, 3)
    assert parse(encode(sender, message)) == (sender, message._replace(frames=[b"a", b"b"]))
