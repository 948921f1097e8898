"""The rendered pods of a run, each on a host of its own: one is drained or lost, and all go on."""

import json
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

from cnnstrategies.cluster.kubernetes import manifests
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

    def __init__(self, cluster: Cluster, keys: Path, name: str, *args: str, task: str = "fit") -> None:
        file = cluster.folder / f"{name}.yaml"
        file.write_text(SECTION)
        words = [QUICKSTART, f"--config={file}", f"--cluster.job_name={name}", "--trainer.enable_progress_bar=false"]
        self.target = KubernetesTarget(check([*words, *args]), f"cnnstrategies submit {task}", task)
        self.cluster, self.keys = cluster, keys
        made = list(yaml.safe_load_all(manifests.text(self.target.run)))
        self.configuration = made[0]["data"]["config.yaml"]
        self.jobs: list[tuple[dict[str, Any], list[Pod]]] = []
        full = self.target.run.name
        for job in (one for one in made if one["kind"] == "Job"):
            subdomain = job["spec"]["template"]["spec"]["subdomain"]
            self.jobs.append((job["spec"], cluster.add(job["spec"], job["metadata"]["name"], subdomain)))
        for runtime in (one for one in made if one["kind"] == "TrainingRuntime"):
            for job in runtime["spec"]["template"]["spec"]["replicatedJobs"]:
                spec = job["template"]["spec"]
                self.jobs.append((spec, cluster.add(spec, f"{full}-{job['name']}-0", full)))
        self.trainers = next(pods for _, pods in self.jobs if len(pods) == 2)
        self.last = Path(str(cluster.shared / "runs" / full)) / "checkpoints/last.ckpt"
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


def test_pods_that_are_drained_or_lost_go_on_with_every_strategy(cluster: Cluster, tmp_path: Path) -> None:
    """ddp: not rank 0's node is drained; pipeline: a node is lost; parameter server: the server's is drained."""
    keys = tmp_path / "keys"
    keys.mkdir()
    KeyPair.create().save(keys / "run.key")
    server = [f"{SERVER}.timeout=20", "--cluster.server_nodes=1", "--cluster.kubernetes.key_secret=run-key"]
    ddp = Run(cluster, keys, "ddp", "--trainer.strategy=ddp")
    hybrid = Run(cluster, keys, "hybrid", "--trainer.strategy=hybrid_pipeline", "--cluster.kubernetes.kind=job")
    parameters = Run(cluster, keys, "ps", "--trainer.strategy=ParameterServerStrategy", *server)
    (server_pod,) = next(pods for _, pods in parameters.jobs if len(pods) == 1)
    interruptions = {
        ddp: ddp.trainers[1].terminate,
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
    wait_for(lambda: list(map(Run.watch, runs)) == [True] * 3, output)
    for run, codes in ((ddp, [143, 0]), (parameters, [143, 0])):
        assert [pod.codes for pod in run.trainers] == [codes, codes], run.output()
    assert server_pod.codes == [143, 0], parameters.output()
    assert [pod.codes[-1] for pod in hybrid.trainers] == [0, 0], hybrid.output()
    for run in runs:
        log = run.trainers[0].log.read_text()
        assert log.count("Restored all states") == 1, log
        epochs = yaml.safe_load(run.configuration)["trainer"]["max_epochs"]
        assert run.checkpoint()["global_step"] == 5 * epochs, run.output()


def test_the_doctor_names_what_a_pod_lacks(cluster: Cluster, tmp_path: Path) -> None:
    """A service that selects another pod, little shared memory, and policies that do not let training through."""
    hosts = [f"10.77.8.{number}" for number in (4, 5, 6)]  # After the first run's: of a server, and two nodes.
    lines = [
        'pod=$NODE_RANK; case "$HOSTNAME" in *-servers-*) pod=server ;; esac',
        f'[ $pod != 0 ] || echo "{hosts[2]} $MASTER_ADDR" > /etc/hosts',
        "[ $pod = 1 ] || mount -o remount,size=64m /dev/shm",
        f"[ $pod = 0 ] || ip rule add to {hosts[1]} ipproto tcp dport 29501-65534 prohibit",  # A server needs none.
        f"[ $pod != 0 ] || ip rule add to {hosts[0]} ipproto tcp dport 29600 prohibit",
    ]
    setup = f"--cluster.setup={json.dumps(lines)}"
    server = ["--trainer.strategy=ParameterServerStrategy", f"{SERVER}.security=none", "--cluster.server_nodes=1"]
    well = Run(cluster, tmp_path, "well", *server, task="doctor")
    ill = Run(cluster, tmp_path, "ill", *server, setup, "--cluster.kubernetes.kind=job", task="doctor")
    pods = cluster.pods
    third, first, second = pods[3:]
    assert [pod.address for pod in pods[3:]] == hosts

    def output() -> str:
        return well.output() + ill.output()

    wait_for(lambda: all(pod.poll() is not None for pod in pods), output)
    assert [pod.code for pod in pods] == [0, 0, 0, 0, 1, 0], output()
    assert "All 3 hosts agree, reach each other and share /mnt/well-" in well.output()
    mends = [line for line in ill.trainers[0].log.read_text().splitlines() if line.startswith("mend: ")]
    beginnings = [
        f"mend: the main address leads to {hosts[2]}, and {first.name} has {hosts[1]}: see that the headless service",
        f"mend: {first.name} cannot reach {second.name} at {hosts[2]} port ",  # What answers goes to other ports, too.
        f"mend: {second.name} cannot reach {first.name} at {hosts[1]} port ",
        f"mend: {first.name} cannot reach {third.name} at {hosts[0]} port 29600 ",
        f"mend: {first.name} has 64 MiB of shared memory",
        f"mend: {third.name} has 64 MiB of shared memory",
    ]
    assert len(mends) == len(beginnings), output()
    assert all(any(line.startswith(begin) for line in mends) for begin in beginnings), output()
