"""The pods of a run on Kubernetes: what is rendered, against the real schemas, and what is refused."""

import importlib.util
import json
import os
import re
import shutil
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

from cnnstrategies.cluster import kubernetes
from cnnstrategies.cluster.job import Size
from cnnstrategies.cluster.kubernetes import Run, server_script, trainer_script
from cnnstrategies.cluster.options import KubernetesOptions
from cnnstrategies.commands.submit.kubernetes import create
from cnnstrategies.errors import ConfigurationError

pytestmark = pytest.mark.light


def run(**options: Any) -> Run:
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
    return Run(
        "cnn-1", "fit", KubernetesOptions(**full), Size(2, 8, 8), 3, False, "/runs", "a: 1\n", "python", (), "cmd"
    )


@pytest.mark.skipif(importlib.util.find_spec("kubernetes_validate") is None, reason="pip install kubernetes-validate")
def test_the_objects_fit_the_schemas_of_kubernetes():
    import kubernetes_validate

    for one in [*kubernetes.objects(run()), *kubernetes.objects(replace(run(), task="doctor"))]:
        for version in ("1.31", "1.35"):
            kubernetes_validate.validate(one, version, strict=True)


def test_the_text_is_the_objects():
    """YAML that kubectl takes, without anchors, and with the script to read."""
    text = kubernetes.text(run())
    assert list(yaml.safe_load_all(text)) == kubernetes.objects(run())
    assert "&id" not in text
    assert "\\n" not in text
    assert "$$" not in text  # Kubernetes makes one of two.


def test_pods_have_what_training_needs_and_may_be_evicted():
    _, service, servers, job = kubernetes.objects(run())
    assert service["spec"]["selector"] == job["spec"]["template"]["metadata"]["labels"]
    assert (job["metadata"]["name"], job["spec"]["parallelism"]) == ("cnn-1", 2)
    assert (servers["metadata"]["name"], servers["spec"]["parallelism"]) == ("cnn-1-servers", 3)
    (container,) = servers["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"cpu": "2"}, "and no GPU"
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "8"}
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in container["volumeMounts"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert pod["terminationGracePeriodSeconds"] - KubernetesOptions().grace == 10
    assert pod["securityContext"]["fsGroup"] == 1000
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "users"
    rules = job["spec"]["podFailurePolicy"]["rules"]
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


FAKE = """#!/bin/sh
case "$*" in
*import*) exit 0 ;;
*doctor*) echo "$NODE_RANK/$NNODES" "$@" > "$LOG"; exit 0 ;;
*server*) trap 'echo asked >> "$LOG"' TERM; echo server >> "$LOG" ;;
*) trap 'echo stopped >> "$LOG"; exit 143' TERM; echo started >> "$LOG" ;;
esac
while [ ! -e "$LOG.end" ]; do sleep 0.05; done
code=$(cat "$LOG.end")
rm "$LOG.end"
exit $code
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
        whole = Path(f"{self.log}.code")
        whole.write_text(str(code))
        whole.rename(f"{self.log}.end")


def test_a_pods_script_passes_signals_and_the_runs_exit_code(tmp_path: Path):
    """A trainer's with the run's exit code; a server's when the run has ended well, or has stopped on its signal."""
    this = replace(run(key_secret=None), folder=str(tmp_path / "run"), goes_on=True)
    first = Pod(tmp_path, trainer_script(this), 0)
    server, drained = (Pod(tmp_path, server_script(this), node) for node in (7, 8))
    first.wait_for("started")
    server.wait_for("server")
    drained.wait_for("server")
    drained.process.terminate()
    drained.wait_for("server", "asked")  # It tells the run, and serves on until that has stopped.
    assert drained.process.poll() is None
    drained.end_program(1)
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


def test_the_doctor_examines_the_servers_pods_after_the_trainers(tmp_path: Path):
    this = replace(run(key_secret=None), folder=str(tmp_path / "run"), task="doctor")
    pods = [Pod(tmp_path, trainer_script(this), 1), Pod(tmp_path, server_script(this), 2)]
    assert [pod.process.wait(30) for pod in pods] == [0, 0]
    words = f"-m cnnstrategies doctor --shared {this.folder} --wait 1800"
    assert [pod.log.read_text() for pod in pods] == [f"1/5 {words}\n", f"4/5 {words}\n"]


def discovery() -> Iterator[tuple[str, dict[str, Any]]]:
    """What kubectl asks for first, by path: the kinds of objects, and whether these are validated."""
    version = {"groupVersion": "batch/v1", "version": "v1"}
    group = {"name": "batch", "versions": [version], "preferredVersion": version}
    core = ["ConfigMap", "Service", "Node", "Secret", "PersistentVolumeClaim"]
    groups = {"api/v1": ("", core), "apis/batch/v1": ("batch", ["Job"])}
    yield "api", {"kind": "APIVersions", "versions": ["v1"]}
    yield "apis", {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]}
    yield "openapi/v3", {"paths": {path: {"serverRelativeURL": f"/openapi/v3/{path}"} for path in groups}}
    for path, (name, kinds) in groups.items():
        resources, known = [], {}
        for kind in kinds:
            verbs = ["create", "delete", "get", "list", "patch"]
            own = {"name": f"{kind.lower()}s", "kind": kind, "namespaced": kind != "Node", "verbs": verbs}
            resources.append(own)
            which = {"group": name, "version": "v1", "kind": kind}
            validates = [{"name": parameter, "in": "query"} for parameter in ("fieldValidation", "dryRun")]
            known[f"/{kind}"] = {"patch": {"parameters": validates, "x-kubernetes-group-version-kind": which}}
        listed = f"{name}/v1".removeprefix("/")
        yield path, {"kind": "APIResourceList", "groupVersion": listed, "resources": resources}
        yield f"openapi/v3/{path}", {"openapi": "3.0.0", "info": {"title": "", "version": ""}, "paths": known}


