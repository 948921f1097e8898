"""Training across two hosts: network namespaces with addresses and names of their own."""

import os
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from cluster.two_hosts import Run, TwoHosts, missing, two_hosts, wait_for_checkpoint
from conftest import ROOT

from cnnstrategies.cli import main

reason = missing()
pytestmark = [pytest.mark.cluster, pytest.mark.skipif(reason is not None, reason=str(reason))]

PORT = "29511"
ENDLESS = ("--trainer.max_epochs=10000", "--trainer.limit_train_batches=5", "--trainer.limit_val_batches=1")


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with two_hosts() as made:
        yield made


def train(hosts: TwoHosts, number: int, *arguments: str, address: str = "alpha") -> Run:
    """Starts the quickstart on one of the hosts, as its user would by hand."""

    def run() -> None:
        os.environ.update(MASTER_ADDR=address, MASTER_PORT=PORT, NODE_RANK=str(number))
        sys.argv = [
            *("cnnstrategies", "fit", f"--config={ROOT / 'configs/quickstart.yaml'}"),
            *("--trainer.devices=1", "--trainer.num_nodes=2", "--trainer.enable_model_summary=false"),
            *("--trainer.enable_progress_bar=false", *arguments),
        ]
        main()

    return hosts.start(number, run)


def test_trains_over_the_interface_that_is_named(hosts: TwoHosts) -> None:
    """Over the one on the route below."""
    network = ("--trainer.strategy=hybrid_pipeline", "--network.interface=10.77.9.0/24")
    arguments = ("--trainer.max_epochs=1", "--trainer.limit_train_batches=5")
    runs = [train(hosts, number, *arguments, *network) for number in (0, 1)]
    assert [run.wait() for run in runs] == [0, 0], "\n".join(run.output() for run in runs)
    checkpoint = torch.load(wait_for_checkpoint(*runs), weights_only=True)
    assert checkpoint["global_step"] == 5


def test_a_short_cut_of_the_link_is_survived_and_a_long_one_ends_both_hosts_with_the_others_name(
    hosts: TwoHosts,
) -> None:
    arguments = ("--trainer.strategy=ddp", *ENDLESS, "--network.timeout=15")
    runs = [train(hosts, number, *arguments) for number in (0, 1)]
    path = wait_for_checkpoint(*runs)
    hosts.cut()
    time.sleep(2)  # Nothing can be on its way any more.
    hosts.mend()
    written = path.stat().st_mtime_ns
    deadline = time.monotonic() + 90
    while path.stat().st_mtime_ns == written:  # Checkpoints go on to be written.
        assert time.monotonic() < deadline, "\n".join(run.output() for run in runs)
        time.sleep(0.1)
    hosts.cut()
    assert [run.wait() for run in runs] == [1, 1], "\n".join(run.output() for run in runs)
    assert f"alpha has not reached beta ({hosts.addresses[1]}, node 1) for 15 s" in runs[0].output()
    assert f"beta has not reached alpha ({hosts.addresses[0]}, node 0) for 15 s" in runs[1].output()
    torch.load(path, weights_only=True)  # It is whole.


def test_a_host_that_does_not_come_is_told_by_its_number(hosts: TwoHosts) -> None:
    run = train(hosts, 0, "--network.wait=2")
    assert run.wait() == 2
    assert "alpha has waited 2 s for node 1" in run.output()


def test_a_main_address_that_does_not_answer_is_named(hosts: TwoHosts) -> None:
    nothing_listens = train(hosts, 1, "--network.wait=2")
    no_such_host = train(hosts, 1, "--network.wait=2", address="10.77.9.3")
    assert [nothing_listens.wait(), no_such_host.wait()] == [2, 2]
    assert f"main address alpha ({hosts.addresses[0]}) on port {PORT}" in nothing_listens.output()
    assert "has rank 0 been started" in nothing_listens.output()
    assert "main address 10.77.9.3" in no_such_host.output()


def test_the_wrong_interface_is_found_out_before_training(hosts: TwoHosts) -> None:
    runs = [train(hosts, number, "--network.interface=extra", "--network.wait=60") for number in (0, 1)]
    assert [run.wait() for run in runs] == [2, 2]
    for run in runs:
        assert "alpha (10.99.0.1 on extra) cannot reach beta (10.99.1.1, node 1)" in run.output()
        assert "--network.interface" in run.output()


def test_forked_ranks_on_several_hosts_are_refused(run_cli: Callable[..., tuple[int, str]], quick: list[str]) -> None:
    code, output = run_cli("fit", *quick, "--trainer.num_nodes=2")
    assert code == 2, output
    assert "trainer.num_nodes=2 with a strategy that forks" in output
