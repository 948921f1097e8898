"""Any message may be lost, and nobody waits for ever: what is not answered is asked for again."""

import random
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from roles import Roles, roles

from cnnstrategies.paramserver import client, collectives, coordinator_settings, supervision
from cnnstrategies.paramserver.client import Worker
from cnnstrategies.paramserver.collectives import Collectives
from cnnstrategies.paramserver.control import Message, parse
from cnnstrategies.paramserver.coordinator import Coordinator
from cnnstrategies.paramserver.coordinator_handlers import CoordinatorHandlers
from cnnstrategies.paramserver.coordinator_settings import CoordinatorSettings
from cnnstrategies.paramserver.errors import ServersUnreachableError
from cnnstrategies.paramserver.membership import Address, Membership
from cnnstrategies.paramserver.messages import SERVER, Header, Kind
from cnnstrategies.paramserver.supervision import Supervision


@pytest.fixture
def quick_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "PROBE_SECONDS", 0.05)


class LossyCoordinator:
    """A coordinator in a thread, of whose messages some are lost, in both directions.

    Args:
        directory: For its socket.
        loses: Whether a message of a kind is lost.
        settings: Of the coordinator.
    """

    def __init__(self, directory: Path, loses: Callable[[str], bool], workers: int = 2, **settings: Any) -> None:
        endpoint = f"ipc://{directory}/coordinator"
        self._coordinator = Coordinator(CoordinatorSettings(endpoint, workers, 0, 5.0, **settings))
        self.address = Address(endpoint, "worker", 0, 0, 0.05, 5.0)
        handle, send = self._coordinator.handle, self._coordinator._handlers._send

        def lossy_handle(parts: Any) -> None:
            if not loses(parse(parts, routed=True).kind):
                handle(parts)

        def lossy_send(message: Message) -> None:
            if not loses(message.kind):
                send(message)

        self._coordinator.handle = lossy_handle  # type: ignore[method-assign]
        handlers = self._coordinator._handlers
        for owner in (handlers, handlers._roster, handlers._rounds, handlers._values):
            owner._send = lossy_send
        self._stopping = False
        self._thread = threading.Thread(target=self._coordinator.run, args=(lambda: self._stopping,), daemon=True)
        self._thread.start()

    def worker(self, number: int) -> Membership:
        return Membership(Address(self.address.coordinator, "worker", number, 0, 0.05, 5.0))

    def __enter__(self) -> "LossyCoordinator":
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self._thread.join(10)
        self._coordinator.close()


def together(functions: list[Callable[[], Any]], seconds: float = 20) -> list[Any]:
    """What some functions return that run at the same time; fails if one does not."""
    results: dict[int, Any] = {}

    def run(number: int) -> None:
        try:
            results[number] = functions[number]()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert len(results) == len(functions), f"only {sorted(results)} of {len(functions)} have ended within {seconds} s"
    return [results[number] for number in range(len(functions))]


def work(membership: Membership) -> Any:
    """Everything that a worker asks of the coordinator."""
    run = Collectives(membership)
    me = membership.address.id
    if me == 0:
        run.put("name", [b"value"])
    found: list[Any] = [bytes(run.get("name")[0])]
    found += [run.gather(me).values for _ in range(3)]
    run.start()
    found += [run.gather([me, number]).values for number in range(5)]
    found.append(run.boundary("state").values)
    run.begin_epoch(0, 20, 2)
    chunks, processed = [], 0
    while chunk := run.take(0, processed):
        chunks.append((chunk.start, chunk.stop))
        processed += len(chunk)
    run.barrier("end")
    run.close()
    membership.close()
    return found, chunks


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.usefixtures("quick_probes")
def test_collectives_bring_the_same_when_a_third_of_all_messages_is_lost(seed: int, tmp_path: Path) -> None:
    chance, lock = random.Random(seed), threading.Lock()

    def loses(kind: str) -> bool:
        with lock:
            return chance.random() < 0.33

    with LossyCoordinator(tmp_path, loses) as lossy:
        members = [lossy.worker(number) for number in range(2)]
        (first, mine), (second, yours) = together([lambda m=m: work(m) for m in members])  # type: ignore[misc]
    assert first == second
    assert first == [
        b"value",
        *[{0: 0, 1: 1}] * 3,
        *[{0: [0, n], 1: [1, n]} for n in range(5)],
        {0: "state", 1: "state"},
    ]
    assert sorted(mine + yours) == [(start, start + 2) for start in range(0, 20, 2)]


KINDS = ("collect", "result", "put", "kept", "get", "value", "epoch", "take", "chunk", "leave", "left")


