"""What the system lets a process have: enough for its connections, or the start is refused."""

import os
import resource
import signal
import socket
import struct
import sys
import time
from pathlib import Path

import pytest
from roles import PlainRoles

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.coordinator.settings import CoordinatorSettings
from cnnstrategies.paramserver.drivers.coordinator import CoordinatorService
from cnnstrategies.paramserver.limits import (
    GIB,
    allow_files,
    files_of_coordinator,
    files_of_server,
    memory_of_server,
)


def test_the_limit_of_files_is_raised_or_the_start_refused_with_the_number(tmp_path):
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, 1000))
    allow_files(200, "somebody")
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, 1000)
    settings = CoordinatorSettings(f"ipc://{tmp_path}/c", 100, 10)
    CoordinatorService(settings).close()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (files_of_coordinator(100, 10), 1000)
    needed = files_of_coordinator(500, 10)
    with pytest.raises(ConfigurationError, match=f"the coordinator needs {needed} open files.*may have 1000"):
        CoordinatorService(CoordinatorSettings(f"ipc://{tmp_path}/c", 500, 10))
    with pytest.raises(ConfigurationError, match=f"server 0 needs {files_of_server(500, 1)} open files"):
        PlainRoles(tmp_path, workers=500)


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
    """In a program of its own: tests that ran before leave memory that is free, and that no limit counts again."""
    path = tmp_path / "coordinator"
    program = f"""
from cnnstrategies.paramserver.coordinator.settings import CoordinatorSettings
from cnnstrategies.paramserver.drivers.coordinator import CoordinatorService
from cnnstrategies.paramserver.limits import allow_memory
coordinator = CoordinatorService(CoordinatorSettings("ipc://{path}", 1, 0))
allow_memory({100 * MIB})
coordinator.run()"""
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", program], os.environ)
    try:
        assert send_endless_message(path, 600 * MIB) < 200 * MIB, "its connection is cut"
        assert memory("VmHWM", pid) < 200 * MIB
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_what_a_server_declares_is_more_than_it_takes(tmp_path):
    with PlainRoles(tmp_path, (1_000_000,), workers=1) as run:
        server = run.servers[0]
        declared = server.declared_memory
        worker, _ = run.worker()
        before = memory("VmData")
        worker.initialise()
        worker.join()
        for _ in range(5):
            run.step(worker)
        taken = memory("VmData") - before
    assert memory_of_server(4_000_000, 5, 1, server.bounds.payload) == declared
    assert declared > GIB + 4 * taken, f"{taken} bytes were taken, by the worker and the server"


def memory(kind: str, pid: int | str = "self") -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith(kind)).split()[1])
