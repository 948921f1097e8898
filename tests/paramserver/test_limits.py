"""What the system lets a process have: enough for its connections, or the start is refused."""

import os
import random
import resource
import signal
import socket
import struct
import time
from pathlib import Path

import pytest
from roles import roles

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver import control
from cnnstrategies.paramserver.control import TAG
from cnnstrategies.paramserver.coordinator import Coordinator
from cnnstrategies.paramserver.coordinator_handlers import MOST_NOTICES
from cnnstrategies.paramserver.coordinator_settings import CoordinatorSettings
from cnnstrategies.paramserver.limits import (
    GIB,
    allow_files,
    allow_memory,
    files_of_coordinator,
    files_of_server,
    memory_of_server,
)
from cnnstrategies.paramserver.values import MOST_VALUES


def test_the_limit_of_files_is_raised_or_the_start_refused_with_the_number(tmp_path):
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, 1000))
    allow_files(200, "somebody")
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, 1000)
    settings = CoordinatorSettings(f"ipc://{tmp_path}/c", 100, 10)
    Coordinator(settings).close()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (files_of_coordinator(100, 10), 1000)
    needed = files_of_coordinator(300, 10)
    with pytest.raises(ConfigurationError, match=f"the coordinator needs {needed} open files.*may have 1000"):
        Coordinator(CoordinatorSettings(f"ipc://{tmp_path}/c", 300, 10))
    with pytest.raises(ConfigurationError, match=f"server 0 needs {files_of_server(500, 1)} open files"):
        roles(tmp_path, workers=500).__enter__()


MIB = 1 << 20


def send_endless_message(path: Path, most: int) -> int:
    """To whom listens there, until it hears no more; how many bytes went. The last part never comes."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    ready = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    part = b"\x03" + struct.pack(">Q", MIB) + bytes(MIB)  # "there is more"
    with socket.socket(socket.AF_UNIX) as peer:
        while peer.connect_ex(str(path)):
            time.sleep(0.01)
        peer.settimeout(5)
        peer.sendall(greeting + ready)
        sent = 0
        try:
            while sent < most:
                peer.sendall(part)
                sent += MIB
        except OSError:
            pass
        return sent


def test_an_endless_message_takes_no_more_memory_than_was_declared(tmp_path):
    path = tmp_path / "coordinator"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pid = os.fork()
    if pid == 0:
        coordinator = Coordinator(CoordinatorSettings(f"ipc://{path}", 1, 0))
        allow_memory(100 * MIB)
        coordinator.run()
    assert send_endless_message(path, 600 * MIB) < 200 * MIB, "its connection is cut"
    os.kill(pid, signal.SIGKILL)
    _, _, usage = os.wait4(pid, 0)
    assert (usage.ru_maxrss - before) / 1024 < 200


def test_what_a_server_declares_is_more_than_it_takes(tmp_path):
    with roles(tmp_path, (1_000_000,), workers=1) as run:
        server = run.servers[0]
        declared = server.declared_memory
        worker, _ = run.worker()
        before = memory()
        worker.initialise()
        worker.join()
        for _ in range(5):
            run.step(worker)
        taken = memory() - before
    assert memory_of_server(4_000_000, 5, 1, server._bounds.payload) == declared
    assert declared > GIB + 4 * taken, f"{taken} bytes were taken, by the worker and the server"


def memory() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmData")).split()[1])


CASES = int(os.environ.get("CNNSTRATEGIES_FUZZ_CASES", "100000")) // 20
KINDS = [
    "hello", "beat", "leave", "collect", "put", "get", "epoch", "take", "died", "end", "stop", "status", "notice", "x",
]  # fmt: skip


def test_whatever_members_say_to_a_coordinator_it_lives_and_its_memory_is_bounded(tmp_path):
    """A worker, a server and the supervision, which have tokens; only what would end the run is left out."""
    chance = random.Random(0)
    coordinator = Coordinator(CoordinatorSettings(f"ipc://{tmp_path}/c", 2, 1, supervisor="supervision"))
    odd = [None, -1, 0, 1, 7, 2**62, 2**70, 0.5, "x", "", [], [1], {}, {"a": 1}, True, "worker", "x" * 500, [["a"]]]
    names = [
        "role", "id", "incarnation", "process", "host", "endpoint", "public_key", "here", "seen", "notices", "sequence",
        "operation", "seal", "boundary", "asks", "name", "epoch", "samples", "chunk", "processed", "ordinal", "message",
        "how", "replaced", "value", "session", "by", "token",
    ]  # fmt: skip

    def parts() -> list[bytes]:
        role = chance.choice(["worker", "server", "supervision"])
        kind = chance.choice([one for one in KINDS if one not in ("end", "stop", "died")])
        fields: dict[str, object] = {
            "session": 0, "by": [role, 0], "token": role, "role": role, "id": 0, "incarnation": 0, "process": 1,
            "host": "h", "endpoint": "e", "public_key": "k", "here": 0, "seen": 0, "sequence": 0, "operation": "o",
            "name": str(chance.randrange(50)), "epoch": chance.randrange(3), "samples": 100, "chunk": 1, "processed": 0,
            "ordinal": chance.randrange(3), "value": 1,
        }  # fmt: skip
        for _ in range(chance.choice([0, 1, 1, 2])):
            fields[chance.choice(names)] = chance.choice(odd)
        body = control.encode_fields(fields)
        frames = [chance.randbytes(chance.choice([0, 10, 1000])) for _ in range(chance.choice([0, 0, 1, 3]))]
        message = [bytes([chance.randrange(4)]), TAG + kind.encode(), body, *frames]
        if chance.random() < 0.1:
            place = chance.randrange(len(message))
            message[place] = chance.randbytes(chance.choice([0, 3, 70]))
        return message[: chance.randrange(1, 5)] if chance.random() < 0.05 else message

    before = memory()
    coordinator._handlers._send = coordinator._handlers._roster._send = lambda message: None
    coordinator._handlers._rounds._send = coordinator._handlers._values._send = lambda message: None
    for _ in range(CASES):
        coordinator.handle(parts())
    held = memory() - before
    handlers = coordinator._handlers
    coordinator.close()
    assert CASES * 0.2 < coordinator.dropped < CASES
    assert held < 30 * MIB, f"{held} bytes"
    assert 0 < len(handlers._values._values) <= MOST_VALUES
    assert 0 < len(handlers._notices) <= MOST_NOTICES
