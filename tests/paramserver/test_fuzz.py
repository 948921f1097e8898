"""Whatever arrives, a server lives, keeps its parameters, and allocates no more than it declared.

The number of cases can be raised: ``CNNSTRATEGIES_FUZZ_CASES=1000000 pytest tests/paramserver/test_fuzz.py``.
"""

import contextlib
import dataclasses
import os
import random
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from roles import Roles, join
from training import SGD, specify

from cnnstrategies.paramserver.messages import HEADER_BYTES, SERVER, Encoding, Header, Kind
from cnnstrategies.paramserver.specification import Specification

CASES = int(os.environ.get("CNNSTRATEGIES_FUZZ_CASES", "20000"))
INSIDER = 1  # a member that never joined: nothing that it pushes may count
JSON = [
    b"", b"{", b"[]", b"null", b'{"options":3}', b'{"options":[{"lr":"0.1"}]}', b'{"options":[{}]}', b"[" * 5000,
    b'{"worker":"x"}', b'{"options":[{"lr":1e999}]}', b"\xff\xfe", b'{"name":7}', b'{"name":"0/momentum_buffer"}',
    b'{"name":"0/x","dtype":"float32","shape":[-1]}',
    b'{"name":"0/x","dtype":"float32","shape":[4294967296,4294967296]}',
    b'{"name":"0/x","dtype":"object","shape":[1]}', b'{"name":"0/x","scalar":[1]}', b'{"seen":[[1,2]]}', b"NaN",
]  # fmt: skip


class Attacker:
    """Makes messages that are wrong in some way. It has overheard one of worker 0's, or is the insider itself."""

    def __init__(self, specification: Specification, seed: int) -> None:
        self.random = random.Random(seed)
        self.specification = specification
        self.sequence = 0

    def cases(self, count: int) -> Iterator[list[bytes]]:
        kinds = [
            self.noise, self.truncated, self.of_another_run, self.of_another_version, self.of_a_stranger, self.replay,
            self.bad_length, self.frames, self.together, *[self.insider] * 8,
        ]  # fmt: skip
        for _ in range(count):
            kind = self.random.choice(kinds)
            yield kind() if kind == self.frames else [b"".join(kind())]

    def header(self, **fields: Any) -> Header:
        values: dict[str, Any] = {
            "kind": self.random.choice(list(Kind)),
            "sender": self.random.choice([0, INSIDER]),
            "session": self.specification.session,
            "sequence": self.random.choice([0, 1, 2, self.random.getrandbits(63)]),
            "encoding": self.random.choice(list(Encoding)),
            "key": self.random.choice([0, 1, 2, 3, 4, 5] * 3 + [6, 10**6]),
            "step": self.random.choice([0, 1, 2, 2**64 - 1]),
            "base": self.random.choice([0, 1, 2**64 - 1]),
            "weight": self.random.choice([0.0, 1.0] * 10 + [-1.0, float("nan"), float("inf")]),
        }
        return Header(**(values | fields))

    def bytes(self, most: int = 2000) -> bytes:
        return self.random.randbytes(self.random.choice([0, 1, 7, 16, 144, most]))

    def message(self, payload: bytes, **fields: Any) -> list[bytes]:
        return [self.header(length=len(payload), **fields).pack(), payload]

    def noise(self) -> list[bytes]:
        return [self.bytes(HEADER_BYTES), self.bytes()]

    def truncated(self) -> list[bytes]:
        header, payload = self.message(self.bytes())
        return [header[: self.random.randrange(HEADER_BYTES)], payload]

    def of_another_run(self) -> list[bytes]:
        return self.message(self.bytes(), session=self.random.choice([0, self.specification.session ^ 1]))

    def of_another_version(self) -> list[bytes]:
        header, payload = self.message(self.bytes())
        place = self.random.randrange(5)  # the magic bytes and the version
        return [header[:place] + bytes([header[place] ^ 1 << self.random.randrange(8)]) + header[place + 1 :], payload]

    def of_a_stranger(self) -> list[bytes]:
        sender, life = self.random.choice([(2, 0), (0, 1), (INSIDER, 7), (SERVER + 1, 0), (SERVER + 5, 0)])
        return self.message(self.bytes(), sender=sender, incarnation=life, sequence=2**63)

    def replay(self) -> list[bytes]:
        """Of worker 0, who has sent messages with these numbers before."""
        kind = self.random.choice([Kind.PUSH, Kind.VALUE, Kind.BEGIN, Kind.LEAVE])
        return self.message(self.bytes(), sender=0, kind=kind, sequence=self.random.randrange(1, 5))

    def bad_length(self) -> list[bytes]:
        payload = self.bytes()
        wrong = self.random.choice([len(payload) + 1, 2**32 - 1, len(payload) ^ 64])
        meta = self.random.choice([0, 2**32 - 1])
        return [self.header(length=wrong, meta=meta).pack(), payload]

    def frames(self) -> list[bytes]:
        return [self.bytes() for _ in range(self.random.choice([1, 3, 4, 20]))]

    def together(self) -> list[bytes]:
        """Several messages at once."""
        kinds = [self.noise, self.truncated, self.of_a_stranger, self.replay, self.bad_length]
        return [frame for _ in range(self.random.choice([2, 3, 40])) for frame in self.random.choice(kinds)()]

    def insider(self) -> list[bytes]:
        """Right in all but the contents; only well-formed messages that ask to join are left out."""
        self.sequence += 1
        kind = self.random.choice([kind for kind in Kind if kind != Kind.HELLO])
        text = self.random.choice([b""] * len(JSON) + JSON)
        return self.message(text + self.bytes(), kind=kind, sender=INSIDER, sequence=self.sequence, meta=len(text))


