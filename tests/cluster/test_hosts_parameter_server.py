"""The parameter server across two hosts: network namespaces with addresses and names of their own."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import warm
from cluster.two_hosts import Run, TwoHosts, cut_for_a_moment_and_for_good, missing, two_hosts
from conftest import ROOT

from cnnstrategies.cli import main
from cnnstrategies.paramserver.security import KeyPair

reason = missing()
pytestmark = [pytest.mark.cluster, pytest.mark.skipif(reason is not None, reason=str(reason))]

TIMEOUT = 10


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with two_hosts() as made:
        yield made


def train(hosts: TwoHosts, number: int, *arguments: str) -> Run:
    """Starts the quickstart on one of the hosts, as its user would by hand."""

    words = [
        *(str(ROOT / "cli.py"), "fit", f"--config={ROOT / 'configs/quickstart.yaml'}"),
        *("--trainer.devices=1", "--trainer.num_nodes=2", "--trainer.enable_model_summary=false"),
        *("--trainer.enable_progress_bar=false", "--trainer.strategy=ParameterServerStrategy"),
        *(f"--trainer.strategy.init_args.timeout={TIMEOUT}", *arguments),
    ]
    names = {"MASTER_ADDR": "alpha", "MASTER_PORT": "29512", "NODE_RANK": str(number), "OMP_NUM_THREADS": "1"}
    # It starts itself again for each rank, warm: by a helper that is on the same host.

    def run() -> None:
        os.environ.update(names, PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'tests'}")
        warm.install()
        sys.argv = words
        main()

    return hosts.start(number, run)


def test_encrypted_runs_survive_short_cuts_and_end_at_long_ones(hosts: TwoHosts) -> None:
    open_network = train(hosts, 0)
    assert open_network.wait() == 2
    assert "--make-keys" in open_network.output()
    KeyPair.create().save("run.key")
    arguments = ("--trainer.strategy.init_args.key_file=run.key", "--trainer.max_epochs=10000")
    limits = ("--trainer.limit_train_batches=5", "--trainer.limit_val_batches=1")
    runs = [train(hosts, number, *arguments, *limits) for number in (0, 1)]
    path = cut_for_a_moment_and_for_good(hosts, *runs)
    codes = [run.wait() for run in runs]
    outputs = [run.output() for run in runs]
    assert 0 not in codes, "\n".join(outputs)
    assert "server 1" in outputs[0], outputs[0]
    assert "coordinator" in outputs[1], outputs[1]
    torch.load(path, weights_only=True)  # It is whole.


def test_a_node_that_pushes_once_survives_its_leader(hosts: TwoHosts) -> None:
    strategy = {"combine": "true", "security": "none"}
    arguments = [
        *(f"--trainer.strategy.init_args.{name}={value}" for name, value in strategy.items()),
        *("--trainer.devices=2", "--trainer.max_epochs=2", "--trainer.limit_train_batches=15"),
        *("--trainer.callbacks+=cluster.diary.Diary", "--trainer.callbacks+=cluster.diary.Dies"),
    ]
    runs = [train(hosts, number, *arguments) for number in (0, 1)]
    codes = [run.wait() for run in runs]
    outputs = [run.output() for run in runs]
    assert codes == [0, 0], "\n".join(outputs)
    assert "one push for each node" in outputs[0]
    assert "was killed by SIGKILL; it is not replaced" in outputs[1]
    last = [Path(f"diary-{rank}").read_text().splitlines()[-1] for rank in (0, 1, 3)]
    assert last[0] == last[1] == last[2], "all end with the same weights"
    assert torch.load(next(Path("runs").rglob("last.ckpt")), weights_only=True)["global_step"] == 30