DISCOVERY = dict(discovery())


class Api(BaseHTTPRequestHandler):
    """What a cluster answers kubectl; `missing` is a part of the path of what it refuses."""

    missing: str | None = None
    status = 404
    seen: list[tuple[str, str]]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        if path in DISCOVERY:
            return self.say(200, DISCOVERY[path])
        return self.refuse("not found")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        path, _, query = self.path.partition("?")
        dry = "dryRun=All" in query
        self.seen.append(("TRY" if dry else "POST", path.rpartition("/")[2]))
        if self.missing and self.missing in path and not (self.status == 500 and dry):
            return self.refuse(f"{body['kind']} is\ninvalid")
        return self.say(201, body)

    def do_DELETE(self) -> None:
        self.seen.append(("DELETE", self.path.partition("?")[0].split("/")[-2]))
        self.say(200, {"kind": "Status", "apiVersion": "v1", "status": "Success"})

    def refuse(self, message: str) -> None:
        reason = {403: "Forbidden", 404: "NotFound"}.get(self.status, "Invalid")
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "reason": reason}
        self.say(self.status, {**status, "code": self.status})

    def say(self, status: int, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
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
    context = {"name": "here", "context": {"cluster": "here", "user": "me"}}
    where = {"name": "here", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
    config = {"apiVersion": "v1", "kind": "Config", "current-context": "here", "contexts": [context]}
    config |= {"clusters": [where], "users": [{"name": "me", "user": {}}]}
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(path))
    monkeypatch.setenv("KUBECACHEDIR", str(tmp_path))
    yield handler
    server.shutdown()
    server.server_close()


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_the_cluster_checks_all_objects_and_then_all_are_made_or_none(api, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(api, "missing", "configmaps")
        patch.setattr(api, "status", 422)
        with pytest.raises(ConfigurationError, match=r"refuses the run: .*ConfigMap is invalid"):
            create(run())
    assert not [name for method, name in api.seen if method == "POST"]
    api.seen.clear()
    create(run())
    made = ["configmaps", "services", "jobs", "jobs"]
    assert api.seen == [*(("TRY", name) for name in made), *(("POST", name) for name in made)]
    api.missing, api.status = "jobs", 500  # Only when they are made.
    with pytest.raises(ConfigurationError, match=r"refuses the run: .*Job is invalid"):
        create(run())
    assert [name for method, name in api.seen if method == "DELETE"] == ["configmaps", "services"]
    path = tmp_path / "kubeconfig"
    path.write_text(re.sub(r":\d+\n", ":1\n", path.read_text()))
    with pytest.raises(ConfigurationError, match=r"127.0.0.1:1\b.*kubectl config get-contexts"):
        create(run())
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match="kubectl is not found"):
        create(run())
