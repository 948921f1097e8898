"""The coordinator and its members over real sockets, with their threads and processes."""

import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from cnnstrategies.codec import encode
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver import membership
from cnnstrategies.paramserver.collectives import Collectives
from cnnstrategies.paramserver.coordinator.contributions import pack
from cnnstrategies.paramserver.coordinator.settings import Address, CoordinatorSettings
from cnnstrategies.paramserver.core.node import Message
from cnnstrategies.paramserver.core.view import RunEnded
from cnnstrategies.paramserver.drivers.coordinator import CoordinatorService
from cnnstrategies.paramserver.drivers.sockets import allow_threads
from cnnstrategies.paramserver.membership import Membership
from cnnstrategies.paramserver.security import KeyPair
from cnnstrategies.paramserver.services import CoordinatorProcess, Handle, ServerProcess, start
from tests.paramserver.roles import PlainRoles, until
from tests.runner.ports import free_port

TIMEOUT = 60.0  # Seconds; a process of a busy machine is not silent for this long.


@contextmanager
def serving(endpoint: str, workers: int, session: int = 0) -> Iterator[threading.Event]:
    """Run a coordinator in a thread; give an event that is set as soon as the coordinator listens."""
    over, listens = threading.Event(), threading.Event()

    def serve() -> None:
        with CoordinatorService(CoordinatorSettings(endpoint, workers, 0, TIMEOUT, session=session)) as service:
            listens.set()
            service.run(over.is_set)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listens
    finally:
        over.set()
        thread.join()


@contextmanager
def processes(directory: Path, early: int = 0) -> Iterator[tuple[Membership, Handle, Handle]]:
    """Give a worker, and the processes of a coordinator and a server.

    Args:
        directory: Directory for sockets.
        early: Signal that is sent to the server as soon as its process exists; 0 for none.
    """
    endpoint = f"ipc://{directory}/coordinator"
    place = Address(endpoint, "server", 0, 0, 0.5, TIMEOUT)
    server = start(ServerProcess(place, f"ipc://{directory}/server", starter=os.getpid()), "fork")
    server.send_signal(early)  # Without a coordinator, the server cannot have ended its start before the signal.
    coordinator = start(CoordinatorProcess(CoordinatorSettings(endpoint, 1, 1, TIMEOUT)), "fork")
    member = worker(endpoint, 0)
    try:
        until(lambda: member.members[1] == 1)  # The server is a member.
        yield member, coordinator, server
    finally:
        for handle in (server, coordinator):
            handle.send_signal(signal.SIGKILL)
        member.close(leave=False)


def worker(endpoint: str, number: int, session: int = 0) -> Membership:
    return Membership(Address(endpoint, "worker", number, 0, 0.05, TIMEOUT, session=session))


def in_parallel(members: list[Membership], function: Callable[[Collectives], Any]) -> list[Any]:
    """Call a function for all workers at the same time, let the workers leave, and return the results."""

    def work(member: Membership) -> Any:
        result = function(Collectives(member))
        member.close()
        return result

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(work, members, timeout=60))


def every_collective(collectives: Collectives) -> dict[str, Any]:
    rank = collectives.membership.address.id
    collectives.barrier()
    results: dict[str, Any] = {
        "gather": collectives.gather({"rank": rank}).values,
        "broadcast": collectives.broadcast([rank, None, "text"], source=1),
    }
    tensor = torch.tensor([rank + 1.0, 2.0])
    for how in ("sum", "mean", "max", "min", "product"):
        results[how] = collectives.reduce(tensor, how).tolist()
    results["integer"] = collectives.reduce(torch.tensor(rank), "sum").item()
    large = torch.arange(2000.0) * (rank + 1)
    results["large"] = [collectives.reduce(large, how)[-1].item() for how in ("sum", "mean", "max")]
    results["start"] = collectives.start().joined
    results["view"] = [worker.id for worker in collectives.membership.views.current().workers]
    collectives.barrier()  # No worker leaves before the other workers have read the view.
    return results


