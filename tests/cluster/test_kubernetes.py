"""The objects of a run on Kubernetes match Kubernetes' schemas, and their scripts and creation work."""

import importlib.util
import json
import os
import subprocess
import time
import tomllib
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cnnstrategies.cluster import kubernetes
from cnnstrategies.cluster.job import Size
from cnnstrategies.cluster.kubernetes import PodRun, server_script, trainer_script
from cnnstrategies.cluster.kubernetes_fields import FIELDS
from cnnstrategies.cluster.launchers.kubernetes import create
from cnnstrategies.cluster.options import KubernetesOptions
from cnnstrategies.errors import ConfigurationError
from tests.conftest import ROOT

pytestmark = pytest.mark.light

# A container that the Pod Security Standard "restricted" accepts.
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
SECRET = {"valueFrom": {"secretKeyRef": {"name": "tokens", "key": "wandb"}}}
VERSIONS = ("1.31", "1.35", "1.37")


def run(**options: Any) -> PodRun:
    """Return a run with a value for every option; `options` replaces values."""
    full: dict[str, Any] = {
        "image": "registry.example.com/cnn:1",
        "namespace": "vision",
        "queue": "users",
        "pod": {"nodeSelector": {"pool": "a100"}, "securityContext": {"fsGroup": 1000}},
        "container": {"securityContext": RESTRICTED, "envFrom": [{"secretRef": {"name": "tokens"}}]},
        "resources": {"cpu": 4.5, "memory": "64Gi"},
        "server_resources": {"cpu": 2},
        "volumes": {"/runs": "runs"},
        "shared_memory": "8Gi",
        "key_secret": "run-key",
        "env": {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_TIMEOUT": 22, "RATE": 0.5, "VERBOSE": True, "TOKEN": SECRET},
        **options,
    }
    return PodRun("cnn-1", KubernetesOptions(**full), Size(2, 8, 8), 3, False, "/runs", "a: 1\n", "python", (), "cmd")


@pytest.mark.skipif(importlib.util.find_spec("kubernetes_validate") is None, reason="pip install kubernetes-validate")
def test_the_printed_yaml_matches_the_objects_and_the_schemas_of_kubernetes():
    import kubernetes_validate

    text = kubernetes.text(run())
    assert list(yaml.safe_load_all(text)) == kubernetes.objects(run())
    assert not any(sign in text for sign in ("&id", "\\n", "$$")), (
        "no YAML anchors, no script on one line, no $$, which Kubernetes replaces by $"
    )
    for made in kubernetes.objects(run()):
        for version in VERSIONS:
            kubernetes_validate.validate(made, version, strict=True)


def test_pods_have_the_resources_of_training_and_survive_eviction():
    _, service, servers, job = kubernetes.objects(run())
    assert service["spec"]["selector"] == job["spec"]["template"]["metadata"]["labels"]
    assert (job["metadata"]["name"], job["spec"]["parallelism"]) == ("cnn-1", 2)
    assert (servers["metadata"]["name"], servers["spec"]["parallelism"]) == ("cnn-1-servers", 3)
    (container,) = servers["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"cpu": "2"}, "a server has no GPU"
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"cpu": "4.5", "memory": "64Gi", "nvidia.com/gpu": "8"}
    assert container["securityContext"] == RESTRICTED
    assert container["envFrom"] == [{"secretRef": {"name": "tokens"}}]
    variables = {variable["name"]: variable for variable in container["env"]}
    values = [variables[name]["value"] for name in ("NCCL_IB_TIMEOUT", "RATE", "VERBOSE")]
    assert values == ["22", "0.5", "true"], "Kubernetes accepts only texts"
    assert variables["TOKEN"] == {"name": "TOKEN", **SECRET}
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in container["volumeMounts"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert pod["terminationGracePeriodSeconds"] - KubernetesOptions().grace == 10
    assert (pod["nodeSelector"], pod["securityContext"]) == ({"pool": "a100"}, {"fsGroup": 1000})
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "users"
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["FailJob", "Ignore", "Ignore"]
    assert rules[0]["onExitCodes"]["values"] == [78]
    assert rules[1]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert rules[2]["onExitCodes"]["values"] == [143]


MISSPELT: list[tuple[dict[str, Any], str]] = [
    (
        {"pod": {"nodeSelectr": {"pool": "a100"}}},
        "pod.nodeSelectr is not a field of PodSpec: did you mean nodeSelector?",
    ),
    ({"pod": {"node_selector": {}}}, "pod.node_selector is not a field of PodSpec: did you mean nodeSelector?"),
    ({"pod": {"tolerations": [{}, {"efect": "NoSchedule"}]}}, r"pod.tolerations\[1\].efect .* did you mean effect"),
    ({"pod": {"securityContext": {"runAsUsr": 1}}}, "pod.securityContext.runAsUsr .* did you mean runAsUser"),
    ({"container": {"securityContext": {"fsgroup": 1, "runasuser": 1}}}, "did you mean runAsUser"),
    ({"container": {"envForm": []}}, "container.envForm is not a field of Container: did you mean envFrom"),
    ({"container": {"envFrom": [{"secretRf": {"name": "a"}}]}}, r"envFrom\[0\].secretRf .* did you mean secretRef"),
    ({"pod": {"securityContext": "restricted"}}, "pod.securityContext='restricted' is not a mapping"),
    ({"env": {"TOKEN": {"secretKeyRef": {"name": "a", "key": "b"}}}}, "env.TOKEN=.* write {valueFrom: {secretKeyRef:"),
    ({"env": {"TOKEN": {"valueFrom": {"secretKeyRf": {}}}}}, "env.TOKEN.valueFrom.secretKeyRf .* mean secretKeyRef"),
    ({"container": {"image": "cnn:2"}}, "container: submit sets image; leave these fields out"),
]


def test_misspelt_fields_are_refused_without_a_cluster():
    for options, message in MISSPELT:
        with pytest.raises(ConfigurationError, match=message):
            run(**options)
    # Newer versions of Kubernetes may have this field, and kubectl refuses it otherwise.
    run(pod={"priorityOfTomorrow": 1, "affinity": None})


@pytest.mark.skipif(importlib.util.find_spec("kubernetes_validate") is None, reason="pip install kubernetes-validate")
def test_the_known_fields_are_those_of_kubernetes():
    known = {kind: dict(word.partition(":")[::2] for word in words.split()) for kind, words in FIELDS.items()}
    expected: dict[str, dict[str, str]] = {kind: {} for kind in known}
    folder = Path(importlib.util.find_spec("kubernetes_validate").origin).parent / "kubernetes-json-schema"
    for version in VERSIONS:
        definitions = json.loads((folder / f"v{version}.0-local" / "_definitions.json").read_text())["$defs"]
        for kind, fields in expected.items():
            for name, field in definitions[f"io.k8s.api.core.v1.{kind}"]["properties"].items():
                link = field.get("$ref") or field.get("items", {}).get("$ref", "")
                fields[name] = kind_of if (kind_of := link.rpartition(".")[2]) in known else fields.get(name, "")
    assert known == expected


def test_the_containerfile_copies_existing_files_and_uses_the_recipes_user():
    """The Containerfile copies the files from which it installs, and its user is the user in the recipe."""
    steps = [line.split() for line in (ROOT / "Containerfile").read_text().splitlines() if line and line[0] != "#"]
    copied = {source for step, *words in steps if step == "COPY" for source in words[:-1]}
    assert all((ROOT / source).exists() for source in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = {"pyproject.toml", "constraints.txt", "cnnstrategies"}
    assert copied == {*packages, project["readme"], *project["license-files"]}
    recipe = yaml.safe_load((ROOT / "configs/cluster/kubernetes_gpu_nodes.yaml").read_text())
    assert ["USER", str(recipe["cluster"]["kubernetes"]["pod"]["securityContext"]["runAsUser"])] in steps


FAKE = """#!/bin/sh
case "$*" in
*import*) exit 0 ;;
*server*) trap 'echo asked >> "$LOG"' TERM; echo server >> "$LOG" ;;
*) trap 'echo stopped >> "$LOG"; exit 143' TERM; echo started >> "$LOG" ;;
esac
while [ ! -e "$LOG.end" ]; do sleep 0.05; done
code=$(cat "$LOG.end")
rm "$LOG.end"
exit $code
"""


class Pod:
    """A running script of a pod, with a shell script in place of Python."""

    def __init__(self, folder: Path, script: str, node: int) -> None:
        self.log = folder / f"log{node}"
        if not (folder / "python").exists():  # Do not rewrite the file: another pod may just be starting it.
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
    """A trainer's script ends with the run's exit code.

    A server's script ends when the run has succeeded, or when the run has stopped after the server's signal.
    """
    this = replace(run(key_secret=None), folder=str(tmp_path / "run"), goes_on=True)
    first = Pod(tmp_path, trainer_script(this), 0)
    server, drained = (Pod(tmp_path, server_script(this), node) for node in (7, 8))
    first.wait_for("started")
    server.wait_for("server")
    drained.wait_for("server")
    drained.process.terminate()
    drained.wait_for("server", "asked")  # The server tells the run to stop, and serves until the run has stopped.
    assert drained.process.poll() is None
    drained.end_program(1)
    assert drained.process.wait(30) == 143
    first.process.terminate()
    assert first.process.wait(30) == 143
    first.wait_for("started", "stopped")
    server.end_program(1)
    server.wait_for("server", "server")  # The server is ready for the next start of the run.
    lost = Pod(tmp_path, trainer_script(this), 1)
    lost.wait_for("started")
    again = Pod(tmp_path, trainer_script(this), 0)
    again.wait_for("started", "stopped", "started")
    again.end_program(0)
    assert again.process.wait(30) == 0
    assert server.process.wait(30) == 0
    lost.end_program(1)
    assert lost.process.wait(30) == 0  # The other pods have gone on without this pod.


KUBECTL = """#!/bin/sh
echo "$1 $2" >> "$SEEN"
grep -q "kind: Job" || [ "$1" = delete ] || exit 1
echo 'Warning: would violate PodSecurity "restricted:latest"' >&2
case "$2$REFUSES" in
--dry-run=servertrial) echo "E1122 tries\nJob is\ninvalid" >&2; exit 1 ;;
--output=namejob) echo configmap/cnn-1; echo service/cnn-1; echo "Job is\ninvalid" >&2; exit 1 ;;
esac
"""


def test_all_objects_are_created_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "kubectl").write_text(KUBECTL)
    (tmp_path / "kubectl").chmod(0o755)
    trial, makes, deletes = "create --dry-run=server", "create --output=name", "delete --wait=false"
    for refuses, seen in (("", [trial, makes]), ("trial", [trial]), ("job", [trial, makes, deletes])):
        (tmp_path / "seen").write_text("")
        monkeypatch.setenv("REFUSES", refuses)
        with (
            pytest.raises(ConfigurationError, match=r"the run \(Job is invalid\): check") if refuses else nullcontext()
        ):
            create(run())
        assert (tmp_path / "seen").read_text().splitlines() == seen
        printed = capsys.readouterr().err
        warns = (
            'Note: Kubernetes warns: would violate PodSecurity "restricted:latest"; set cluster.kubernetes.container.'
        )
        assert printed.count("warns") == (0 if refuses else 1), "the trial and the creation print the same warning"
        assert refuses or printed.startswith(warns)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(ConfigurationError, match="kubectl is not installed"):
        create(run())
