"""The pods of a run, each on a host of its own: the run goes on after a pod is drained or lost."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from cnnstrategies.cluster import kubernetes
from cnnstrategies.cluster.launchers import launcher_named
from cnnstrategies.commands.submit.command import check
from cnnstrategies.paramserver.security import KeyPair
from tests.cluster.hosts import Network, missing, network
from tests.cluster.pods import Pod
from tests.cluster.processes_of import wait_until
from tests.conftest import ROOT

reason = missing()
pytestmark = [pytest.mark.cluster, pytest.mark.skipif(reason is not None, reason=str(reason))]

QUICKSTART = f"--config={ROOT / 'configs/quickstart.yaml'}"
ENDLESS = 100000  # Number of epochs until the run is interrupted; then it gets a small number.
SECTION = f"""
trainer:
  num_nodes: 2
  devices: 1
  limit_train_batches: 5
  limit_val_batches: 1
  max_epochs: {ENDLESS}
  enable_progress_bar: false
cluster:
  kubernetes: {{image: cnn, volumes: {{/mnt: runs}}, grace_seconds: 120}}
"""


class Run:
    """A run from the submitted YAML, with its pods."""

    def __init__(self, net: Network, keys: Path, name: str, *args: str) -> None:
        file = net.folder / f"{name}.yaml"
        file.write_text(SECTION)
        base = check([QUICKSTART, f"--config={file}", f"--cluster.job_name={name}", *args])
        rendered = base.job(launcher_named("kubernetes"), "cnnstrategies submit fit").run
        configuration, _, *jobs = yaml.safe_load_all(kubernetes.text(rendered))
        self.configuration = yaml.safe_load(configuration["data"]["config.yaml"])
        pods = [[Pod(net, job, index, keys) for index in range(job["spec"]["completions"])] for job in jobs]
        self.trainers, self.servers = pods[-1], [pod for others in pods[:-1] for pod in others]
        self.pods = [*self.servers, *self.trainers]
        self.last = net.folder / "claims/runs" / rendered.name / "checkpoints/last.ckpt"
        for pod in self.pods:
            self.start(pod)

    def start(self, pod: Pod) -> None:
        pod.start(yaml.safe_dump(self.configuration), self.pods)

    def has_succeeded(self) -> bool:
        """Start failed pods again, as the Job controller does, and return whether all pods have succeeded."""
        for pod in self.pods:
            if pod.has_failed():
                assert "FailJob" not in pod.actions(), self.output()
                assert pod.actions().count("Count") < 3, self.output()
                if self.configuration["trainer"]["max_epochs"] == ENDLESS:
                    self.configuration["trainer"]["max_epochs"] = self.checkpoint()["epoch"] + 3
                self.start(pod)
        return all(pod.run.code == 0 for pod in self.pods)

    def checkpoint(self) -> dict[str, Any]:
        result: dict[str, Any] = torch.load(self.last, weights_only=True)
        return result

    def output(self) -> str:
        return "\n".join(f"{pod.name} {pod.codes}:\n{pod.run.output()}" for pod in self.pods)


@pytest.fixture
def net() -> Iterator[Network]:
    with network() as made:
        yield made


def test_runs_go_on_after_pods_are_drained_or_lost(net: Network, tmp_path: Path) -> None:
    """The pipeline loses a node; the parameter server's server is drained."""
    keys = tmp_path / "keys"
    keys.mkdir()
    KeyPair.create().save(keys / "run.key")
    strategy = ("--trainer.strategy=ParameterServerStrategy", "--trainer.strategy.init_args.timeout=20")
    servers = ("--cluster.server_nodes=1", "--cluster.kubernetes.key_secret=run-key")
    hybrid = Run(net, keys, "hybrid", "--trainer.strategy=hybrid_pipeline")
    parameters = Run(net, keys, "ps", *strategy, *servers)
    (server,) = parameters.servers
    interruptions: dict[Run, Callable[[], None]] = {
        hybrid: hybrid.trainers[1].host.kill_all,
        parameters: server.drain,
    }
    runs = list(interruptions)

    def all_have_succeeded() -> bool:
        for run in [run for run in interruptions if run.last.exists()]:
            interruptions.pop(run)()
        succeeded = [run.has_succeeded() for run in runs]
        return not interruptions and all(succeeded)

    wait_until(all_have_succeeded, lambda: "\n".join(run.output() for run in runs), seconds=200)
    assert [pod.codes for pod in parameters.pods] == [[143, 0]] * 3, parameters.output()
    assert [pod.codes[-1] for pod in hybrid.trainers] == [0, 0], hybrid.output()
    for run in runs:
        assert run.trainers[0].run.output().count("Restored all states") == 1, run.output()
        assert run.checkpoint()["global_step"] == 5 * run.configuration["trainer"]["max_epochs"], run.output()
