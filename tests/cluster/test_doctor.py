"""The doctor on two hosts, which are network namespaces with addresses and names of their own."""

import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import lightning
import pytest
import torch

from cnnstrategies.cli import main
from cnnstrategies.cluster import doctor
from cnnstrategies.cluster.doctor import HostReport, examine_alone
from cnnstrategies.commands import doctor as command
from cnnstrategies.planning.devices import read_devices
from cnnstrategies.runtime.host_memory import host_memory
from tests.cluster.hosts import bind, missing, two_hosts
from tests.runner.ports import free_port

reason = missing()


def examine(*arguments: str, before: Callable[[int], None] = lambda node: None) -> list[tuple[int, str]]:
    """Start the doctor on both hosts, and return its exit codes and outputs."""
    with two_hosts() as hosts:

        def run(node: int) -> None:
            before(node)
            os.environ.update(NNODES="2", NODE_RANK=str(node), MASTER_ADDR=hosts.hosts[0].address, MASTER_PORT="29481")
            sys.argv = ["cnnstrategies", "doctor", *arguments]
            main()

        runs = [hosts.start(host, lambda node=node: run(node)) for node, host in enumerate(hosts.hosts)]
        return [(run.wait(), run.output()) for run in runs]


@pytest.mark.cluster
@pytest.mark.skipif(reason is not None, reason=str(reason))
def test_the_doctor_names_differences_and_faults_of_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor, "shared_memory", lambda: 2**30
    )  # The tests may run in a container with little shared memory.
    (code, output), (second, _) = examine("--interface=10.77.9.0/24")
    assert (code, second) == (0, 0), output
    assert f"No problems: all 2 hosts have the same versions, reach each other and share {tmp_path}" in output
    assert re.search(r"1 beta +│ 10\.77\.9\.2 │ wire", output), output
    assert re.search(
        r"plan --config YOURS --bandwidth \d+ --latency [\d.]+ --sum_latency [\d.]+ --exchange_latency [\d.]+\n", output
    ), output
    assert not list(tmp_path.glob(".cnnstrategies-doctor*"))
    (tmp_path / "beta").mkdir()
    (tmp_path / "shared").mkdir()

    def differ(node: int) -> None:
        if node == 1:
            lightning.__version__ = "2.6.4"
            bind(tmp_path / "beta", tmp_path / "shared", read_only=True)

    (code, output), (second, _) = examine("--shared=shared", before=differ)
    assert (code, second) == (1, 0), output
    assert "problem: lightning differs: " in output
    assert "2.6.4 on beta" in output
    assert f"problem: beta: {tmp_path}/shared: a file from alpha does not appear on this host" in output
    assert re.search(rf"problem: beta: cannot write {tmp_path}/shared/\S+: Read-only file system", output), output


def test_without_other_hosts_the_doctor_checks_this_machine(
    run_cli: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "shared_memory", lambda: 2**30)
    monkeypatch.setattr(command, "examine_alone", lambda: examine_alone(tmp_path))
    code, output = run_cli("doctor")
    assert code == 0
    assert torch.__version__ in output
    assert "docs/doctor.md" in output
    (text,) = re.findall(r'plan --config YOURS --have "(.*)"', output.replace("\n", " "))
    devices = read_devices(text, "have")
    assert devices[0].speed == 1
    if not Path("/proc/driver/nvidia").exists():  # Asking torch would make forks impossible.
        assert devices[0].memory == pytest.approx(host_memory(), rel=0.1)
    monkeypatch.setattr(doctor, "shared_memory", lambda: 2**26)
    (tmp_path / "0000:01:00.0").mkdir()
    little, output = run_cli("doctor")
    assert f"problem: {socket.gethostname()}: 64 MiB of shared memory" in output
    port = str(free_port())
    for name, value in {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    alone, alone_output = run_cli("doctor", "--wait=0.1")
    assert (little, alone) == (1, 1)
    assert re.search("problem: .* check that rank 0 was started", alone_output), alone_output
    assert (f"torch {torch.__version__} cannot use the 1 GPU" in output) != torch.cuda.is_available()


def test_the_cost_of_messages_is_that_of_the_slowest_connections() -> None:
    hosts = [
        HostReport("alpha", {}, [], links=[(1, 0.0004, 2.5e7)]),
        HostReport("beta", {}, [], links=[(0, 0.0006, 5e7)]),
    ]
    spatial, plan = command.costs_of_messages(hosts)
    assert spatial.startswith("A message between hosts takes at least 0.3 ms. Under spatial with parts of an image on")
    assert spatial.endswith("100 of them take at least 30 ms")
    assert plan.endswith("cnnstrategies plan --config YOURS --bandwidth 200 --latency 0.3")
    hosts[0].prices = (0.0012, 0.0005)
    _, prices, plan = command.costs_of_messages(hosts)
    assert prices.endswith(
        "a sum over alpha and beta takes 1.2 ms by gloo, and an exchange of small messages takes 0.5 ms"
    )
    assert plan.endswith("--bandwidth 200 --latency 0.3 --sum_latency 1.2 --exchange_latency 0.5")
    assert command.costs_of_messages([HostReport("alpha", {}, [])]) == []