def peak_memory() -> int:
    """The most bytes that this process has held so far."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def send_all(run: Roles, cases: Iterator[list[bytes]]) -> int:
    """Sends messages with several connections; returns when the server has read them."""
    server = run.view.servers[0]
    count = 0
    with zmq.Context() as context:
        sockets = [context.socket(zmq.DEALER) for _ in range(4)]
        for dealer in sockets:
            dealer.linger = -1
            dealer.connect(server.endpoint)
        for count, case in enumerate(cases, 1):
            # The insider's in order: its numbers must rise to get past the look for replays.
            insider = case[0][8:12] == struct.pack("<I", INSIDER)
            sockets[0 if insider else 1 + count % 3].send_multipart(case)
        for dealer in sockets:
            dealer.close()
    return count


def garble_the_transport(endpoint: str, chance: random.Random) -> None:
    """Bytes that are not even zmq's: noise, a greeting and then noise, a frame of 2**62 bytes."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    for data in (
        chance.randbytes(500),
        greeting + chance.randbytes(100),
        greeting + ready + b"\x02" + struct.pack(">Q", 1 << 62),
        greeting + ready + b"\x02" + struct.pack(">Q", 1 << 25) + bytes(100000),
        b"",
        b"\xff",
    ):
        with socket.socket(socket.AF_UNIX) as raw, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            raw.connect(endpoint.removeprefix("ipc://"))
            raw.sendall(data)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_bad_input_changes_nothing(mode: str, tmp_path: Path) -> None:
    plain = SGD | {"momentum": 0.0, "weight_decay": 0.0}
    specification = dataclasses.replace(specify(plain, 1, servers=1, slice_bytes=1 << 14), mode=mode)
    attacker = Attacker(specification, seed=0)
    with Roles(tmp_path, specification) as run:
        run.with_worker(INSIDER)
        values = [torch.full(p.shape, float(i), dtype=torch.float64) for i, p in enumerate(specification.parameters)]
        before = [value.clone() for value in values]
        worker = run.connect(0, values)
        join([worker])
        memory = peak_memory()
        cases = attacker.cases(CASES // 2)
        if mode == "async":  # here a member's well-formed push counts at once
            cases = (case for case in cases if case[0][5:6] != bytes([Kind.PUSH]))
        sent = send_all(run, cases)
        chance = random.Random(1)
        for _ in range(30):
            garble_the_transport(run.view.servers[0].endpoint, chance)
        worker.refresh()
        assert all(torch.equal(a, b) for a, b in zip(before, values, strict=True)), "the attack changed parameters"
        run.step(worker)
        growth = peak_memory() - memory
        dropped = run.servers[0].role.dropped
    for old, new in zip(before, values, strict=True):
        torch.testing.assert_close(new, old - 0.1)
    # libzmq keeps up to 64 unread messages of each of the connections, each of up to the largest payload.
    bound = 4 * 64 * (8 * 4096 + (1 << 18))
    assert growth < bound, f"{growth} bytes more, with what the attacker holds"
    assert sum(dropped.values()) > 0.7 * sent, dropped
    assert len(dropped) < 30, "few reasons, so few lines in the log"
