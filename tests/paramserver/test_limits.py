"""What the system lets a process have: enough for its connections, or the start is refused."""

import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path

import pytest
from ports import free_port
from roles import PlainRoles

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.coordinator.settings import Address, CoordinatorSettings
from cnnstrategies.paramserver.core.view import RunEnded
from cnnstrategies.paramserver.drivers.coordinator import CoordinatorService
from cnnstrategies.paramserver.limits import (
    GIB,
    allow_threads,
    files_of_coordinator,
    files_of_server,
    memory_of_server,
)
from cnnstrategies.paramserver.membership import Membership
from cnnstrategies.paramserver.security import KeyPair
from cnnstrategies.paramserver.services import CoordinatorProcess, start


def test_the_limit_of_files_is_raised_or_the_start_refused_with_the_number(tmp_path):
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, 1000))
    settings = CoordinatorSettings(f"ipc://{tmp_path}/c", 100, 10)
    CoordinatorService(settings).close()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1000, 1000)
    needed = files_of_coordinator(500, 10)
    with pytest.raises(ConfigurationError, match=f"the coordinator needs {needed} open files.*may have 1000"):
        CoordinatorService(CoordinatorSettings(f"ipc://{tmp_path}/c", 500, 10))
    with pytest.raises(ConfigurationError, match=f"server 0 needs {files_of_server(500, 1)} open files"):
        PlainRoles(tmp_path, workers=500)


def test_strangers_that_connect_and_say_nothing_keep_no_member_out(tmp_path):
    port, key = free_port(), tmp_path / "key"
    endpoint = f"tcp://127.0.0.1:{port}"
    KeyPair.create().save(key)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, 3000))
    coordinator = start(CoordinatorProcess(CoordinatorSettings(endpoint, 1, 0), str(key)), "fork")
    resource.setrlimit(resource.RLIMIT_NOFILE, (3000, 3000))
    strangers = [socket.socket() for _ in range(1000)]
    while strangers[0].connect_ex(("127.0.0.1", port)):
        time.sleep(0.01)
    for stranger in strangers[1:]:
        stranger.setblocking(False)
        stranger.connect_ex(("127.0.0.1", port))
    member = Membership(Address(endpoint, "worker", 0, appear=20.0), keys=KeyPair.load(key))
    member.wait_registered()
    member.close()
    coordinator.send_signal(signal.SIGKILL)


def test_who_has_another_key_is_told_to_look_at_it(tmp_path):
    port, key = free_port(), tmp_path / "key"
    KeyPair.create().save(key)
    settings = CoordinatorSettings(f"tcp://127.0.0.1:{port}", 1, 0)
    coordinator = start(CoordinatorProcess(settings, str(key)), "fork")
    member = Membership(Address(settings.endpoint, "worker", 0, appear=1.0), keys=KeyPair.create())
    with pytest.raises(RunEnded, match=r"was silent for 1 s: .* give all processes the same key_file"):
        member.wait_registered()
    member.close()
    coordinator.send_signal(signal.SIGKILL)


def test_a_start_is_refused_where_its_threads_cannot_be():
    allow_threads(4)
    if os.getuid() == 0:
        os.setuid(65534)  # No limit counts for root.
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    with pytest.raises(
        ConfigurationError, match=r"4 processes .* need some 32 threads.* raise the limit \(`ulimit -u`"
    ):
        allow_threads(4)
    assert threading.active_count() == 1


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
from cnnstrategies.paramserver.coordinator.settings import Address, CoordinatorSettings
from cnnstrategies.paramserver.core.view import RunEnded
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
