"""The doctor on two hosts: network namespaces with addresses and names of their own."""

import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import lightning
import pytest
import torch
from cluster.two_hosts import TwoHosts, bind, missing, two_hosts

from cnnstrategies.cli import main
from cnnstrategies.cluster import doctor as doctor_module
from cnnstrategies.cluster.doctor import Facts, Findings, Report, rounds
from cnnstrategies.cluster.doctor_host import gpu_problems
from cnnstrategies.cluster.doctor_report import mends
from cnnstrategies.cluster.probe import Probe

reason = missing()
needs_hosts = pytest.mark.skipif(reason is not None, reason=str(reason))


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with two_hosts() as made:
        yield made


def doctor(*arguments: str, **variables: str) -> None:
    os.environ.update(variables)
    doctor_module.shared_memory = lambda: 2**30  # The tests may run in a container with little.
    sys.argv = ["cnnstrategies", "doctor", *arguments]
    main()


def examine(hosts: TwoHosts, *arguments: str, before: Callable[[int], None] = lambda number: None) -> tuple[int, str]:
    """The doctor's exit code and output on the first host, when it is started on both."""

    def run(number: int) -> None:
        before(number)
        place = {"NNODES": "2", "NODE_RANK": str(number), "MASTER_ADDR": "alpha", "MASTER_PORT": "29481"}
        doctor("--wait=60", *arguments, **place)

    runs = [hosts.start(number, lambda number=number: run(number)) for number in (0, 1)]
    codes = [run.wait() for run in runs]
    assert codes[1] == 0, runs[1].output()
    return codes[0], runs[0].output()


@pytest.mark.cluster
@needs_hosts
def test_two_hosts_that_agree_pass(hosts: TwoHosts, tmp_path: Path) -> None:
    code, output = examine(hosts, "--interface=10.77.9.0/24")
    assert code == 0, output
    assert f"All 2 hosts agree, reach each other and share {tmp_path}" in output
    assert re.search(rf"1 beta +│ {re.escape(hosts.addresses[1])} │ wire", output), output
    assert not list(tmp_path.glob(".cnnstrategies-doctor*"))


@pytest.mark.cluster
@needs_hosts
def test_what_differs_or_does_not_work_is_named(hosts: TwoHosts, tmp_path: Path) -> None:
    (tmp_path / "beta").mkdir()
    (tmp_path / "shared").mkdir()

    class Deaf(Probe):
        def __init__(self, address: str) -> None:
            super().__init__(address)
            self.close()

    def differ(number: int) -> None:
        if number == 0:
            doctor_module.Probe = Deaf
            return
        lightning.__version__ = "2.6.4"
        bind(tmp_path / "beta", tmp_path / "shared", read_only=True)
        real = time.time
        time.time = lambda: real() + 90

    code, output = examine(hosts, "--shared=shared", before=differ)
    assert code == 1, output
    assert f"mend: beta cannot reach alpha at {hosts.addresses[0]} port " in output
    assert "mend: lightning differs: " in output
    assert "2.6.4 on beta" in output
    assert f"mend: {tmp_path}/shared: beta does not see what alpha writes there" in output
    assert f"mend: {tmp_path}/shared: beta cannot write there: Read-only file system" in output
    assert re.search(r"mend: the clock of beta is (8|9)\d\.\d s ahead of that of alpha", output), output


@pytest.mark.cluster
@needs_hosts
def test_a_host_without_a_connection_is_named_on_both_sides(hosts: TwoHosts) -> None:
    hosts.cut()
    place = {"NNODES": "2", "MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": "29481"}
    runs = [
        hosts.start(number, lambda number=number: doctor("--wait=3", NODE_RANK=str(number), **place))
        for number in (0, 1)
    ]
    assert [run.wait() for run in runs] == [1, 1]
    assert "mend: no other host has come to alpha, port 29481" in runs[0].output()
    assert f"mend: beta has not reached the main address {hosts.addresses[0]} on port 29481" in runs[1].output()


@pytest.mark.light
def test_a_container_with_little_shared_memory_is_named() -> None:
    hosts = {
        node: Facts(node, host, "eth0", "10.0.0.1", 1, {}, memory)
        for node, (host, memory) in enumerate([("alpha", 2**26), ("beta", 2**33), ("gamma", None)])
    }
    (line,) = mends(Report(3, hosts, {node: Findings() for node in hosts}, "/shared"))
    assert line.startswith("alpha has 64 MiB of shared memory")


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_every_two_hosts_meet_once_and_no_host_twice_at_a_time(count: int) -> None:
    met = []
    for pairs in rounds(list(range(count))):
        busy = [host for pair in pairs for host in pair]
        assert len(busy) == len(set(busy))
        met += [frozenset(pair) for pair in pairs]
    assert len(met) == len(set(met)) == count * (count - 1) // 2


def test_without_a_launcher_it_checks_this_machine(
    run_cli: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_module, "shared_memory", lambda: None)
    monkeypatch.setattr(doctor_module, "gpu_problems", list)
    code, output = run_cli("doctor")
    assert code == 0
    assert torch.__version__ in output
    assert "docs/doctor.md" in output
    monkeypatch.setattr(doctor_module, "gpu_problems", lambda: ["1 GPU that torch cannot use"])
    code, output = run_cli("doctor")
    assert code == 1
    assert f"mend: {socket.gethostname()}: 1 GPU that torch cannot use" in output


def test_what_bites_on_gpus_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_problems({}, tmp_path) == []
    (tmp_path / "0000:01:00.0").mkdir()
    (line,) = gpu_problems({}, tmp_path)
    assert line.startswith(f"1 GPU that torch {torch.__version__} cannot use: ")
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def refuse() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).\nMore.")

    monkeypatch.setattr(torch.cuda, "init", refuse)
    (line,) = gpu_problems({}, tmp_path)
    assert line.endswith("is too old (found version 12020).")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    reached = {(0, 1)}
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: pair in reached)
    (line,) = gpu_problems({"NCCL_P2P_DISABLE": "1"}, tmp_path)
    assert line.startswith("GPUs 0 and 2, 1 and 2 do not reach each other's memory")
    reached |= {(0, 2), (1, 2)}
    lines = gpu_problems({"NCCL_P2P_DISABLE": "1", "CUDA_LAUNCH_BLOCKING": "1"}, tmp_path)
    assert [line.partition(" ")[0] for line in lines] == ["NCCL_P2P_DISABLE=1", "CUDA_LAUNCH_BLOCKING=1"]
    assert gpu_problems({"NCCL_P2P_DISABLE": "0"}, tmp_path) == []
