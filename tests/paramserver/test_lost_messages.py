"""Any message may be lost, and nobody waits for ever: what is not answered is asked for again."""

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cnnstrategies.paramserver import membership
from cnnstrategies.paramserver.collectives import Collectives
from cnnstrategies.paramserver.control import parse
from cnnstrategies.paramserver.coordinator.coordinator import Coordinator
from cnnstrategies.paramserver.coordinator.participant import COORDINATOR, Participant
from cnnstrategies.paramserver.coordinator.settings import Address, CoordinatorSettings
from cnnstrategies.paramserver.core.node import Call, End, Message, Peer, Send
from cnnstrategies.paramserver.core.view import View
from cnnstrategies.paramserver.drivers.coordinator import CoordinatorService
from cnnstrategies.paramserver.membership import Membership

TIMEOUT = 60.0  # Nobody is silent for so long on a busy machine.


class LossyCoordinator:
    """A coordinator in a thread, of whose messages some are lost, in both directions.

    Args:
        directory: For its socket.
        loses: Whether a message of a kind is lost.
        settings: Of the coordinator.
    """

    def __init__(self, directory: Path, loses: Callable[[str], bool], workers: int = 2, **settings: Any) -> None:
        endpoint = f"ipc://{directory}/coordinator"
        self._service = CoordinatorService(CoordinatorSettings(endpoint, workers, 0, TIMEOUT, **settings))
        self.address = Address(endpoint, "worker", 0, 0, 0.05, TIMEOUT)
        handle, send = self._service.handle, self._service.send

        def lossy_handle(frames: Any, key: str = "") -> None:
            if not loses(parse(frames[1:])[1].kind):
                handle(frames, key)

        def lossy_send(peer: Peer, message: Message) -> None:
            if not loses(message.kind):
                send(peer, message)

        self._service.handle = lossy_handle  # type: ignore[method-assign]
        self._service.loop.send = lossy_send
        self._stopping = False
        self._thread = threading.Thread(target=self._service.run, args=(lambda: self._stopping,), daemon=True)
        self._thread.start()

    def worker(self, number: int) -> Membership:
        return Membership(Address(self.address.coordinator, "worker", number, 0, 0.05, TIMEOUT))

    def __enter__(self) -> "LossyCoordinator":
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self._thread.join()
        self._service.close()


def together(functions: list[Callable[[], Any]], seconds: float = 60) -> list[Any]:
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


def work(member: Membership) -> Any:
    """Everything that a worker asks of the coordinator."""
    run = Collectives(member)
    me = member.address.id
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
    member.close()
    return found, chunks


@pytest.mark.parametrize("seed", range(2))
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


KINDS = ("hello", "beat", "pong", "collect", "put", "get", "epoch", "take", "leave", "done", "probe", "unknown")


def test_the_first_of_each_kind_is_lost(tmp_path: Path) -> None:
    """One that is sent only once, or in one case only, is not left to chance."""
    left = dict.fromkeys(KINDS, 2)

    def loses(kind: str) -> bool:
        left[kind] = left.get(kind, 0) - 1
        return left[kind] >= 0

    with LossyCoordinator(tmp_path, loses) as lossy:
        members = [lossy.worker(number) for number in range(2)]
        (first, _), (second, _) = together([lambda m=m: work(m) for m in members])  # type: ignore[misc]
    assert first == second
    assert all(count < 0 for count in left.values()), left


def test_a_coordinator_that_hears_heartbeats_and_no_requests_is_named() -> None:
    role = Participant(Address("ipc://here", "worker", 0, 0, 0.5, 5.0), 1, {})
    role.start(0.0)
    role.on_message(0.0, COORDINATOR, Message("done", {"view": View(1, (), ()).as_dict()}, request=1))
    role.on_call(0.0, Call(7, "collect", {"operation": "end"}))
    for tick in range(1, 50):
        role.on_message(tick / 2, COORDINATOR, Message("pong", {"number": 1}))
        for effect in role.on_timer(tick / 2, "beat"):
            if isinstance(effect, End):
                assert tick / 2 > 15.0
                assert effect.reason == (
                    "worker 0: the coordinator at ipc://here has not answered `end` for 16 s, although it hears this "
                    "process's heartbeats"
                )
                return
    raise AssertionError("it waits for ever")


def test_who_waits_is_told_for_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(membership, "WARN_SECONDS", 0.1)
    told = threading.Event()

    def on_time(member: Membership) -> None:
        Collectives(member).barrier("second")

    def late(member: Membership) -> None:
        said = ""
        while "worker 0 has waited in `second` for worker 1 for " not in said:  # Else nobody ends within the time.
            time.sleep(0.01)
            said += capfd.readouterr().err
        told.set()
        Collectives(member).barrier("second")

    with LossyCoordinator(tmp_path, lambda kind: False) as lossy:
        members = [lossy.worker(number) for number in range(2)]
        together([lambda: on_time(members[0]), lambda: late(members[1])])
        for member in members:
            member.close()
    assert told.is_set()


def test_the_silence_of_rank_0_ends_a_run_although_nobody_says_what_becomes_of_it() -> None:
    """Its supervision may be gone with it: then the promise that it would be replaced is nobody's."""
    role = Coordinator(CoordinatorSettings("ipc://", 2, 0, timeout=2.0, supervised=True))
    role.start(0.0)
    workers = [Peer("worker", number, 0, 5) for number in range(2)]
    about = {"session": 0, "floor": 0, "process": 1, "host": "here", "endpoint": "", "public_key": ""}
    for peer in workers:
        role.on_message(0.0, peer, Message("hello", about, request=1))
    start = {"session": 0, "floor": 0, "sequence": 0, "operation": "start", "seal": True}
    for peer in workers:
        role.on_message(0.1, peer, Message("collect", start, request=2))
    beat = Message("beat", {"session": 0, "here": 1, "seen": 1, "notices": 0, "told": 0})
    for tick in range(2, 100):
        role.on_message(tick / 10, workers[1], beat)
        for effect in role.on_timer(tick / 10, "tick"):
            if isinstance(effect, Send) and effect.message.kind == "ended":
                assert "worker 0 (process 1 on here) was silent for 2 s, and nobody took" in effect.message.string(
                    "message"
                )
                assert tick / 10 < 5, "the time-out, and as long for a supervision"
                return
    raise AssertionError("it goes on")
