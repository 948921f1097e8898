"""The pods of a run on Kubernetes: what is rendered, against the real schemas, and what is refused."""

import importlib.util
import json
import os
import re
import subprocess
import threading
import time
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT

from cnnstrategies.cluster.job import Size
from cnnstrategies.cluster.kubernetes import manifests
from cnnstrategies.cluster.kubernetes.run import Run, server_script, trainer_script
from cnnstrategies.cluster.options import KubernetesOptions
from cnnstrategies.errors import ConfigurationError

pytestmark = pytest.mark.light


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"pip install {package.replace('_', '-')}")


def run(servers: int = 1, gpus: int = 8, **options: Any) -> Run:
    """With everything that the options can say, unless they say otherwise."""
    full: dict[str, Any] = {
        "image": "registry.example.com/cnn:1",
        "namespace": "vision",
        "queue": "users",
        "priority_class": "low",
        "node_selector": {"pool": "a100"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "resources": {"cpu": 8, "memory": "64Gi"},
        "server_resources": {"cpu": 2},
        "volumes": {"/runs": "runs"},
        "shared_memory": "8Gi",
        "key_secret": "run-key",
        "pull_secret": "registry",
        "user": 1000,
        "env": {"NCCL_SOCKET_IFNAME": "eth0"},
        **options,
    }
    folder = "/runs/cnn-1"
    checkpoints = f"{folder}/checkpoints"
    size, section = Size(2, 8, gpus), KubernetesOptions(**full)
    return Run("cnn-1", "fit", section, size, servers, False, folder, checkpoints, "a: 1\n", "python", (), "cmd")


def of_kind(kind: str, made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for one in made if one["kind"] == kind]


@needs("kubernetes_validate")
def test_jobs_fit_the_schemas_of_kubernetes():
    import kubernetes_validate

    # The TrainingRuntime's jobs are the same, but for their subdomain.
    fit = run(kind="job")
    for one in [*manifests.objects(fit), *manifests.objects(replace(fit, task="doctor"))]:
        for version in ("1.31", "1.35"):
            kubernetes_validate.validate(one, version, strict=True)


@needs("kubeflow_trainer_api")
def test_train_jobs_fit_the_schemas_of_kubeflow():
    from kubeflow_trainer_api import models

    _, runtime, train_job = manifests.objects(run())  # What the models do not know is gone from the second text.
    assert (
        models.TrainerV1alpha1TrainingRuntime.from_dict(runtime).to_dict() == runtime
    )  # What it does not know is gone.
    assert models.TrainerV1alpha1TrainJob.from_dict(train_job).to_dict() == train_job


def test_the_text_is_the_objects():
    """YAML that kubectl takes, without anchors, and with the script to read."""
    text = manifests.text(run())
    assert list(yaml.safe_load_all(text)) == manifests.objects(run())
    assert "&id" not in text
    assert "\\n" not in text
    assert "$$" not in text  # Kubernetes makes one of two.


def test_a_pod_has_what_training_needs():
    (job,) = [job for job in of_kind("Job", manifests.objects(run(kind="job"))) if job["metadata"]["name"] == "cnn-1"]
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert volumes["keys"]["secret"] == {"secretName": "run-key", "defaultMode": 0o400}
    assert "install -m 600" in container["command"][-1]
    assert container["resources"]["limits"] == {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "8"}
    assert pod["terminationGracePeriodSeconds"] - KubernetesOptions().grace == 10
    assert pod["securityContext"]["fsGroup"] == 1000
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "users"


def test_servers_are_a_job_of_their_own_which_the_run_does_not_wait_for():
    _, runtime, _ = manifests.objects(run(servers=3))
    spec = runtime["spec"]["template"]["spec"]
    assert spec["successPolicy"]["targetReplicatedJobs"] == ["node"]
    nodes, servers = spec["replicatedJobs"]
    assert (nodes["name"], nodes["template"]["spec"]["parallelism"]) == ("node", 2)
    assert (servers["name"], servers["template"]["spec"]["parallelism"]) == ("servers", 3)
    (container,) = servers["template"]["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"cpu": "2"}, "and no GPU"
    assert len(manifests.objects(run(servers=0, kind="job"))) == 3


def test_a_pod_that_was_evicted_or_stopped_is_started_again_without_counting():
    rules = manifests.objects(run(kind="job"))[-1]["spec"]["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["FailJob", "Ignore", "Ignore"]
    assert rules[0]["onExitCodes"]["values"] == [78]
    assert rules[1]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert rules[2]["onExitCodes"]["values"] == [143]


def test_the_image_is_made_of_what_is_there():
    """The Containerfile copies what it installs from, and its user is the recipe's."""
    steps = [line.split() for line in (ROOT / "Containerfile").read_text().splitlines() if line and line[0] != "#"]
    copied = {source for step, *words in steps if step == "COPY" for source in words[:-1]}
    assert all((ROOT / source).exists() for source in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = {"pyproject.toml", "constraints.txt", "cnnstrategies"}
    assert copied == {*packages, project["readme"], *project["license-files"]}
    recipe = yaml.safe_load((ROOT / "configs/cluster/kubernetes_gpu_nodes.yaml").read_text())
    assert ["USER", str(recipe["cluster"]["kubernetes"]["user"])] in steps


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grace_seconds": 15}, "at least 20"),
        ({"max_restarts": -1}, "negative"),
        ({"volumes": {"runs": "runs"}}, "from the root"),
        ({"volumes": {"/dev/shm/mine": "runs"}}, "outside of"),
        ({"env": {"PET_NNODES": "3"}}, "PET_NNODES could disagree"),
        ({"resources": {"memory": "64 GB"}}, "no quantity"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        KubernetesOptions(**options)


FAKE = """#!/bin/sh
case "$*" in
*import*) exit 0 ;;
*doctor*)
    echo "$NODE_RANK/$NNODES" "$@" > "$LOG"
    exit 0
    ;;
*server*)
    trap 'echo asked >> "$LOG"' TERM
    echo server >> "$LOG"
    while [ ! -e "$LOG.end" ]; do sleep 0.05; done
    rm "$LOG.end"
    exit 1
    ;;
esac
trap 'echo stopped >> "$LOG"; exit 143' TERM
echo started >> "$LOG"
while [ ! -e "$LOG.end" ]; do sleep 0.05; done
rm "$LOG.end"
exit $(cat "$LOG.code")
"""


class Pod:
    """A pod's script, run here with a program in the place of Python."""

    def __init__(self, folder: Path, script: str, node: int) -> None:
        self.log = folder / f"log{node}"
        if not (folder / "python").exists():  # Another pod may be about to start it.
            (folder / "python").write_text(FAKE)
            (folder / "python").chmod(0o755)
        path = f"{folder}:{os.environ['PATH']}"
        variables = {"PATH": path, "LOG": str(self.log), "NODE_RANK": str(node), "MASTER_ADDR": "localhost"}
        self.process = subprocess.Popen(["/bin/sh", "-c", script], env=variables)

    def wait_for(self, *lines: str) -> None:
        deadline = time.monotonic() + 30
        while not self.log.exists() or self.log.read_text().split() != list(lines):
            assert time.monotonic() < deadline, self.log.exists() and self.log.read_text()
            time.sleep(0.02)

    def end_program(self, code: int) -> None:
        Path(f"{self.log}.code").write_text(str(code))
        Path(f"{self.log}.end").touch()


def test_a_pods_script_passes_signals_on_and_ends_as_the_run_does(tmp_path: Path):
    """A trainer's with the run's exit code; a server's when the run has ended well, or has stopped on its signal."""
    folder = tmp_path / "run"
    this = replace(run(key_secret=None), folder=str(folder), goes_on=True)
    first = Pod(tmp_path, trainer_script(this), 0)
    server, drained = (Pod(tmp_path, server_script(this), node) for node in (7, 8))
    first.wait_for("started")
    server.wait_for("server")
    drained.wait_for("server")
    drained.process.terminate()
    drained.wait_for("server", "asked")  # It tells the run, and serves on until that has stopped.
    assert drained.process.poll() is None
    drained.end_program(0)
    assert drained.process.wait(30) == 143
    first.process.terminate()
    assert first.process.wait(30) == 143
    first.wait_for("started", "stopped")
    server.end_program(1)
    server.wait_for("server", "server")  # For the next start.
    lost = Pod(tmp_path, trainer_script(this), 1)
    lost.wait_for("started")
    again = Pod(tmp_path, trainer_script(this), 0)
    again.wait_for("started", "stopped", "started")
    again.end_program(0)
    assert again.process.wait(30) == 0
    assert server.process.wait(30) == 0
    lost.end_program(1)
    assert lost.process.wait(30) == 0  # The others have gone on without it.


def test_the_doctor_examines_the_servers_pods_after_the_trainers_at_their_own_port(tmp_path: Path):
    this = replace(run(servers=3, key_secret=None), folder=str(tmp_path / "run"), task="doctor")
    pods = [Pod(tmp_path, trainer_script(this), 1), Pod(tmp_path, server_script(this), 2)]
    assert [pod.process.wait(30) for pod in pods] == [0, 0]
    words = f"-m cnnstrategies doctor --shared {this.folder} --wait 1800"
    assert pods[0].log.read_text() == f"1/5 {words}\n"
    assert pods[1].log.read_text() == f"4/5 {words} --listen 29600\n"


class Api(BaseHTTPRequestHandler):
    """What a cluster answers; `missing` is a path, `gpus` are those of its only node."""

    missing: str | None = None
    groups: tuple[str, ...] = ("batch", "trainer.kubeflow.org")
    gpus = 8
    seen: list[tuple[str, str]]

    def do_GET(self) -> None:
        if self.missing and self.missing in self.path:
            return self.say(404, {"message": "not found"})
        if self.path.rstrip("/") == "/apis":
            versions = [{"groupVersion": "any/v1", "version": "v1"}]
            return self.say(200, {"groups": [{"name": name, "versions": versions} for name in self.groups]})
        nodes = [{"status": {"allocatable": {"nvidia.com/gpu": str(self.gpus)}}}]
        return self.say(200, {"items": nodes} if "/nodes" in self.path else {"data": {"run.key": "..."}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append(("POST", self.path))
        if self.missing and self.missing in self.path:
            return self.say(422, {"message": f"{body['kind']} is\ninvalid"})
        return self.say(201, body)

    def do_DELETE(self) -> None:
        self.seen.append(("DELETE", self.path.partition("?")[0]))
        self.say(200, {})

    def say(self, status: int, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Api]]:
    """A cluster that takes what it is sent, and the kubeconfig that leads to it."""
    handler = type("Answers", (Api,), {"seen": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    names = {"name": "here", "context": {"cluster": "here", "user": "me", "namespace": "vision"}}
    where = {"name": "here", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
    config = {"current-context": "here", "contexts": [names], "clusters": [where]}
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump({**config, "users": [{"name": "me", "user": {}}]}))
    # The client reads the variable when it is imported.
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))
    yield handler
    server.shutdown()
    server.server_close()


@needs("kubernetes")
def test_the_client_asks_before_it_makes_the_objects_in_order(api):
    from cnnstrategies.cluster.kubernetes.client import Cluster

    assert Cluster().start(run(namespace=None)) == "vision"
    root = "/namespaces/vision"
    trainer = f"/apis/trainer.kubeflow.org/v1alpha1{root}"
    dry = [("POST", f"/api/v1{root}/configmaps?dryRun=All"), ("POST", f"{trainer}/trainingruntimes?dryRun=All")]
    made = [f"/api/v1{root}/configmaps", f"{trainer}/trainingruntimes", f"{trainer}/trainjobs"]
    assert api.seen == [*dry, *(("POST", path) for path in made)]


@needs("kubernetes")
@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"groups": ("batch",)}, "no TrainJob: .*kind: job"),
        ({"gpus": 4}, "trainer.devices=8: no node with pool=a100 has more than 4 nvidia.com/gpu"),
        ({"missing": "persistentvolumeclaims/runs"}, "no claim runs for /runs"),
        ({"missing": "secrets/run-key"}, "no secret run-key .*kubectl create secret generic run-key -n vision"),
        ({"missing": "configmaps"}, r"refuses the run \(namespace vision\): ConfigMap is invalid"),
    ],
)
def test_what_the_cluster_does_not_take_is_said_before_anything_is_made(api, answers, message):
    from cnnstrategies.cluster.kubernetes.client import Cluster

    for name, value in answers.items():
        setattr(api, name, value)
    with pytest.raises(ConfigurationError, match=message):
        Cluster().start(run())
    assert not [path for _, path in api.seen if "dryRun" not in path]


@needs("kubernetes")
def test_what_was_made_is_removed_when_the_rest_is_refused(api):
    from cnnstrategies.cluster.kubernetes.client import Cluster

    api.missing = "trainjobs"  # It is not tried before: it needs its runtime.
    with pytest.raises(ConfigurationError, match="TrainJob is invalid"):
        Cluster().start(run())
    removed = [path.rpartition("/")[0].rpartition("/")[2] for method, path in api.seen if method == "DELETE"]
    assert removed == ["trainingruntimes", "configmaps"]


@needs("kubernetes")
def test_a_cluster_that_does_not_answer_is_named(api, monkeypatch, tmp_path):
    from cnnstrategies.cluster.kubernetes.client import Cluster

    path = tmp_path / "kubeconfig"
    path.write_text(re.sub(r":\d+\n", ":1\n", path.read_text()))
    with pytest.raises(ConfigurationError, match=r"no Kubernetes cluster answers at http://127.0.0.1:1 .*is it up"):
        Cluster().start(run())
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    with pytest.raises(ConfigurationError, match=r"no Kubernetes cluster is configured here .*KUBECONFIG"):
        Cluster()
