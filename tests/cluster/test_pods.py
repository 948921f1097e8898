"""The rendered pods of a run, each on a host of its own: one is drained or lost, and all go on."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cluster.pods import Cluster, Pod, starts_again, wait_for
from cluster.two_hosts import missing
from conftest import ROOT

from cnnstrategies.cluster import manifests
from cnnstrategies.commands.submit.command import check
from cnnstrategies.commands.submit.kubernetes import KubernetesTarget
from cnnstrategies.paramserver.security import KeyPair

reason = missing()
pytestmark = [pytest.mark.cluster, pytest.mark.skipif(reason is not None, reason=str(reason))]

QUICKSTART = f"--config={ROOT / 'configs/quickstart.yaml'}"
SERVER = "--trainer.strategy.init_args"
SECTION = """
trainer: {num_nodes: 2, devices: 1, limit_train_batches: 5, limit_val_batches: 1, max_epochs: 100000}
cluster:
  kubernetes: {image: cnn, volumes: {/mnt: runs}, grace_seconds: 120}
"""


class Run:
    """A run as it was rendered, and its pods."""

    def __init__(self, cluster: Cluster, keys: Path, name: str, *args: str) -> None:
        file = cluster.folder / f"{name}.yaml"
        file.write_text(SECTION)
        words = [QUICKSTART, f"--config={file}", f"--cluster.job_name={name}", "--trainer.enable_progress_bar=false"]
        self.target = KubernetesTarget(check([*words, *args]), "cnnstrategies submit fit")
        self.cluster, self.keys = cluster, keys
        made = list(yaml.safe_load_all(manifests.text(self.target.run)))
        self.configuration = made[0]["data"]["config.yaml"]
        self.jobs: list[tuple[dict[str, Any], list[Pod]]] = []
        for job in (one for one in made if one["kind"] == "Job"):
            subdomain = job["spec"]["template"]["spec"]["subdomain"]
            self.jobs.append((job["spec"], cluster.add(job["spec"], job["metadata"]["name"], subdomain)))
        self.trainers = next(pods for _, pods in self.jobs if len(pods) == 2)
        self.last = Path(str(cluster.shared / "runs" / self.target.run.name)) / "checkpoints/last.ckpt"
        for _, pods in self.jobs:
            for pod in pods:
                cluster.start(pod, self.configuration, keys)

    def watch(self) -> bool:
        """Do what the controller of Jobs does; whether all trainers have succeeded."""
        for job, pods in self.jobs:
            for pod in pods:
                code = pod.poll()
                if code is None or code == 0:
                    continue
                assert starts_again(job, code) != "FailJob", self.output()
                assert sum(starts_again(job, code) == "Count" for code in pod.codes) < 3, self.output()
                self.cluster.start(pod, self._finite(), self.keys)
        return all(pod.poll() == 0 for _, pods in self.jobs for pod in pods)

    def _finite(self) -> str:
        """The configuration, with two more epochs than there were: the runs are endless until one is interrupted."""
        configuration = yaml.safe_load(self.configuration)
        if configuration["trainer"]["max_epochs"] == 100000:
            configuration["trainer"]["max_epochs"] = self.checkpoint()["epoch"] + 3
            self.configuration = yaml.safe_dump(configuration)
        return self.configuration

    def checkpoint(self) -> dict[str, Any]:
        result: dict[str, Any] = torch.load(self.last, weights_only=True)
        return result

    def output(self) -> str:
        logs = [(pod.name, pod.codes, pod.log) for _, pods in self.jobs for pod in pods]
        return "\n".join(f"{name} {codes}:\n{log.read_text(errors='replace')}" for name, codes, log in logs)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory() as folder:
        made = Cluster(Path(folder))
        try:
            yield made
        finally:
            made.remove()


def test_pods_that_are_drained_or_lost_go_on(cluster: Cluster, tmp_path: Path) -> None:
    """Pipeline: a node is lost; parameter server: the server's is drained."""
    keys = tmp_path / "keys"
    keys.mkdir()
    KeyPair.create().save(keys / "run.key")
    server = [f"{SERVER}.timeout=20", "--cluster.server_nodes=1", "--cluster.kubernetes.key_secret=run-key"]
    hybrid = Run(cluster, keys, "hybrid", "--trainer.strategy=hybrid_pipeline")
    parameters = Run(cluster, keys, "ps", "--trainer.strategy=ParameterServerStrategy", *server)
    (server_pod,) = next(pods for _, pods in parameters.jobs if len(pods) == 1)
    interruptions = {
        hybrid: hybrid.trainers[1].kill,
        parameters: server_pod.terminate,
    }
    runs = list(interruptions)

    def output() -> str:
        return "\n".join(run.output() for run in runs)

    def all_interrupted() -> bool:
        for run in [run for run in interruptions if run.last.exists()]:
            interruptions.pop(run)()
        for run in interruptions:
            run.watch()
        return not interruptions

    wait_for(all_interrupted, output)
    wait_for(lambda: list(map(Run.watch, runs)) == [True, True], output)
    assert [pod.codes for pod in parameters.trainers] == [[143, 0], [143, 0]], parameters.output()
    assert server_pod.codes == [143, 0], parameters.output()
    assert [pod.codes[-1] for pod in hybrid.trainers] == [0, 0], hybrid.output()
    for run in runs:
        log = run.trainers[0].log.read_text()
        assert log.count("Restored all states") == 1, log
        epochs = yaml.safe_load(run.configuration)["trainer"]["max_epochs"]
        assert run.checkpoint()["global_step"] == 5 * epochs, run.output()
