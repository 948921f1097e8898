"""A mistake in this package's own code does not count as a bad message: it ends its process, and the others name it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

from cnnstrategies.paramserver.collectives import Collectives
from cnnstrategies.paramserver.coordinator.coordinator import Coordinator
from cnnstrategies.paramserver.coordinator.dispatch import Dispatcher
from cnnstrategies.paramserver.coordinator.participant import Participant
from cnnstrategies.paramserver.coordinator.settings import CoordinatorSettings
from cnnstrategies.paramserver.core.node import Message, Peer
from cnnstrategies.paramserver.core.view import RunEnded
from cnnstrategies.paramserver.drivers.control import Loop
from cnnstrategies.paramserver.drivers.server import ServerService
from cnnstrategies.paramserver.membership import Membership
from cnnstrategies.paramserver.server.pushes import Backlog
from cnnstrategies.paramserver.services import Handle
from cnnstrategies.paramserver.specification import Specification
from tests.paramserver.data_world import fresh
from tests.paramserver.roles import until
from tests.paramserver.test_control_sockets import TIMEOUT, processes
from tests.paramserver.training import SGD, specify
from tests.runner import patience

MISTAKES = [KeyError, TypeError, AssertionError, AttributeError, ValueError]
SOON = 30.0  # Seconds after a process's failure, less than the TIMEOUT after which a silent process is missed.


def slip(mistake: type[Exception]) -> Callable[..., NoReturn]:
    def fail(*args: Any, **more: Any) -> NoReturn:
        raise mistake("a slip of ours")

    return fail


@pytest.mark.light
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_roles_own_mistake_is_not_taken_for_a_bad_message(
    mistake: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check mistakes of a server, and of the coordinator in a message and in a request, which it might refuse."""
    sent: list[Message] = []
    loop = Loop(Coordinator(CoordinatorSettings("here", 1, 0)), lambda peer, message: sent.append(message))
    loop.start()
    peer, about = Peer("worker", 0, 0, 7), {"process": 1, "host": "here", "endpoint": "", "public_key": ""}
    hello = Message("hello", {"session": 0, **about}, request=1)
    with monkeypatch.context() as patch:
        patch.setattr(Coordinator, "on_message", slip(mistake))
        with pytest.raises(mistake, match="a slip of ours"):
            loop.message(peer, hello)
    loop.message(peer, hello)
    monkeypatch.setattr(Dispatcher, "take", slip(mistake))
    sent.clear()
    take = {"session": 0, "floor": 0, "epoch": 0, "processed": 0, "ordinal": 0}
    with pytest.raises(mistake, match="a slip of ours"):
        loop.message(peer, Message("take", take, request=2))
    assert sent == []
    servers = fresh(specify(SGD, 1))
    monkeypatch.setattr(Backlog, "complete", slip(mistake))
    with pytest.raises(mistake, match="a slip of ours"):
        servers.push(0)


class OfThisFile(torch.optim.SGD):
    """An optimizer whose name a server cannot import."""


def publish_specification(member: Membership, kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> None:
    """Publish a worker's specification of the training."""
    parameter = nn.Parameter(torch.zeros(40))
    optimizer = kind([parameter], lr=0.5)  # type: ignore[call-arg]
    specification = Specification.of([("0", parameter)], optimizer, 1, timeout=TIMEOUT)
    Collectives(member).put(specification.to_json())


def reason_of_the_end(member: Membership, failed: Handle) -> str:
    """Wait until a process has failed, and return the reason with which the run then ends at once for a worker."""
    until(lambda: failed.poll() is not None)
    assert failed.poll() == 1
    with pytest.raises(RunEnded) as ended:
        member.views.wait_newer(1 << 60, patience.at_most(SOON))
    return str(ended.value)


def test_a_failing_server_shows_its_traceback_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ServerService, "run", slip(KeyError))  # The forked server inherits the patch.
    with processes(tmp_path) as (member, _, server):
        publish_specification(member)
        assert reason_of_the_end(member, server) == "server 0 failed: KeyError: 'a slip of ours'"
    errors = capfd.readouterr().err
    assert "Traceback" in errors
    assert "KeyError: 'a slip of ours'" in errors


def test_a_server_without_the_optimizers_class_ends_and_names_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Check without a supervision: ranks that another program has started have none."""
    OfThisFile.__module__ = "a_script"
    with processes(tmp_path) as (member, _, server):
        publish_specification(member, OfThisFile)
        reason = reason_of_the_end(member, server)
    for text in (reason, capfd.readouterr().err):
        assert "optimizer a_script.OfThisFile: the server cannot import this class; define it at the top level" in text


def test_a_failing_coordinator_shows_its_traceback_and_tells_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    now, right = tmp_path / "now", Coordinator.on_message
    monkeypatch.setattr(Coordinator, "on_message", lambda *args: slip(TypeError)() if now.exists() else right(*args))
    with processes(tmp_path) as (member, coordinator, server):
        now.touch()
        assert reason_of_the_end(member, coordinator) == "the coordinator failed: TypeError: a slip of ours"
        until(lambda: server.poll() is not None)
        assert server.poll() == 1
    errors = capfd.readouterr().err
    assert "Traceback" in errors
    assert "TypeError: a slip of ours" in errors


def test_a_member_whose_heartbeats_fail_hears_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with processes(tmp_path) as (member, _, _):
        monkeypatch.setattr(Participant, "on_timer", slip(AttributeError))  # Only in this process.
        with pytest.raises(RunEnded, match="worker 0: the heartbeat thread failed: AttributeError: a slip of ours"):
            member.views.wait_newer(1 << 60, TIMEOUT / 4)
    assert "Traceback" in capfd.readouterr().err
