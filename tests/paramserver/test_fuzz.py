"""A server that receives arbitrary bytes lives, keeps its parameters, and allocates no more memory than it declares.

To run more cases: ``CNNSTRATEGIES_FUZZ_CASES=1000000 pytest tests/paramserver/test_fuzz.py``.
"""

import contextlib
import os
import random
import socket
import struct
from pathlib import Path

import torch
import zmq

from cnnstrategies.paramserver.messages import HEADER_BYTES, NO_STEP, SERVER, Header, Kind, known_encodings
from tests.paramserver.roles import Roles, join
from tests.paramserver.training import SGD, specify

CASES = int(os.environ.get("CNNSTRATEGIES_FUZZ_CASES", "8000"))
INSIDER = 1  # Id of a member that has not joined, so that its pushes must not count.
STRANGERS = [(2, 0), (0, 1), (INSIDER, 7), (SERVER + 1, 0), (SERVER + 5, 0)]  # Senders and incarnations.


def insider_message(chance: random.Random, session: int, number: int, /, **more: int) -> tuple[bytes, bytes]:
    """Return header and payload of a message of the insider: valid except for its contents, and never a HELLO."""
    payload = chance.randbytes(chance.choice([0, 1, 7, 16, 144, 2000]))
    header = Header(
        chance.choice([kind for kind in Kind if kind != Kind.HELLO]),
        INSIDER,
        session,
        number,
        chance.choice(known_encodings()),
        key=chance.choice([*range(7), 10**6]),
        length=len(payload),
        meta=chance.choice([0, 0, len(payload)]),
        step=chance.choice([0, 1, 2, NO_STEP]),
        base=chance.choice([0, 1, NO_STEP]),
        weight=chance.choice([0.0, 1.0, -1.0, float("nan"), float("inf")]),
    )
    return header._replace(**more).pack(), payload


def invalid_frames(chance: random.Random, session: int, number: int) -> list[bytes]:
    """Return the frames of an invalid message; `number` is the message's sequence number."""
    sender, incarnation = chance.choice(STRANGERS)
    lengths = {"length": chance.choice([1 << 12, (1 << 32) - 1]), "meta": chance.choice([0, (1 << 32) - 1])}
    changes = [
        {},  # Noise.
        {},  # A truncated header.
        {},  # Wrong magic bytes or version.
        {"session": chance.choice([0, session ^ 1])},
        {"sender": sender, "incarnation": incarnation, "sequence": 1 << 63},
        {"sender": 0, "sequence": chance.randrange(1, 5)},  # A replay: worker 0 has already used these numbers.
        lengths,
    ]
    choice = chance.randrange(len(changes))
    header, payload = insider_message(chance, session, number, **changes[choice])
    if choice == 0:
        header = chance.randbytes(chance.choice([0, 16, HEADER_BYTES]))
    elif choice == 1:
        header = header[: chance.randrange(HEADER_BYTES)]
    elif choice == 2:
        place = chance.randrange(5)  # the magic bytes and the version
        header = header[:place] + bytes([header[place] ^ 1 << chance.randrange(8)]) + header[place + 1 :]
    return chance.choice([[header + payload], [header + payload], [(header + payload) * 3], [header, payload, payload]])


def peak_memory() -> int:
    """Return the peak memory of this process, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def send_all(endpoint: str, session: int, count: int, chance: random.Random) -> None:
    """Send messages over several connections, and return when the server has read them."""
    with zmq.Context() as context:
        insider, *others = (context.socket(zmq.DEALER) for _ in range(4))
        for dealer in (insider, *others):
            dealer.linger = -1
            dealer.connect(endpoint)
        for number in range(1, count + 1):
            # The insider's messages are sent in order: with falling numbers they would count as replays.
            insider.send(b"".join(insider_message(chance, session, number)))
            others[number % 3].send_multipart(invalid_frames(chance, session, number))
        for dealer in (insider, *others):
            dealer.close()


def garble_the_transport(endpoint: str, chance: random.Random) -> None:
    """Send bytes that violate ZeroMQ's protocol: noise, a greeting followed by noise, a frame of 2**62 bytes."""
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


def test_bad_input_changes_nothing(tmp_path: Path) -> None:
    plain = SGD | {"momentum": 0.0, "weight_decay": 0.0}
    specification = specify(plain, 1, servers=1, slice_bytes=1 << 14)
    chance = random.Random(0)
    with Roles(tmp_path, specification) as run:
        run.with_worker(INSIDER)
        endpoint = run.view.servers[0].endpoint
        values = [torch.full(p.shape, float(i), dtype=torch.float64) for i, p in enumerate(specification.parameters)]
        before = [value.clone() for value in values]
        worker = run.connect(0, values)
        join([worker])
        memory = peak_memory()
        send_all(endpoint, specification.session, CASES // 2, chance)
        for _ in range(30):
            garble_the_transport(endpoint, chance)
        worker.refresh()
        assert all(torch.equal(a, b) for a, b in zip(before, values, strict=True)), "the attack changed parameters"
        run.step(worker)
        growth = peak_memory() - memory
        dropped = run.servers[0].role.dropped
    for old, new in zip(before, values, strict=True):
        torch.testing.assert_close(new, old - 0.1)
    # libzmq keeps up to 64 unread messages of each connection, each as large as the largest payload.
    bound = 4 * 64 * (8 * 4096 + (1 << 18))
    assert growth < bound, f"memory grew by {growth} bytes, the attacker's own memory included"
    assert sum(dropped.values()) > 0.7 * CASES, dropped
    assert len(dropped) < 30, "the server logs a line for each reason, so reasons must be few"
