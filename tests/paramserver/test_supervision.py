"""A node's supervision of processes that end, tested without real processes."""

import os
import signal
import time
from math import inf
from types import SimpleNamespace

import pytest

from cnnstrategies.paramserver import supervision
from cnnstrategies.paramserver.coordinator.settings import Address
from cnnstrategies.paramserver.core.node import Message
from cnnstrategies.paramserver.core.requests import DONE
from cnnstrategies.paramserver.core.view import RunEnded
from cnnstrategies.paramserver.supervision import COORDINATOR, Supervision, Watched
from cnnstrategies.runtime.processes import ENDS_WITH
from cnnstrategies.strategies.parameter_server import launcher
from cnnstrategies.strategies.parameter_server.launcher import RankReports, WatchingScriptLauncher, exit_code

CUT_OFF = [["worker", 1, 0], ["server", 1, 0]]
OTHER = [["worker", 2, 0]]


class Process:
    """A process that has ended with an exit code, or that runs.

    Attributes:
        dies: Whether a signal ends the process.
    """

    pid = 1

    def __init__(self, code: int | None = None, dies: bool = False) -> None:
        self.code = code
        self.dies = dies
        self.signals: list[int] = []

    def poll(self) -> int | None:
        return self.code

    def send_signal(self, sig: int) -> None:
        self.signals.append(sig)
        if self.dies:
            self.code = -sig


class Node(Supervision):
    """A supervision whose coordinator's answers are given by the test.

    Attributes:
        missed: Members that the coordinator reports as silent.
        reached: Whether the coordinator answers.
        reports: Kinds of the messages that the supervision has sent.
        goes_on: Number of times that the coordinator still answers that its session goes on.
        on_stop: Called when the supervision tells the coordinator to stop.
    """

    def __init__(self, missed=(), reached=True, appear=60.0, timeout=0.0, goes_on=inf):
        super().__init__(Address("tcp://127.0.0.1:1", "supervision", 1, timeout=timeout, appear=appear))
        self.missed = missed
        self.reached = reached
        self.reports = []
        self.goes_on = goes_on
        self.on_stop = lambda: None

    def send(self, kind, fields=None):
        if kind == "status":
            self.goes_on -= 1
        else:
            self.reports.append(f"{kind}, replaced" if fields and fields.get("replaced") else kind)
        if kind == "stop":
            self.on_stop()
        ended = {"message": "", "clean": True} if self.goes_on < 0 else None
        return Message(DONE, {"silent": self.missed, "ended": ended}) if self.reached else None

    def look_at(self, role: str, code: int, restarts: int = 1) -> Watched:
        """Return a watched process that has ended with an exit code, after one look at it; a replacement would run."""
        watched = Watched(role, 1, lambda incarnation: Process(None if incarnation else code), restarts)
        self.start(watched)
        self.look()
        return watched


@pytest.mark.parametrize(
    ("settings", "role", "restarts", "reported"),
    [
        ({"missed": CUT_OFF}, "worker", 1, "died, replaced"),
        ({"missed": CUT_OFF}, "server", 1, "died, replaced"),
        ({"missed": CUT_OFF}, "worker", 0, "died"),
        ({"missed": OTHER}, "worker", 1, "end"),
        ({"reached": False, "timeout": 1e6}, "worker", 1, "end"),
        ({"reached": False, "appear": 0.0}, "worker", 1, "end"),
    ],
    ids=["cut off", "server cut off", "no restarts", "an error", "heard until now", "not reached for long"],
)
def test_a_process_that_was_cut_off_is_restarted_and_an_error_ends_the_run(settings, role, restarts, reported):
    node = Node(**settings)
    watched = node.look_at(role, 1, restarts)
    assert (watched.incarnation, watched.code) == ((1, None) if "replaced" in reported else (0, 1))
    assert node.reports == [reported]
    assert not watched.handle.signals, "the process that runs was not reported as silent"


def test_a_process_that_ends_without_a_coordinator_is_restarted_when_the_coordinator_is_back():
    node = Node(CUT_OFF, reached=False)
    watched = node.look_at("worker", 1)
    node.look()
    assert (watched.incarnation, watched.code, node.reports) == (0, None, [])
    node.reached = True
    node.look()
    assert watched.incarnation == 1
    assert node.reports == ["died, replaced"]


@pytest.mark.parametrize(
    ("stopped", "seconds", "missed", "why"),
    [
        (True, 61, [], "was stopped, as by SIGSTOP, for 61 s"),
        (True, 8, CUT_OFF, "was stopped, as by SIGSTOP, for 8 s"),
        (False, 61, CUT_OFF, "sent no heartbeat"),
    ],
    ids=["noticed here", "noticed by the coordinator", "not stopped"],
)
def test_a_silent_process_that_is_ended_is_not_reported_as_killed(stopped, seconds, missed, why, capsys, monkeypatch):
    monkeypatch.setattr(supervision, "is_stopped", lambda pid: stopped)
    node = Node(missed, timeout=60.0)
    node.start(Watched("worker", 1, lambda incarnation: Process(dies=True)))
    start = time.monotonic()
    for second in range(1, seconds + 1):
        node.end_the_stopped(start + second)
    node.ask()
    node.look()
    assert f"worker 1 (process 1 on {os.uname().nodename}) {why}, and is ended; it is not" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", [8, 61])
