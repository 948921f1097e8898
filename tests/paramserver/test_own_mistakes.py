"""A mistake in this package's own code is taken for no bad message: it ends its process, and the others name that."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from data_world import fresh
from roles import answered, until
from torch import nn
from training import SGD, specify

from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.coordinator.coordinator import Coordinator
from cnnstrategies.paramserver.coordinator.dispatch import Dispatcher
from cnnstrategies.paramserver.coordinator.participant import Participant
from cnnstrategies.paramserver.coordinator.settings import Address, CoordinatorSettings
from cnnstrategies.paramserver.core.node import Message, Peer
from cnnstrategies.paramserver.core.view import RunEnded
from cnnstrategies.paramserver.drivers.control import Loop
from cnnstrategies.paramserver.membership import Membership
from cnnstrategies.paramserver.server.pushes import Backlog
from cnnstrategies.paramserver.services import SPECIFICATION, CoordinatorProcess, Handle, ServerProcess, start
from cnnstrategies.paramserver.specification import Specification

MISTAKES = [KeyError, TypeError, AssertionError, AttributeError, ValueError]
TIMEOUT = 60.0  # Nobody is silent for so long: what ends sooner has been told.
SOON = 3.0  # seconds after the death of the process that has failed


def slip(mistake: type[Exception]) -> Callable[..., NoReturn]:
    def fail(*args: Any, **more: Any) -> NoReturn:
        raise mistake("a slip of ours")

    return fail


@pytest.mark.light
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_server_takes_no_mistake_of_its_own_for_a_bad_message(
    mistake: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = fresh(specify(SGD, 1))
    monkeypatch.setattr(Backlog, "complete", slip(mistake))
    with pytest.raises(mistake, match="a slip of ours"):
        run.push(0)


@pytest.mark.light
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_coordinators_own_mistake_is_no_bad_message(
    mistake: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither one in what any process says, nor one in a request, which it would only refuse."""
    sent: list[Message] = []
    loop = Loop(Coordinator(CoordinatorSettings("here", 1, 0)), lambda peer, message: sent.append(message))
    loop.start()
    peer, about = Peer("worker", 0, 0, 7), {"process": 1, "host": "here", "endpoint": "", "public_key": ""}
    with monkeypatch.context() as patch:
        patch.setattr(Coordinator, "on_message", slip(mistake))
        with pytest.raises(mistake, match="a slip of ours"):
            loop.message(peer, Message("hello", {"session": 0, **about}, request=1))
    loop.message(peer, Message("hello", {"session": 0, **about}, request=1))
    monkeypatch.setattr(Dispatcher, "take", slip(mistake))
    sent.clear()
    take = {"session": 0, "floor": 0, "epoch": 0, "processed": 0, "ordinal": 0}
    with pytest.raises(mistake, match="a slip of ours"):
        loop.message(peer, Message("take", take, request=2))
    assert sent == []


@contextmanager
def processes(directory: Path, specification: Specification) -> Iterator[tuple[Membership, Handle, Handle]]:
    """A worker that has told the run's specification; and the processes of a coordinator and a server."""
    endpoint = f"ipc://{directory}/coordinator"
    coordinator = start(CoordinatorProcess(CoordinatorSettings(endpoint, 1, 1, TIMEOUT)), "fork")
    place = Address(endpoint, "server", 0, 0, 0.5, TIMEOUT)
    server = start(ServerProcess(place, f"ipc://{directory}/server", starter=os.getpid()), "fork")
    member = Membership(Address(endpoint, "worker", 0, 0, 0.5, TIMEOUT))
    try:
        member.wait_registered()
        member.ask("put", {"name": SPECIFICATION}, [specification.to_json().encode()])
        yield member, coordinator, server
    finally:
        for one in (server, coordinator):
            one.send_signal(9)
        member.close(leave=False)


def plain(kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> Specification:
    parameter = nn.Parameter(torch.zeros(40))
    return Specification.of([("0", parameter)], kind([parameter], lr=0.5), 1, timeout=TIMEOUT)  # type: ignore[call-arg]


def ends(member: Membership, failed: Handle) -> str:
    """What a worker hears when a process has ended with an error: at once, and not when it counts as silent."""
    until(lambda: failed.poll() is not None)
    assert failed.poll() == 1
    with pytest.raises(RunEnded) as ended:
        member.views.wait_newer(1 << 60, SOON)
    return str(ended.value)


def test_a_failing_server_shows_its_traceback_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    specification = plain()
    monkeypatch.setattr(Backlog, "complete", slip(KeyError))  # Forked with it.
    with processes(tmp_path, specification) as (member, _, server):
        member.ask("collect", {"operation": "start", "seal": True, "boundary": False})
        values = [torch.zeros(40)]
        worker = Worker(specification, values, member.source(), 0, 0, None)
        worker.initialise()
        worker.join()
        worker.begin_step([dict(group.options) for group in specification.groups], 1)
        worker.push(0, torch.ones(40))
        worker.end_step()
        with pytest.raises(RunEnded, match=r"server 0 failed: KeyError: 'a slip of ours'"):
            answered(worker, TIMEOUT / 4)
        assert "server 0 failed" in ends(member, server)
        worker.close()
    said = capfd.readouterr().err
    assert "Traceback" in said
    assert "in on_message" in said
    assert "KeyError: 'a slip of ours'" in said


def test_a_failing_coordinator_shows_its_traceback_and_tells_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    now, right = tmp_path / "now", Coordinator.on_message
    monkeypatch.setattr(Coordinator, "on_message", lambda *args: slip(TypeError)() if now.exists() else right(*args))
    with processes(tmp_path, plain()) as (member, coordinator, server):
        now.touch()
        assert ends(member, coordinator) == "the coordinator failed: TypeError: a slip of ours"
        until(lambda: server.poll() is not None)
        assert server.poll() == 1
    said = capfd.readouterr().err
    assert "Traceback" in said
    assert "TypeError: a slip of ours" in said


def test_a_member_whose_heartbeats_fail_hears_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with processes(tmp_path, plain()) as (member, _, _):
        monkeypatch.setattr(Participant, "on_timer", slip(AttributeError))  # In this process alone.
        with pytest.raises(RunEnded, match="worker 0: the heartbeat thread failed: AttributeError: a slip of ours"):
            member.views.wait_newer(1 << 60, TIMEOUT / 4)
    assert "Traceback" in capfd.readouterr().err


class OfThisFile(torch.optim.SGD):
    """An optimizer that a server is told of by a name that it cannot import."""


def test_a_server_without_the_optimizers_class_ends_and_names_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whoever watches it: ranks that something else has started watch nobody."""
    OfThisFile.__module__ = "a_script"
    with processes(tmp_path, plain(OfThisFile)) as (member, _, server):
        told = ends(member, server)
    for text in (told, capfd.readouterr().err):
        assert "optimizer a_script.OfThisFile: the server cannot import it; define it in a module" in text
