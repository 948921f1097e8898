"""Training across two hosts, which are network namespaces with addresses and names of their own."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from cnnstrategies.cli import main
from tests.cluster.hosts import Network, Run, missing, two_hosts
from tests.cluster.processes_of import wait_until
from tests.conftest import ROOT
from tests.runner import warm

reason = missing()
pytestmark = [pytest.mark.cluster, pytest.mark.skipif(reason is not None, reason=str(reason))]

SERVER = "--trainer.strategy.init_args"
ENDLESS = ("--trainer.max_epochs=10000", "--trainer.limit_train_batches=5", "--trainer.limit_val_batches=1")


@pytest.fixture
def hosts() -> Iterator[Network]:
    with two_hosts() as made:
        yield made


def train(hosts: Network, node: int, *arguments: str, address: str = "alpha", port: int = 29511) -> Run:
    """Start the quickstart on one of the hosts, as a user would by hand."""

    def run() -> None:
        os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port), NODE_RANK=str(node))
        os.environ["PYTHONPATH"] = str(ROOT)
        warm.install()  # The program may start itself again for each rank; this helper is on the same host.
        sys.argv = [
            *(str(ROOT / "cli.py"), "fit", f"--config={ROOT / 'configs/quickstart.yaml'}"),
            *("--trainer.devices=1", "--trainer.num_nodes=2", "--trainer.enable_model_summary=false"),
            *("--trainer.enable_progress_bar=false", *arguments),
        ]
        main()

    return hosts.start(hosts.hosts[node], run)


def written(since: int, runs: list[Run]) -> Path:
    """Wait until the checkpoint is written after the time `since`, in nanoseconds, and return its path."""

    def newer() -> list[Path]:
        paths = Path("runs").glob("*/*/checkpoints/last.ckpt")
        return [path for path in paths if path.stat().st_mtime_ns > since]

    return wait_until(newer, lambda: "\n".join(run.output() for run in runs))[0]


def test_a_run_survives_a_short_link_failure_and_ends_after_a_long_one(hosts: Network) -> None:
    """The hosts use the configured interface, and each host names the other in its error message."""
    network = ("--interconnect.interface=10.77.9.0/24", "--interconnect.timeout=10")
    runs = [train(hosts, node, "--trainer.strategy=hybrid_pipeline", *network, *ENDLESS) for node in (0, 1)]
    path = written(0, runs)
    hosts.hosts[1].set_link("down")
    time.sleep(2)  # By then no packet is on its way any more.
    hosts.hosts[1].set_link("up")
    written(path.stat().st_mtime_ns, runs)
    hosts.hosts[1].set_link("down")
    codes = [run.wait() for run in runs]
    alpha, beta = (run.output() for run in runs)
    assert 0 not in codes, f"{alpha}\n{beta}"
    torch.load(path, weights_only=True)  # Fails if the checkpoint is incomplete.
    assert "alpha has not reached beta (10.77.9.2, node 1) for 10 s" in alpha
    assert "beta has not reached alpha (10.77.9.1, node 0) for 10 s" in beta


class Dies(Callback):
    """Kills rank 2, the first rank of the second node, within an epoch, and saves the other ranks' final weights."""

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_rank == 2 and trainer.global_step == 7:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.save([parameter.detach() for parameter in pl_module.parameters()], f"rank{trainer.global_rank}.pt")


def test_a_node_with_combined_pushes_survives_the_death_of_its_first_rank(hosts: Network) -> None:
    arguments = [
        "--trainer.strategy=ParameterServerStrategy",
        *(f"{SERVER}.timeout=10", f"{SERVER}.combine_per_node=true", f"{SERVER}.security=none"),
        *("--trainer.devices=2", "--trainer.max_epochs=2", "--trainer.limit_train_batches=15"),
        "--trainer.callbacks+=tests.cluster.test_hosts.Dies",
    ]
    runs = [train(hosts, node, *arguments) for node in (0, 1)]
    codes = [run.wait() for run in runs]
    outputs = [run.output() for run in runs]
    assert codes == [0, 0], "\n".join(outputs)
    assert "one push for each node" in outputs[0]
    assert "was killed by SIGKILL; it is not replaced" in outputs[1]
    first, *others = [torch.load(f"rank{rank}.pt") for rank in (0, 1, 3)]
    for other in others:
        assert all(map(torch.equal, first, other))
    assert torch.load(next(Path("runs").rglob("last.ckpt")), weights_only=True)["global_step"] == 30


def test_hosts_that_do_not_find_each_other_say_why(hosts: Network) -> None:
    soon = "--interconnect.wait=2"
    alone = train(hosts, 0, soon)
    nothing_listens = train(hosts, 1, soon, port=29512)
    no_such_host = train(hosts, 1, soon, address="10.77.9.3")
    wrong = [train(hosts, node, "--interconnect.interface=extra", port=29513) for node in (0, 1)]
    without_keys = train(hosts, 0, "--trainer.strategy=parameter_server", port=29531)  # One port is for one run.
    runs = (alone, nothing_listens, no_such_host, without_keys, *wrong)
    assert [run.wait() for run in runs] == [2] * 6, "\n".join(run.output() for run in runs)
    assert "alpha has waited 2 s for node 1" in alone.output()
    assert "main address alpha (10.77.9.1) on port 29512" in nothing_listens.output()
    assert "check that rank 0 was started" in nothing_listens.output()
    assert "main address 10.77.9.3" in no_such_host.output()
    assert "--make-keys" in without_keys.output()
    for run in wrong:
        assert "alpha (10.99.0.1 on extra) cannot reach beta (10.99.1.1, node 1)" in run.output()
        assert "--interconnect.interface" in run.output()


def test_forked_ranks_on_several_hosts_are_refused(run_cli: Callable[..., tuple[int, str]], quick: list[str]) -> None:
    code, output = run_cli("fit", *quick, "--trainer.num_nodes=2")
    assert code == 2, output
    assert "trainer.num_nodes=2 cannot be used with a strategy that forks" in output