@pytest.mark.usefixtures("quick_probes")
def test_the_first_of_each_kind_is_lost(tmp_path: Path) -> None:
    """One that is sent only once, or in one case only, is not left to chance."""
    left = dict.fromkeys(KINDS, 2)

    def loses(kind: str) -> bool:
        left[kind] = left.get(kind, 0) - 1
        return left[kind] >= 0

    with LossyCoordinator(tmp_path, loses) as lossy:
        members = [lossy.worker(number) for number in range(2)]
        begun = time.monotonic()
        (first, _), (second, _) = together([lambda m=m: work(m) for m in members])  # type: ignore[misc]
    assert first == second
    assert time.monotonic() - begun < 5, "nobody was taken for dead"
    assert all(count < 0 for count in left.values()), left


@pytest.mark.usefixtures("quick_probes")
def test_a_coordinator_that_hears_heartbeats_and_no_requests_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LossyCoordinator(tmp_path, lambda kind: kind == "collect", workers=1) as lossy:
        membership = Membership(Address(lossy.address.coordinator, "worker", 0, 0, 0.05, 0.5))
        run = Collectives(membership)
        with pytest.raises(RuntimeError, match=r"worker 0: the coordinator at ipc:.* has not answered `end` for"):
            run.barrier("end")
        run.close()
        membership.close()


@pytest.mark.usefixtures("quick_probes")
def test_who_waits_is_told_for_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(collectives, "WARN_SECONDS", 0.3)

    def late(membership: Membership, seconds: float) -> None:
        run = Collectives(membership)
        time.sleep(seconds)
        run.barrier("second")
        run.close()

    with LossyCoordinator(tmp_path, lambda kind: False) as lossy:
        members = [lossy.worker(number) for number in range(2)]
        together([lambda: late(members[0], 0.0), lambda: late(members[1], 0.6)])
        for member in members:
            member.close()
    assert "worker 0 has waited in `second` for worker 1 for 0 s" in capfd.readouterr().err


# Between workers and servers


class Wire:
    """Loses messages of workers that servers would act on, and all kinds that workers would.

    Args:
        run: The roles.
        loses: Whether a message of a kind is lost.
    """

    def __init__(self, run: Roles, loses: Callable[[Kind], bool]) -> None:
        self._loses = loses
        for server in run.servers.values():
            server._handlers.handle = self._lossy(server._handlers.handle)  # type: ignore[method-assign]

    def to(self, worker: Worker) -> None:
        worker._handle = self._lossy(worker._handle, at_worker=True)  # type: ignore[method-assign]

    def _lossy(self, handle: Callable[..., None], at_worker: bool = False) -> Callable[..., None]:
        def act(peer: int, header: Header, payload: memoryview) -> None:
            between_servers = header.sender >= SERVER and not at_worker
            if between_servers or not self._loses(header.kind):
                handle(peer, header, payload)

        return act


MODES: dict[str, dict[str, Any]] = {
    "sync": {}, "clipped": {"clip_norm": 100.0}, "async": {"mode": "async"}, "ssp": {"mode": "ssp", "staleness": 1},
}  # fmt: skip


def train(run: Roles, worker: Worker, steps: int) -> None:
    worker.join()
    for _ in range(steps):
        run.step(worker)


