"""Ranks of two runs with one address and one port: each rank finds its own run, under every strategy."""

import itertools
import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar

import pytest
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed import TCPStore

from cnnstrategies._lightning_private import set_main_port
from cnnstrategies.cluster.door import OpenDoor, knock, listen
from cnnstrategies.cluster.handshake import Door, RankCredentials
from cnnstrategies.cluster.hosts import Interconnect, across_hosts
from cnnstrategies.cluster.rendezvous import CANDIDATES, Party, candidates, take_part
from cnnstrategies.cluster.run_identity import declare
from cnnstrategies.cluster.search import Failed
from cnnstrategies.cluster.stores import SERVED, serve
from cnnstrategies.identity import LAUNCH, Identity, StrangerError
from tests.cluster.test_loopback import addresses
from tests.conftest import quiet_trainer
from tests.runner.ports import free_port

HOST = RankCredentials(Identity("digits", "0123456789ab", "SLURM step 7.0"), "DDPStrategy", 0, 2, 100)
GUEST = RankCredentials(HOST.identity, "DDPStrategy", 1, 2, 100)
STRATEGIES = ("ddp", "ddp_fp16", "ddp_balanced", "hybrid_pipeline", "parameter_server")


def opened_door() -> OpenDoor:
    listener = listen("127.0.0.1", [0])
    assert listener is not None
    return OpenDoor(listener, Door(HOST, 4711))


def test_processes_that_say_nothing_or_something_else_block_nobody() -> None:
    door = opened_door()
    mutes = [socket.create_connection(("127.0.0.1", door.port)) for _ in range(600)]
    browser = socket.create_connection(("127.0.0.1", door.port))
    browser.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert browser.recv(1) == b""
    with pytest.raises(RuntimeError):  # This is a rank of a program that does not use this package.
        TCPStore("127.0.0.1", door.port, is_master=False, timeout=timedelta(seconds=0.3))
    assert knock("127.0.0.1", [door.port], GUEST, 60) == {door.port: 4711}
    for mute in mutes:
        mute.close()


def test_a_forked_process_does_not_keep_the_port() -> None:
    """A process that loads data may live longer than rank 0. The next run then finds the port free."""
    door, (ours, theirs) = opened_door(), socket.socketpair()

    def load_data() -> None:
        theirs.send(b"x")
        theirs.recv(1)

    process = get_context("fork").Process(target=load_data)
    process.start()
    ours.recv(1)
    door.close()
    listener = listen("127.0.0.1", [door.port])
    ours.send(b"x")
    process.join()
    assert listener is not None


def test_a_port_without_a_door_is_described() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        answering = threading.Thread(target=lambda: other.accept()[0].sendall(b"SSH-2.0-OpenSSH_9.2\r\n"))
        answering.start()
        assert knock("127.0.0.1", [port], GUEST, 60) == {port: Failed("mute")}
        answering.join()
    assert knock("127.0.0.1", [port], GUEST, 60) == {port: Failed("absent")}


@pytest.mark.light
def test_the_ports_follow_from_the_job_and_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = {}
    for job, step, rank in itertools.product(("7", "8"), ("0", "1"), ("0", "1")):
        variables = {"JOB_ID": job, "STEP_ID": step, "PROCID": rank, "LOCALID": rank, "NTASKS": "2"}
        for name, value in variables.items():
            monkeypatch.setenv(f"SLURM_{name}", value)
        ports[job, step, rank] = candidates(LightningEnvironment())
    for job, step in itertools.product(("7", "8"), ("0", "1")):
        assert ports[job, step, "0"] == ports[job, step, "1"]
        assert len(ports[job, step, "0"]) == CANDIDATES
    assert len({tuple(numbers) for numbers in ports.values()}) == 4
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert candidates(LightningEnvironment())[0] == 29500


class Member:
    """A rank of a run in a process of its own, which waits at its end until the test lets it go."""

    started: ClassVar[list["Member"]] = []

    def __init__(self, name: str, rank: int, port: int, action: Callable[[str, int], object], launch: str = "") -> None:
        context = get_context("fork")
        self.pipe, theirs = context.Pipe()
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank), "NODE_RANK": "0"}
        if launch:
            variables[LAUNCH] = f"{launch} {launch}"
        self.process: BaseProcess = context.Process(target=_main, args=(theirs, variables, name, rank, action))
        self.process.start()
        self.started.append(self)
        theirs.close()

    def result(self) -> Any:
        assert self.pipe.poll(100), "no answer"
        result = self.pipe.recv()
        if isinstance(result, BaseException):
            for member in Member.started:
                member.process.kill()
                member.process.join()
            raise result
        return result

    def end(self) -> None:
        self.pipe.send("end")
        self.process.join(60)


