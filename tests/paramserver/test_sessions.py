"""Sessions that follow one another: each has a coordinator of its own, and nothing of one reaches that of another."""

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq
from control_plane import Run
from local_cluster import wait_for
from ports import free_port

from cnnstrategies.paramserver import supervision as supervising
from cnnstrategies.paramserver.control import connect, parse, send
from cnnstrategies.paramserver.coordinator.settings import Address, CoordinatorSettings
from cnnstrategies.paramserver.core.node import Message, Peer
from cnnstrategies.paramserver.core.requests import DONE
from cnnstrategies.paramserver.membership import Membership
from cnnstrategies.paramserver.processes import Forked
from cnnstrategies.paramserver.services import CoordinatorProcess, start
from cnnstrategies.paramserver.supervision import COORDINATOR, Supervision, Watched


@pytest.fixture
def endpoint():
    return f"tcp://127.0.0.1:{free_port()}"


def until_it_listens(endpoint):
    host, _, port = endpoint.removeprefix("tcp://").partition(":")
    deadline = time.monotonic() + 60
    while True:
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))) == 0:
                return
        assert time.monotonic() < deadline, f"nobody listens at {endpoint}"
        time.sleep(0.01)


def test_who_comes_after_all_have_left_is_told(tmp_path):
    with Run(tmp_path, 2, 1) as run:
        for rank in range(2):
            run.worker(rank, lambda collectives: collectives.start().joined)
        run.server(0)
        assert [run.result("worker", rank, 0) for rank in range(2)] == [False, False]
        over = "RunEnded: the session is over: every worker has left"
        assert run.result("server", 0, 0) == over  # It has nothing more to do.
        run.worker(1, lambda collectives: None, incarnation=1)
        assert run.result("worker", 1, 1) == over


def test_a_worker_that_is_ahead_knocks_until_the_coordinator_of_its_session_is_there(tmp_path, endpoint):
    def gather_often(collectives):
        return [list(collectives.gather(time.sleep(0.02)).values) for _ in range(50)]

    def fail(collectives):
        collectives.membership.end("session 1 has failed")
        while True:
            collectives.membership.wait_newer(collectives.membership.current().number, 10)

    with Run(tmp_path, 2, endpoint=endpoint) as first:
        until_it_listens(endpoint)  # Else the other coordinator may come first, and this one waits for its end.
        with Run(tmp_path, 2, options={"session": 1}, endpoint=endpoint) as run:
            run.worker(1, fail)
            first.worker(0, gather_often)
            time.sleep(0.3)
            first.worker(1, gather_often)
            for rank in range(2):
                assert first.result("worker", rank, 0) == [[0, 1]] * 50
            run.worker(0, lambda collectives: collectives.gather(None))
            for rank in range(2):
                assert run.result("worker", rank, 0) == "RunEnded: session 1 has failed"


def test_who_knocks_again_before_the_answer_has_come_is_the_same(tmp_path):
    with Run(tmp_path, 1) as run, zmq.Context() as context:
        address = run.address("worker", 0)
        connection = connect(address, context, None, None)
        fields = {"session": 0, "process": 1, "host": "here", "endpoint": "", "public_key": ""}
        for _ in range(2):
            send(connection, Peer("worker", 0), Message("hello", fields, request=1))
        answers = [parse(connection.recv_multipart())[1] for _ in range(2)]
        assert [(answer.kind, answer.request) for answer in answers] == [(DONE, 1)] * 2
        connection.close(0)


@pytest.mark.parametrize("victim", [0, 1])
def test_no_worker_is_started_again_in_a_session_that_another_started(tmp_path, capsys, monkeypatch, victim):
    """And without the first, which starts the services of later sessions, the others end."""
    monkeypatch.setattr(supervising, "ANSWER_SECONDS", 60.0)
    monkeypatch.setattr(supervising, "GRACE", 0.5)
    with Run(tmp_path, 2, timeout=0.5) as run:

        def go_on(collectives):
            rank = collectives.membership.address.id
            collectives.barrier()
            collectives.membership.close()
            Path(f"left-{rank}").touch()
            if rank == victim:
                wait_for(Path(f"left-{1 - rank}"))
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1000 if victim == 0 else 0)

        supervision = Supervision(run.address("supervision", 0))
        for rank in range(2):
            supervision.start(
                Watched("worker", rank, lambda life, rank=rank: Forked(run.worker(rank, go_on)), restarts=3)
            )
        supervision.watch()
    codes = [-signal.SIGKILL, -signal.SIGKILL if victim == 0 else 0]
    assert [one.code for one in supervision.workers] == (codes if victim == 0 else codes[::-1])
    printed = capsys.readouterr().err
    assert printed.count("it is not replaced: only the first session of a run has restarts") == (
        2 if victim == 0 else 1
    )


def test_services_stay_until_the_workers_of_other_nodes_have_left(tmp_path, monkeypatch):
    address = Address(f"ipc://{tmp_path}/coordinator", "supervision", 0, 0, 0.1, 60.0)
    settings = CoordinatorSettings(address.coordinator, 1, 0, address.timeout)
    supervision = Supervision(address)
    supervision.start(Watched(COORDINATOR, 0, lambda life: start(CoordinatorProcess(settings), "fork")))
    membership = Membership(Address(address.coordinator, "worker", 0, 0, 0.1, 60.0))
    membership.wait_registered()

    asked, ask = [], supervision.ask

    def count():
        asked.append(ask())
        return asked[-1]

    monkeypatch.setattr(supervision, "ask", count)

    def leave():
        while len(asked) < 5:  # For the services to end meanwhile, if they do.
            time.sleep(0.01)
        membership.current()  # Raises when the run is over.
        membership.close()

    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(leave)
        supervision.stop()
        assert leaving.result() is None