def test_collectives_give_every_worker_the_same_results(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/coordinator"
    with serving(endpoint, 3):
        results = in_parallel([worker(endpoint, rank) for rank in range(3)], every_collective)
    expected = {
        "gather": {rank: {"rank": rank} for rank in range(3)},
        "broadcast": [1, None, "text"],
        "sum": [6.0, 6.0],
        "mean": [2.0, 2.0],
        "max": [3.0, 2.0],
        "min": [1.0, 2.0],
        "product": [6.0, 8.0],
        "integer": 3,
        "large": [6 * 1999.0, 2 * 1999.0, 3 * 1999.0],
        "start": False,
        "view": [0, 1, 2],
    }
    assert results == [expected] * 3


class Replies:
    """A membership that returns prepared replies.

    Attributes:
        requests: The requests that were made.
    """

    def __init__(self, rank: int, *replies: dict[int, Any]) -> None:
        self.address = SimpleNamespace(id=rank)
        self.requests: list[dict[str, Any]] = []
        self._replies = iter(replies)

    def wait_registered(self) -> None:
        """Return at once."""

    def ask(self, kind: str, fields: dict[str, Any], frames: Any) -> Message:
        """Record a request and return the next reply."""
        self.requests.append(fields)
        values = {number: [] if value is None else encode(value) for number, value in next(self._replies).items()}
        return Message("done", {"admitted": []}, pack(values))


def test_a_reduction_of_a_large_tensor_is_repeated_if_the_worker_that_reduces_dies() -> None:
    tensors = {rank: torch.full((1000,), float(rank)) for rank in range(3)}
    waits = Replies(
        2, {0: None, 1: None, 2: None}, {1: "none", 2: "none"}, {1: None, 2: None}, {1: tensors[1] * 3, 2: 0}
    )
    assert Collectives(cast(Any, waits)).reduce(tensors[2], "sum").tolist() == [3.0] * 1000
    leads = Replies(
        1,
        {0: None, 1: None, 2: None},
        {1: "none", 2: "none"},
        {1: tensors[1], 2: tensors[2]},
        {1: tensors[1] * 3, 2: 0},
    )
    assert Collectives(cast(Any, leads)).reduce(tensors[1], "sum").tolist() == [3.0] * 1000
    assert [request.get("leader_only", False) for request in leads.requests] == [True, False] * 2


def test_a_worker_of_a_later_session_waits_until_its_coordinator_listens() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with serving(endpoint, 2) as listens:
        listens.wait()  # Otherwise the second coordinator might come first, and the first would wait for its end.
        with serving(endpoint, 2, session=1) as second:
            ahead = worker(endpoint, 1, session=1)
            members = [worker(endpoint, rank) for rank in range(2)]
            often = in_parallel(members, lambda collectives: [list(collectives.gather(0).values) for _ in range(50)])
            assert often == [[[0, 1]] * 50] * 2
            both = in_parallel(
                [worker(endpoint, 0, session=1), ahead], lambda collectives: collectives.gather(1).values
            )
            assert both == [{0: 1, 1: 1}] * 2
            assert second.is_set()


def test_services_start_without_lightning_and_outlive_signals(tmp_path: Path) -> None:
    """Send signals that reach every process of a job: workers need the services until they have ended their step."""
    settings = CoordinatorSettings(f"ipc://{tmp_path}/coordinator", 1, 0)
    coordinator = start(CoordinatorProcess(settings), "program")
    until((tmp_path / "coordinator").exists)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        coordinator.send_signal(signum)
    time.sleep(0.2)
    assert coordinator.poll() is None
    loaded = Path(f"/proc/{coordinator.pid}/maps").read_text()
    coordinator.send_signal(signal.SIGKILL)
    coordinator.wait()
    # Imports of torch would take longer than everything else that the coordinator does at its start.
    assert "/zmq/" in loaded
    assert "/torch/" not in loaded
    assert "/torchvision/" not in loaded  # Lightning imports torchvision.


@pytest.mark.parametrize("early", [False, True], ids=["while it serves", "while it starts"])
def test_a_termination_signal_to_a_server_stops_the_run(early: bool, tmp_path: Path) -> None:
    """Send the signal to the server only; the server goes on, because the workers need it until they have stopped."""
    with processes(tmp_path, signal.SIGTERM if early else 0) as (member, _, server):
        if not early:
            server.send_signal(signal.SIGTERM)
        until(lambda: member.stop_signal == signal.SIGTERM)
        assert server.poll() is None


def test_a_server_that_does_not_hear_its_coordinator_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The supervision, and the workers after it, name only the server's exit code."""
    place = Address(f"ipc://{tmp_path}/nobody", "server", 0, heartbeat=0.1, timeout=1.0, appear=0.2)
    server = start(ServerProcess(place, f"ipc://{tmp_path}/server", starter=os.getpid()), "fork")
    until(lambda: server.poll() is not None)
    assert server.poll() == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"server 0 ends: the coordinator at {place.coordinator} was silent for 0.2 s: start the run")


