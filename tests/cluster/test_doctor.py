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
from cluster.hosts import Network, bind, missing, two_hosts

from cnnstrategies.cli import main
from cnnstrategies.cluster import doctor as doctor_module
from cnnstrategies.cluster.doctor import Facts, Findings, Report, gpu_problems, others_in_turn
from cnnstrategies.cluster.probe import Probe
from cnnstrategies.commands.doctor import mends

reason = missing()
needs_hosts = pytest.mark.skipif(reason is not None, reason=str(reason))


@pytest.fixture
def hosts() -> Iterator[Network]:
    with two_hosts() as made:
        yield made


def examine(
    hosts: Network, *arguments: str, before: Callable[[int], None] = lambda node: None
) -> list[tuple[int, str]]:
    """The doctor's exit codes and outputs, when it is started on both hosts."""

    def run(node: int) -> None:
        before(node)
        os.environ.update(NNODES="2", NODE_RANK=str(node), MASTER_ADDR=hosts.hosts[0].address, MASTER_PORT="29481")
        doctor_module.shared_memory = lambda: 2**30  # The tests may run in a container with little.
        sys.argv = ["cnnstrategies", "doctor", *arguments]
        main()

    runs = [hosts.start(host, lambda node=node: run(node)) for node, host in enumerate(hosts.hosts)]
    return [(run.wait(), run.output()) for run in runs]


@pytest.mark.cluster
@needs_hosts
def test_two_hosts_that_agree_pass(hosts: Network, tmp_path: Path) -> None:
    (code, output), (second, _) = examine(hosts, "--interface=10.77.9.0/24")
    assert code == 0, output
    assert second == 0
    assert f"All 2 hosts agree, reach each other and share {tmp_path}" in output
    assert re.search(r"1 beta +│ 10\.77\.9\.2 │ wire", output), output
    assert not list(tmp_path.glob(".cnnstrategies-doctor*"))


@pytest.mark.cluster
@needs_hosts
def test_what_differs_or_does_not_work_is_named(hosts: Network, tmp_path: Path) -> None:
    (tmp_path / "beta").mkdir()
    (tmp_path / "shared").mkdir()

    class Deaf(Probe):
        def __init__(self, address: str) -> None:
            super().__init__(address)
            self.close()

    def differ(node: int) -> None:
        if node == 0:
            doctor_module.Probe = Deaf
            return
        lightning.__version__ = "2.6.4"
        bind(tmp_path / "beta", tmp_path / "shared", read_only=True)
        real = time.time
        time.time = lambda: real() + 90

    (code, output), (second, _) = examine(hosts, "--shared=shared", before=differ)
    assert (code, second) == (1, 0), output
    assert "mend: beta cannot reach alpha at 10.77.9.1 port " in output
    assert "mend: lightning differs: " in output
    assert "2.6.4 on beta" in output
    assert f"mend: {tmp_path}/shared: beta does not see what alpha writes there" in output
    assert f"mend: {tmp_path}/shared: beta cannot write there: Read-only file system" in output
    assert re.search(r"mend: the clock of beta is (8|9)\d\.\d s ahead of that of alpha", output), output


@pytest.mark.cluster
@needs_hosts
def test_a_host_without_a_connection_is_named_on_both_sides(hosts: Network) -> None:
    hosts.hosts[1].set_link("down")
    (first, alpha), (second, beta) = examine(hosts, "--wait=3")
    assert (first, second) == (1, 1)
    assert "mend: no other host has come to alpha, port 29481" in alpha
    assert "mend: beta has not reached the main address 10.77.9.1 on port 29481" in beta


@pytest.mark.light
def test_a_container_with_little_shared_memory_is_named() -> None:
    hosts = {
        node: Facts(node, host, "eth0", "10.0.0.1", 1, {}, memory)
        for node, (host, memory) in enumerate([("alpha", 2**26), ("beta", 2**33), ("gamma", None)])
    }
    (line,) = mends(Report(3, hosts, {node: Findings() for node in hosts}, "/shared"))
    assert line.startswith("alpha has 64 MiB of shared memory")


@pytest.mark.light
def test_each_host_comes_to_all_others_and_no_two_to_one_at_a_time() -> None:
    nodes = [0, 1, 3, 4, 7]
    turns = {node: others_in_turn(nodes, node) for node in nodes}
    assert all(sorted([node, *others]) == nodes for node, others in turns.items())
    for at_one_time in zip(*turns.values(), strict=True):
        assert sorted(at_one_time) == nodes


def test_without_a_launcher_it_checks_this_machine(
    run_cli: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor_module, "shared_memory", lambda: None)
    monkeypatch.setattr(doctor_module, "gpu_problems", lambda: gpu_problems(tmp_path))
    code, output = run_cli("doctor")
    assert code == 0
    assert torch.__version__ in output
    assert "docs/doctor.md" in output
    (tmp_path / "0000:01:00.0").mkdir()
    code, output = run_cli("doctor")
    assert code == int(not torch.cuda.is_available())
    assert code == 0 or f"mend: {socket.gethostname()}: torch {torch.__version__} cannot use its 1 GPU" in output