def test_a_stopped_coordinator_is_reported_even_if_the_workers_have_ended_before(seconds, capsys, monkeypatch):
    """Stop the coordinator for less and for more than the time-out, after which the supervision ends it."""
    monkeypatch.setattr(supervision, "is_stopped", lambda pid: True)
    node = Node(timeout=60.0)
    node.start(Watched(COORDINATOR, 0, lambda incarnation: Process(dies=True)))
    start = time.monotonic()
    for second in range(1, seconds + 1):
        node.end_the_stopped(start + second)
    node.stop(at_once=True)
    (death,) = node.deaths
    name = f"coordinator (process 1 on {os.uname().nodename})"
    assert death.startswith(f"{name} was stopped, as by SIGSTOP, for {seconds} s")
    assert death in capsys.readouterr().err


@pytest.mark.parametrize("first", [True, False])
def test_workers_are_restarted_only_in_the_first_session(first, capsys, monkeypatch):
    """Check also that other workers end without the first worker, which starts the services of later sessions."""
    monkeypatch.setattr(supervision, "WORKER_GRACE", 0.0)
    node, other = Node(goes_on=0), Process()
    watched = Watched("worker", 0, lambda incarnation: other)
    if not first:
        node.start(watched)
    dead = node.look_at("worker", -9)
    assert (dead.code, dead.incarnation, node.reports) == (-9, 0, [])
    assert "it is not replaced: restarts are possible only in the first session of a run" in capsys.readouterr().err
    if first:
        node.start(watched)
    node.look()
    assert other.signals == [signal.SIGKILL] * first


@pytest.mark.parametrize(("stop_seconds", "limit"), [(0.0, 70.0), (100.0, 110.0)])
def test_workers_that_stop_after_a_signal_have_the_time_that_they_limit_themselves(
    stop_seconds, limit, monkeypatch, capsys
):
    """Workers that needed longer than the time-out for their last checkpoint were once killed while they saved it."""
    now = time.monotonic()
    monkeypatch.setattr(supervision.time, "monotonic", lambda: now)
    node, worker = Node(timeout=60.0), Process(dies=True)
    node.stop_seconds = stop_seconds
    node.start(Watched("worker", 1, lambda incarnation: worker))
    for signum in (signal.SIGTERM, signal.SIGINT):
        node.send_signal(signum)
        worker.code = None  # The worker saves its checkpoint first.
    now += limit - 1
    node.look()
    assert worker.signals == [signal.SIGTERM, signal.SIGINT]
    now += 2
    node.look()
    assert worker.signals[2:] == [signal.SIGKILL]
    assert node.stop_signal == signal.SIGTERM
    node.look()
    assert "did not end by itself, and is ended" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("codes", "stop_signal", "code"),
    [
        ([143, 0], signal.SIGTERM, 143),
        ([-9, -9], signal.SIGTERM, 143),
        ([0, -9], signal.SIGINT, 130),
        ([0, 0], signal.SIGTERM, 0),
        ([1, -9], signal.SIGTERM, 1),
        ([0, -9], None, 0),
        ([-9, -9], None, 1),
        ([2, 75], None, 2),
    ],
)
def test_a_stopped_run_ends_with_the_signals_code_even_if_ranks_were_killed(codes, stop_signal, code):
    assert exit_code(codes, stop_signal) == code
    if stop_signal is None or code in (0, 1):
        return
    # Forked and spawned ranks that were killed have reported nothing.
    node = Node()
    node.stop_signal = stop_signal
    with pytest.raises(SystemExit) as end:
        RankReports().result(node, max(codes))
    assert end.value.code == code


@pytest.mark.parametrize(("codes", "ends"), [([0, 0], SystemExit), ([0, -9], RunEnded)])
def test_ranks_that_all_end_with_code_0_end_the_run_although_they_return_nothing(codes, ends):
    """The user's code has called ``sys.exit(0)`` on all ranks. A killed rank is an error, because it has no result."""
    node = Node()
    for code in codes:
        node.look_at("worker", code, restarts=0)
    with pytest.raises(ends) as end:
        RankReports().result(node, 0)
    assert ends is RunEnded or end.value.code == 0


def test_each_rank_program_ends_with_its_supervision_process(monkeypatch):
    monkeypatch.setattr(launcher.subprocess, "Popen", lambda words, env: env)
    place = {"main_address": "alpha", "main_port": 1, "node_rank": lambda: 0}
    strategy = SimpleNamespace(cluster_environment=SimpleNamespace(**place), num_processes=2, num_nodes=1)
    ranks = [WatchingScriptLauncher(strategy).start_rank(local_rank, 0) for local_rank in range(2)]
    assert [rank[ENDS_WITH] for rank in ranks] == [str(os.getpid())] * 2


def test_services_stay_until_other_nodes_workers_have_left():
    node, coordinator = Node(goes_on=5), Process()
    node.on_stop = lambda: setattr(coordinator, "code", 0)
    node.start(Watched(COORDINATOR, 0, lambda incarnation: coordinator))
    node.stop()
    assert node.goes_on < 0
    assert node.reports == ["end", "stop"]


def test_workers_are_not_restarted_once_a_worker_has_finished():
    """Check one death after another worker has finished: the remaining workers do not let workers in any more."""
    node = Node()
    node.look_at("worker", 0)
    dead = node.look_at("worker", -9)
    assert (dead.code, dead.incarnation, node.reports) == (-9, 0, ["left", "died"])