@pytest.mark.parametrize("mode", MODES)
def test_training_is_the_same_when_messages_are_lost(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any between a worker and a server: a fifth of them, and the first two of each kind."""
    monkeypatch.setattr(client, "PROBE_SECONDS", 0.02)
    chance, left, lock = random.Random(0), dict.fromkeys(Kind, 2), threading.Lock()

    def loses(kind: Kind) -> bool:
        with lock:
            left[kind] -= 1
            return left[kind] >= 0 or chance.random() < 0.2

    with roles(tmp_path, (40, 30, 20), servers=2, timeout=10.0, slice_bytes=64, **MODES[mode]) as run:
        wire = Wire(run, loses)
        worker, values = run.worker()
        wire.to(worker)
        worker.initialise()
        train(run, worker, 6)
        state = worker.optimizer_state()
        worker.leave()
        (clock,) = {server._mode.clock.counts(0) for server in run.servers.values()}
    expected, momentum = 0.0, 0.0
    for _ in range(6):
        momentum = 0.5 * momentum + 1
        expected -= 0.5 * momentum
    for value in values:
        torch.testing.assert_close(value, torch.full_like(value, expected))
    for index, entry in state["state"].items():
        torch.testing.assert_close(entry["momentum_buffer"], torch.full_like(values[index], momentum))
    assert clock is False, "every server knows that it has left"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_server_that_learns_of_a_failover_after_the_worker(mode: str, tmp_path: Path) -> None:
    with roles(tmp_path, (40, 30), servers=2, replication=2, mode=mode, timeout=5.0) as run:
        worker, values = run.worker()
        worker.initialise()
        train(run, worker, 2)
        run.kill(0)
        after = replace(run.view, number=2, servers=run.view.servers[1:], lost=(0,))
        run.show("worker-0", after)
        late = threading.Timer(0.5, lambda: run.show("server-1", after))
        late.start()
        begun = time.monotonic()
        run.step(worker)
        assert 0.4 < time.monotonic() - begun < 3
        late.join()
    for value in values:
        torch.testing.assert_close(value, torch.full_like(value, -0.5 * (1 + 1.5 + 1.75)))


def test_servers_that_do_not_reach_each_other_are_named(tmp_path: Path) -> None:
    hole = socket.socket(socket.AF_UNIX)
    hole.bind(str(tmp_path / "hole"))
    hole.listen()
    with roles(tmp_path, servers=2, replication=2, mode="async", timeout=0.6) as run:
        there, elsewhere = run.view.servers
        deaf = replace(run.view, number=2, servers=(there, replace(elsewhere, endpoint=f"ipc://{tmp_path}/hole")))
        run.show("server-0", deaf)
        run.show("server-1", replace(run.view, number=2))
        worker, _ = run.worker(view=replace(run.view, number=2))
        worker.initialise()
        with pytest.raises(ServersUnreachableError, match=r"server 1 has heard nothing from server 0 for 1\.2 s"):
            train(run, worker, 3)


def test_who_sends_for_long_is_not_taken_for_one_that_hears_nothing(tmp_path: Path) -> None:
    """As on a slow link that is full of gradients: what a server answers last of all it has not read yet."""
    with roles(tmp_path, timeout=0.6) as run:
        worker, _ = run.worker()
        worker.initialise()
        worker.join()
        handle = worker._links.send
        worker._links.send = lambda server, kind, *a, **k: 0 if kind == Kind.HELLO else handle(server, kind, *a, **k)  # type: ignore
        ends = time.monotonic() + 1.5

        def waiting() -> bool:
            return time.monotonic() < ends

        worker._wait_while(waiting, lambda: handle(0, Kind.VALUE))  # Which no server answers.


# What the coordinator is told of deaths


class Told:
    """A coordinator's handlers without sockets: messages go in, and are kept when they come out."""

    def __init__(self, **settings: Any) -> None:
        self.sent: list[Message] = []
        self.handlers = CoordinatorHandlers(
            CoordinatorSettings("ipc://", 2, 0, supervisor="secret", **settings), self.sent.append
        )
        for worker in range(2):
            who = {"role": "worker", "id": worker, "incarnation": 0}
            self.tell("hello", **who, process=1, host="here", endpoint="", public_key="")
            self.tell("collect", **who, sequence=0, operation="start", seal=True)

    def tell(self, kind: str, **fields: Any) -> None:
        by = ["supervision", 0] if kind in ("died",) else ["worker", fields["id"]]
        said = {"session": 0, "by": by, "token": "secret", **fields}
        self.handlers.handle(Message(kind, said, (), b"%d" % fields.get("id", 9)))

    def until_it_ends(self, seconds: float) -> str:
        """Worker 1 lives, and worker 0 says nothing; why the run ends."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.tell("beat", role="worker", id=1, incarnation=0, here=1, seen=1)
            self.handlers.look_for_the_silent()
            for message in self.sent:
                if message.kind == "ended":
                    return message.string("message")
            time.sleep(0.01)
        return "it goes on"


def test_the_silence_of_rank_0_ends_a_run_although_nobody_says_what_becomes_of_it() -> None:
    run = Told(timeout=0.2, supervised=True)
    begun = time.monotonic()
    assert "worker 0 (process 1 on here), which writes checkpoints and logs, was silent" in run.until_it_ends(3)
    assert time.monotonic() - begun < 1


def test_one_that_is_to_be_started_again_and_never_comes_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_settings, "RESTART_SECONDS", 0.3)
    run = Told(timeout=5.0, supervised=True)
    died = {"role": "worker", "id": 0, "incarnation": 0, "process": 1, "how": "was killed by SIGKILL"}
    run.tell("died", **died, replaced=True)
    assert run.until_it_ends(0.1) == "it goes on"
    assert "was killed by SIGKILL, and the one in its place did not appear within 0.3 s" in run.until_it_ends(3)


@pytest.mark.parametrize("lost", ["died", "heard"])
def test_a_death_is_told_until_it_is_heard(lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "ASK_EVERY", 0.1)
    left = {lost: 2}

    def loses(kind: str) -> bool:
        left[kind] = left.get(kind, 0) - 1
        return left[kind] >= 0

    with LossyCoordinator(tmp_path, loses, workers=1) as lossy:
        membership = lossy.worker(0)
        Collectives(membership).start()
        watch = Supervision(replace(lossy.address, role="supervision"))
        fields = {"role": "worker", "id": 0, "incarnation": 0, "process": 1, "how": "was killed", "replaced": False}
        watch._tell("died", fields)
        deadline = time.monotonic() + 10
        while left[lost] >= 0 and time.monotonic() < deadline:
            watch.look()
        status = watch._send("status", answer="status")
        assert status is not None
        assert "was killed: with max_restarts it would return" in status.fields["ended"]["message"]
        membership.close()
