"""The coordinator and its members over sockets: what threads, sockets and programs add to the roles."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from ports import free_port
from roles import until

from cnnstrategies.paramserver import membership
from cnnstrategies.paramserver.collectives import Collectives
from cnnstrategies.paramserver.coordinator.settings import Address, CoordinatorSettings
from cnnstrategies.paramserver.drivers.control import TAG
from cnnstrategies.paramserver.drivers.coordinator import CoordinatorService
from cnnstrategies.paramserver.membership import STOP, Membership
from cnnstrategies.paramserver.services import CoordinatorProcess, ServerProcess, start

TIMEOUT = 60.0  # Nobody is silent for so long on a busy machine.


@contextmanager
def serving(endpoint: str, workers: int, session: int = 0, servers: int = 0) -> Iterator[threading.Event]:
    """A coordinator in a thread; gives what is set as soon as it listens."""
    over, listens = threading.Event(), threading.Event()

    def serve() -> None:
        settings = CoordinatorSettings(endpoint, workers, servers, TIMEOUT, session=session)
        with CoordinatorService(settings) as service:
            listens.set()
            service.run(over.is_set)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listens
    finally:
        over.set()
        thread.join()


def worker(endpoint: str, number: int, session: int = 0) -> Membership:
    return Membership(Address(endpoint, "worker", number, 0, 0.05, TIMEOUT, session=session))


def together(members: list[Membership], function: Callable[[Collectives], Any]) -> list[Any]:
    """What all workers have of something that they do at the same time; then they leave."""

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
    results["start"] = collectives.start().joined
    results["view"] = [one.id for one in collectives.membership.views.current().workers]
    collectives.barrier()  # Nobody leaves before the others have looked.
    return results


def test_collectives_give_every_worker_the_same(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/coordinator"
    with serving(endpoint, 3):
        results = together([worker(endpoint, rank) for rank in range(3)], every_collective)
    expected = {
        "gather": {rank: {"rank": rank} for rank in range(3)},
        "broadcast": [1, None, "text"],
        "sum": [6.0, 6.0],
        "mean": [2.0, 2.0],
        "max": [3.0, 2.0],
        "min": [1.0, 2.0],
        "product": [6.0, 8.0],
        "integer": 3,
        "start": False,
        "view": [0, 1, 2],
    }
    assert results == [expected] * 3


def test_nonsense_neither_stops_the_coordinator_nor_registers(tmp_path: Path) -> None:
    """See `test_coordinator_fuzz.py` for what messages may hold; here is what no message is."""
    endpoint, chance = f"ipc://{tmp_path}/coordinator", random.Random(0)
    with serving(endpoint, 1) as listens, zmq.Context() as context:
        listens.wait()
        socket = context.socket(zmq.DEALER)
        socket.connect(endpoint)
        for _ in range(500):
            start = chance.choice([b"", b"CNNPS2", TAG + b"\2\0\0\0", TAG, chance.randbytes(chance.randrange(40))])
            body = chance.choice([b"{}", b'{"session":0}', b"{", b"[]", chance.randbytes(chance.randrange(40))])
            socket.send_multipart(chance.choice([[start + body], [start, body]]))
        socket.close(500)
        (result,) = together([worker(endpoint, 0)], lambda collectives: collectives.gather(7).values)
    assert result == {0: 7}


def test_who_waits_is_told_for_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(membership, "WARN_SECONDS", 0.1)
    endpoint = f"ipc://{tmp_path}/coordinator"

    def meet(collectives: Collectives) -> None:
        said = ""
        while (
            collectives.membership.address.id == 1 and "worker 0 has waited in `second` for worker 1 for " not in said
        ):
            time.sleep(0.01)
            said += capfd.readouterr().err
        collectives.barrier("second")

    with serving(endpoint, 2):
        together([worker(endpoint, rank) for rank in range(2)], meet)


def test_a_worker_ahead_knocks_until_its_coordinator_is_there() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with serving(endpoint, 2) as listens:
        listens.wait()  # Else the other coordinator may come first, and this one waits for its end.
        with serving(endpoint, 2, session=1) as second:
            ahead = worker(endpoint, 1, session=1)
            members = [worker(endpoint, rank) for rank in range(2)]
            often = together(members, lambda collectives: [list(collectives.gather(0).values) for _ in range(50)])
            assert often == [[[0, 1]] * 50] * 2
            both = together([worker(endpoint, 0, session=1), ahead], lambda collectives: collectives.gather(1).values)
            assert both == [{0: 1, 1: 1}] * 2
            assert second.is_set()


def test_services_start_without_lightning_and_outlive_signals(tmp_path: Path) -> None:
    """These reach every process of a job; the workers stop after their step, and need the services until then."""
    settings = CoordinatorSettings(f"ipc://{tmp_path}/coordinator", 1, 0)
    coordinator = start(CoordinatorProcess(settings), "program")
    while not Path(tmp_path / "coordinator").exists():
        time.sleep(0.01)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        coordinator.send_signal(signum)
    time.sleep(0.2)
    assert coordinator.poll() is None
    loaded = Path(f"/proc/{coordinator.pid}/maps").read_text()
    coordinator.send_signal(signal.SIGKILL)
    coordinator.wait()
    # They would take more time than all the rest.
    assert "/zmq/" in loaded
    assert "/torch/" not in loaded
    assert "/torchvision/" not in loaded  # Lightning brings it along.


def test_a_server_that_is_told_to_end_has_the_run_stop(tmp_path: Path) -> None:
    """It may be the only process that hears it, and the others need it until they have stopped."""
    endpoint = f"ipc://{tmp_path}/coordinator"
    address = Address(endpoint, "server", 0, 0, 0.05, TIMEOUT)
    with serving(endpoint, 1, servers=1):
        member = worker(endpoint, 0)
        service = ServerProcess(address, f"ipc://{tmp_path}/server", starter=os.getpid())
        server = start(service, "fork")
        until = time.monotonic() + 10
        while Path(f"/proc/{server.pid}/comm").read_text() != "ps-server-0\n":
            time.sleep(0.01)
        while member.announced(STOP) is None and time.monotonic() < until:
            server.send_signal(signal.SIGTERM)  # It is ignored until the server can tell.
            time.sleep(0.05)
        assert member.announced(STOP) == signal.SIGTERM
        assert server.poll() is None
        server.send_signal(signal.SIGKILL)
        member.close()


def test_a_coordinator_that_is_told_to_end_has_the_run_stop(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/coordinator"
    coordinator = start(CoordinatorProcess(CoordinatorSettings(endpoint, 1, 0)), "fork")
    member = worker(endpoint, 0)
    member.wait_registered()
    coordinator.send_signal(signal.SIGTERM)
    until(lambda: member.announced(STOP) == signal.SIGTERM, timeout=5)
    assert coordinator.poll() is None
    member.close()
    coordinator.send_signal(signal.SIGKILL)
