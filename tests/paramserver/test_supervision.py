"""What becomes of processes that end: the supervision of a node, without any process."""

import os
import signal
import time
from math import inf

import pytest

from cnnstrategies.paramserver import supervision
from cnnstrategies.paramserver.coordinator.settings import Address
from cnnstrategies.paramserver.core.node import Message
from cnnstrategies.paramserver.core.requests import DONE
from cnnstrategies.paramserver.supervision import COORDINATOR, Supervision, Watched


class Ended:
    """A process that has ended with an exit code; None while it runs."""

    pid = 1

    def __init__(self, code: int | None) -> None:
        self.code = code

    def poll(self) -> int | None:
        return self.code

    def send_signal(self, sig: int) -> None:
        assert self.code is not None, "the one that runs was not missed"


class Runs(Ended):
    """One that goes on, whatever signals it is sent."""

    def __init__(self) -> None:
        super().__init__(None)
        self.signals: list[int] = []

    def send_signal(self, sig: int) -> None:
        self.signals.append(sig)


class Dies(Runs):
    """One that a signal ends."""

    def send_signal(self, sig: int) -> None:
        self.code = -sig


class Node(Supervision):
    """A supervision whose coordinator misses whom the test says; None while it is not reached.

    Attributes:
        goes_on: How often the coordinator still says that its session goes on; then it is over.
    """

    def __init__(self, appear: float = 60.0, timeout: float = 0.0, goes_on: float = inf) -> None:
        super().__init__(Address("tcp://127.0.0.1:1", "supervision", 1, timeout=timeout, appear=appear))
        self.missed: list[list[str | int]] | None = []
        self.told: list[str] = []
        self.goes_on = goes_on

    def send(self, kind, fields=None):
        if kind == "status":
            self.goes_on -= 1
        else:
            self.told.append(f"{kind}, replaced" if fields.get("replaced") else kind)
        ended = {"message": "", "clean": True} if self.goes_on < 0 else None
        return None if self.missed is None else Message(DONE, {"silent": self.missed, "ended": ended})

    def look_at(self, role: str, code: int, restarts: int = 1) -> Watched:
        """One whose first process has ended with an exit code, after one look at it; the next goes on."""
        watched = Watched(role, 1, lambda life: Ended(None if life else code), restarts)
        self.start(watched)
        self.look()
        return watched


class Service(Ended):
    """A coordinator that ends when it is told to."""

    def __init__(self, node: Node) -> None:
        super().__init__(None)
        self.node = node

    def poll(self) -> int | None:
        return 0 if "stop" in self.node.told else None


CUT_OFF = [["worker", 1, 0], ["server", 1, 0]]


@pytest.mark.parametrize("role", ["worker", "server"])
def test_who_was_cut_off_is_restarted_and_ends_nobodys_run(role):
    node = Node()
    node.missed = CUT_OFF
    assert node.look_at(role, 1).incarnation == 1
    assert node.told == ["died, replaced"]


def test_who_ends_without_a_coordinator_is_restarted_with_one():
    node = Node()
    node.missed = None
    watched = node.look_at("worker", 1)
    node.look()
    assert (watched.incarnation, watched.code, node.told) == (0, None, [])
    node.missed = CUT_OFF
    node.look()
    assert watched.incarnation == 1
    assert node.told == ["died, replaced"]


def test_who_was_cut_off_and_may_not_be_started_again_ends_alone():
    node = Node()
    node.missed = CUT_OFF
    watched = node.look_at("worker", 1, restarts=0)
    assert (watched.code, watched.incarnation, node.told) == (1, 0, ["died"])


@pytest.mark.parametrize(
    ("stopped", "seconds", "missed", "why"),
    [
        (True, 61, [], "was stopped, as by SIGSTOP, for 61 s"),
        (True, 8, CUT_OFF, "was stopped, as by SIGSTOP, for 8 s"),
        (False, 61, CUT_OFF, "gave no sign of life"),
    ],
    ids=["noticed here", "noticed by the coordinator", "not stopped"],
)
def test_who_is_ended_because_it_was_silent_is_not_called_killed(stopped, seconds, missed, why, capsys, monkeypatch):
    monkeypatch.setattr(supervision, "is_stopped", lambda pid: stopped)
    node = Node(timeout=60.0)
    node.missed = missed
    node.start(Watched("worker", 1, lambda life: Dies()))
    for second in range(1, seconds + 1):
        node.end_the_stopped(time.monotonic() + second)
    node.ask()
    node.look()
    assert f"worker 1 (process 1 on {os.uname().nodename}) {why}, and is ended; it is not" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", [8, 61])
def test_the_stopped_are_named_by_those_who_waited_less(seconds, capsys, monkeypatch):
    """Also where its end was not seen any more: the workers have ended before."""
    monkeypatch.setattr(supervision, "is_stopped", lambda pid: True)
    node = Node(timeout=60.0)
    node.start(Watched(COORDINATOR, 0, lambda life: Dies()))
    for second in range(1, seconds + 1):
        node.end_the_stopped(time.monotonic() + second)
    node.stop(at_once=True)
    name = f"coordinator (process 1 on {os.uname().nodename})"
    (death,) = node.deaths
    assert death.startswith(f"{name} was stopped, as by SIGSTOP, for {seconds} s")
    assert death in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "reached"),
    [({}, True), ({"timeout": 1e6}, False), ({"appear": 0.0}, False)],
    ids=["error", "heard until now", "not reached for long"],
)
def test_who_ends_with_an_error_ends_the_run(options, reached):
    node = Node(**options)
    node.missed = [["worker", 2, 0]] if reached else None
    watched = node.look_at("worker", 1)
    assert (watched.code, watched.incarnation, node.told) == (1, 0, ["end"])


@pytest.mark.parametrize("first", [True, False])
def test_no_worker_is_restarted_in_anothers_session(first, capsys, monkeypatch):
    """And without the first, which starts the services of later sessions, the others end."""
    monkeypatch.setattr(supervision, "GRACE", 0.0)
    node, other = Node(goes_on=0), Runs()
    watched = Watched("worker", 0, lambda life: other)
    if not first:
        node.start(watched)
    dead = node.look_at("worker", -9)
    assert (dead.code, dead.incarnation, node.told) == (-9, 0, [])
    assert "it is not replaced: only the first session of a run has restarts" in capsys.readouterr().err
    if first:
        node.start(watched)
    node.look()
    assert other.signals == [signal.SIGKILL] * first


def test_services_stay_until_other_nodes_workers_have_left():
    node = Node(goes_on=5)
    node.start(Watched(COORDINATOR, 0, lambda life: Service(node)))
    node.stop()
    assert node.goes_on < 0
    assert node.told == ["end", "stop"]


def test_once_a_worker_has_finished_none_is_started_again():
    """The others let nobody in any more."""
    node = Node()
    node.look_at("worker", 0)
    dead = node.look_at("worker", -9)
    assert (dead.code, dead.incarnation, node.told) == (-9, 0, ["left", "died"])
