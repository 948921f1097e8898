"""What the system lets a process have: enough for its connections, or the start is refused."""

import os
import resource
import signal
import socket
import threading
import time

import pytest
from ports import free_port
from roles import PlainRoles

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.coordinator.settings import Address, CoordinatorSettings
from cnnstrategies.paramserver.core.view import RunEnded
from cnnstrategies.paramserver.drivers.coordinator import CoordinatorService
from cnnstrategies.paramserver.drivers.sockets import (
    allow_threads,
    files_of_coordinator,
    files_of_server,
)
from cnnstrategies.paramserver.membership import Membership
from cnnstrategies.paramserver.security import KeyPair
from cnnstrategies.paramserver.services import CoordinatorProcess, start


def test_the_limit_of_files_is_raised_or_the_start_refused(tmp_path):
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, 1000))
    settings = CoordinatorSettings(f"ipc://{tmp_path}/c", 100, 10)
    CoordinatorService(settings).close()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1000, 1000)
    needed = files_of_coordinator(500, 10)
    with pytest.raises(ConfigurationError, match=f"the coordinator needs {needed} open files.*may have 1000"):
        CoordinatorService(CoordinatorSettings(f"ipc://{tmp_path}/c", 500, 10))
    with pytest.raises(ConfigurationError, match=f"server 0 needs {files_of_server(500, 1)} open files"):
        PlainRoles(tmp_path, workers=500)


def test_silent_strangers_keep_no_member_out(tmp_path):
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
