"""Whatever comes over the control plane's wire, the coordinator neither fails nor keeps it, and the run goes on."""

import json
import random

import pytest

from cnnstrategies.paramserver.control import TAG, encode, parse
from cnnstrategies.paramserver.coordinator.coordinator import Coordinator
from cnnstrategies.paramserver.coordinator.settings import CoordinatorSettings
from cnnstrategies.paramserver.core.node import ControlError, Message, Peer
from cnnstrategies.paramserver.core.requests import REFUSED
from cnnstrategies.paramserver.drivers.loop import Loop

pytestmark = pytest.mark.light
KINDS = [
    word
    for line in (
        "hello beat leave collect put get epoch take notice end died left status give",
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
        "clean members ids floor told item report sizes view admitted figures events",
    )
    for word in line.split()
]
NUMBERS = [0, 1, 2, -1, 1 << 62, 1 << 70, 1.5]
VALUES = [*NUMBERS, None, True, "", "worker", "server", [], [0], [[]], {}, {"a": []}, [None] * 9]


def frames(chance: random.Random) -> list[bytes]:
    sender = [
        chance.choice(["worker", "server", "coordinator", "watcher", "x"]),
        *chance.choices([0, 1, 7, -1, 1 << 40], k=3),
    ]
    fields = {name: chance.choice(VALUES) for name in chance.sample(FIELDS, chance.randrange(9))}
    fields |= {"from": chance.choice([sender, sender, sender, *VALUES]), "request": chance.choice([0, 1, 5, *VALUES])}
    fields |= {"session": chance.choice([0, 0, 0, *VALUES])}
    body = json.dumps(fields).encode()
    if chance.random() < 0.05:
        body = chance.randbytes(chance.randrange(60))
    return [TAG + chance.choice(KINDS).encode(), body, *[b"x"] * chance.randrange(3)][: chance.randrange(1, 5)]


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
            loop.message(*parse(frames(chance)))
        except ControlError:
            dropped += 1
    assert 1000 < dropped < 20_000
    assert me in [member.peer for member in coordinator.members]
    assert coordinator.entries < 50
    sent.clear()
    loop.message(me, Message("take", {"session": 0, "floor": 9}, (), 9))
    assert [(peer, message.kind) for peer, message in sent] == [(me, REFUSED)], "an answer, not silence"


def test_what_is_sent_is_what_comes():
    message = Message("collect", {"session": 0, "sequence": 3}, (b"a", b"b"), 4)
    sender = Peer("worker", 1, 2, 3)
    assert parse([*encode(sender, message), *message.frames]) == (sender, message._replace(frames=[b"a", b"b"]))