def test_a_long_wait_in_a_collective_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(membership, "WARN_SECONDS", 0.1)
    endpoint = f"ipc://{tmp_path}/coordinator"
    output: list[str] = []

    def is_told() -> bool:
        output.append(capfd.readouterr().err)
        return "worker 0 has waited in `second` for " in "".join(output)

    def meet(collectives: Collectives) -> None:
        if collectives.membership.address.id == 1:
            until(is_told)
        collectives.barrier("second")

    with serving(endpoint, 2):
        in_parallel([worker(endpoint, rank) for rank in range(2)], meet)


# Limits of the system


def test_the_limit_of_open_files_is_raised_or_the_start_is_refused(tmp_path: Path) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, 1000))
    settings = CoordinatorSettings(f"ipc://{tmp_path}/c", 100, 10)
    CoordinatorService(settings).close()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1000, 1000)
    with pytest.raises(ConfigurationError, match=r"the coordinator needs 1276 open files.*the hard limit is 1000"):
        CoordinatorService(CoordinatorSettings(f"ipc://{tmp_path}/c", 500, 10))
    with pytest.raises(ConfigurationError, match="server 0 needs 1260 open files"):
        PlainRoles(tmp_path, workers=500)


def test_strangers_do_not_block_members_and_a_wrong_key_is_named(tmp_path: Path) -> None:
    port, key = free_port(), tmp_path / "key"
    endpoint = f"tcp://127.0.0.1:{port}"
    KeyPair.create().save(key)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, 3000))
    coordinator = start(CoordinatorProcess(CoordinatorSettings(endpoint, 1, 0), str(key)), "fork")
    resource.setrlimit(resource.RLIMIT_NOFILE, (3000, 3000))
    strangers = [socket.socket() for _ in range(1000)]
    until(lambda: strangers[0].connect_ex(("127.0.0.1", port)) == 0)
    for stranger in strangers[1:]:
        stranger.setblocking(False)
        stranger.connect_ex(("127.0.0.1", port))
    member = Membership(Address(endpoint, "worker", 0, appear=20.0), keys=KeyPair.load(key))
    member.wait_registered()
    member.close()
    member = Membership(Address(endpoint, "worker", 0, appear=1.0), keys=KeyPair.create())
    with pytest.raises(RunEnded, match=r"was silent for 1 s: .* give all processes the same key_file"):
        member.wait_registered()
    member.close()
    coordinator.send_signal(signal.SIGKILL)


def test_a_start_is_refused_if_the_system_does_not_allow_its_threads() -> None:
    allow_threads(4)
    if os.getuid() == 0:
        os.setuid(65534)  # Limits do not apply to root.
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    with pytest.raises(
        ConfigurationError, match=r"4 processes .* need about 32 threads.* raise the limit \(`ulimit -u`"
    ):
        allow_threads(4)
    assert threading.active_count() == 1
