"""Training across two hosts: network namespaces with addresses and names of their own."""

import os
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from cluster.two_hosts import Run, TwoHosts, cut_for_a_moment_and_for_good, missing, two_hosts
from conftest import ROOT

from cnnstrategies.cli import main

reason = missing()
pytestmark = [pytest.mark.cluster, pytest.mark.skipif(reason is not None, reason=str(reason))]


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with two_hosts() as made:
        yield made


def train(hosts: TwoHosts, number: int, *arguments: str, address: str = "alpha", port: int = 29511) -> Run:
    """Starts the quickstart on one of the hosts, as its user would by hand."""

    def run() -> None:
        os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port), NODE_RANK=str(number))
        sys.argv = [
            *("cnnstrategies", "fit", f"--config={ROOT / 'configs/quickstart.yaml'}"),
            *("--trainer.devices=1", "--trainer.num_nodes=2", "--trainer.enable_model_summary=false"),
            *("--trainer.enable_progress_bar=false", *arguments),
        ]
        main()

    return hosts.start(number, run)


def test_short_cuts_of_a_link_are_survived_and_long_ones_end_it(hosts: TwoHosts) -> None:
    """Over the interface that is named, and each tells the other's name."""
    network = ("--trainer.strategy=hybrid_pipeline", "--network.interface=10.77.9.0/24", "--network.timeout=10")
    few = ("--trainer.max_epochs=10000", "--trainer.limit_train_batches=5", "--trainer.limit_val_batches=1")
    runs = [train(hosts, number, *network, *few) for number in (0, 1)]
    path = cut_for_a_moment_and_for_good(hosts, *runs)
    assert [run.wait() for run in runs] == [1, 1], "\n".join(run.output() for run in runs)
    assert f"alpha has not reached beta ({hosts.addresses[1]}, node 1) for 10 s" in runs[0].output()
    assert f"beta has not reached alpha ({hosts.addresses[0]}, node 0) for 10 s" in runs[1].output()
    torch.load(path, weights_only=True)  # It is whole.


def test_hosts_that_do_not_find_each_other_say_why(hosts: TwoHosts) -> None:
    soon = "--network.wait=2"
    alone = train(hosts, 0, soon)
    nothing_listens = train(hosts, 1, soon, port=29512)
    no_such_host = train(hosts, 1, soon, address="10.77.9.3")
    wrong = [train(hosts, number, "--network.interface=extra", port=29513) for number in (0, 1)]
    runs = (alone, nothing_listens, no_such_host, *wrong)
    assert [run.wait() for run in runs] == [2] * 5, "\n".join(run.output() for run in runs)
    assert "alpha has waited 2 s for node 1" in alone.output()
    assert f"main address alpha ({hosts.addresses[0]}) on port 29512" in nothing_listens.output()
    assert "has rank 0 been started" in nothing_listens.output()
    assert "main address 10.77.9.3" in no_such_host.output()
    for run in wrong:
        assert "alpha (10.99.0.1 on extra) cannot reach beta (10.99.1.1, node 1)" in run.output()
        assert "--network.interface" in run.output()


def test_forked_ranks_on_several_hosts_are_refused(run_cli: Callable[..., tuple[int, str]], quick: list[str]) -> None:
    code, output = run_cli("fit", *quick, "--trainer.num_nodes=2")
    assert code == 2, output
    assert "trainer.num_nodes=2 with a strategy that forks" in output