def _main(
    pipe: Connection, variables: dict[str, str], name: str, rank: int, action: Callable[[str, int], object]
) -> None:
    os.environ.pop(SERVED, None)
    os.environ |= variables
    declare(name, "0123456789ab")
    try:
        pipe.send(action(name, rank))
    except BaseException as error:
        pipe.send(error)
    pipe.recv()
    os._exit(0)


def trained_with(strategy: str) -> Callable[[str, int], object]:
    """Return a function that connects a rank as `fit` does, and returns the names of the runs of all ranks."""

    def meet(name: str, rank: int) -> object:
        if strategy == "parameter_server":  # It needs a port only on several hosts.
            trainer = quiet_trainer(strategy, 1, num_nodes=2)
            trainer.strategy.find_main_port(rank, 2)
            return trainer.strategy.layout().main_port
        trainer = quiet_trainer(strategy, 2)
        with across_hosts(trainer, Interconnect()):
            DDPStrategy.setup_distributed(trainer.strategy)
        names: list[Any] = [None, None]
        dist.all_gather_object(names, name)
        return names

    return meet


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_runs_with_one_port_each_find_their_own_ranks(strategy: str) -> None:
    """Rank 1 of the second run is there first, its rank 0 last: both orders, in one test."""
    port, meet = free_port(), trained_with(strategy)
    early = Member("second", 1, port, meet, launch="b")
    first = [Member("first", rank, port, meet, launch="a") for rank in (0, 1)]
    results = [member.result() for member in first]
    late = Member("second", 0, port, meet, launch="b")
    others = [late.result(), early.result()]
    if strategy == "parameter_server":
        assert results[0] == results[1] != others[0] == others[1]
    else:
        assert results == [["first", "first"]] * 2
        assert others == [["second", "second"]] * 2
    for member in (early, late, *first):
        member.end()


def test_under_torchrun_each_start_of_each_run_has_its_own_store() -> None:
    """Two runs use one agent's store. In the agent's store, restarted ranks would find the addresses of dead ranks."""
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def meet(name: str, rank: int) -> object:
        os.environ |= {SERVED: "True", "GROUP_WORLD_SIZE": "1"}
        identity = Identity(name, "0123456789ab")
        meeting = take_part(Party(LightningEnvironment(), 1, rank, 2, identity, "ddp", 60.0), serve)
        assert os.environ[SERVED] == "False"
        # The agent's store is forked with the test's process. Rank 0 also has its own store and its door.
        assert sorted(addresses(os.getpid())) == ["127.0.0.1"] * (2 if rank == 0 else 0) + ["::"]
        return meeting.port, int(os.environ["MASTER_PORT"])

    def start(name: str) -> int:
        members = [Member(name, rank, agent.port, meet) for rank in (1, 0)]
        # If rank 0 fails, rank 1 does not find it. So an error of rank 0 is read first.
        (port, main), (other, _) = (member.result() for member in reversed(members))
        assert port == main == other
        for member in members:
            member.end()
        return port

    assert len({start("first"), start("second"), start("first"), agent.port}) == 4


def test_a_stranger_leaves_with_one_line_and_its_own_exit_code(
    run_cli: Callable[..., tuple[int, str]], quick: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    door = opened_door()
    variables = {"LOCAL_RANK": "1", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(door.port)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, output = run_cli("fit", *quick, "--trainer.strategy=ddp", "--trainer.devices=2", "--run_name=letters")
    assert code == StrangerError.exit_code == 76
    line = output.splitlines()[-1]
    assert line.startswith("cnnstrategies: error: this process of the run letters (configuration ")
    assert f"has reached {HOST.identity} at 127.0.0.1, port {door.port}: set MASTER_PORT" in line


class FixedEnvironment(LightningEnvironment):
    """A user's cluster environment, whose main port does not depend on MASTER_PORT."""

    main_port = 29400


@pytest.mark.parametrize("environment", [LightningEnvironment(), FixedEnvironment()])
def test_every_cluster_environment_gets_the_port_of_the_store(environment: LightningEnvironment) -> None:
    assert environment.main_port > 0
    set_main_port(environment, 4711)
    assert (environment.main_port, os.environ["MASTER_PORT"]) == (4711, "4711")
    assert LightningEnvironment().main_port == 4711
