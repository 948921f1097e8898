"""Kubernetes objects of a run: Indexed Jobs, a service, a ConfigMap, and the scripts of the pods."""

import shlex
import signal
from dataclasses import dataclass
from typing import Any

import yaml

from cnnstrategies.cluster.job import Size
from cnnstrategies.cluster.options import EnvValue, KubernetesOptions

MAIN_PORT, SERVER_PORT = 29500, 29600
CONFIGURATION, KEYS, KEY = "/run/cnnstrategies/config", "/run/cnnstrategies/keys", "run.key"
OWN_KEY = f"/dev/shm/{KEY}"  # Path of a copy of the key file in memory. Only the pod's user can read the copy.
STOPPED = 128 + int(signal.SIGTERM)  # Exit code of a pod that was stopped after saving a checkpoint, or at start-up.
HOPELESS = 78  # Exit code (EX_CONFIG) of a pod that should not be restarted, because it would fail again.
# Seconds that a pod waits for the address of the first pod, and that a server's pod waits for the run to start again
# after a failure.
PATIENCE = 1800
UNKNOWN = (
    f"no address for $MASTER_ADDR after {PATIENCE} s: check with kubectl get pods whether that pod was scheduled, and "
    "check the cluster's DNS"
)
TRAINER, SERVERS = "node", "servers"  # Roles of pods.
QUEUE = "kueue.x-k8s.io/queue-name"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
Object = dict[str, Any]


@dataclass(frozen=True)
class PodRun:
    """A run on Kubernetes.

    Attributes:
        name: Name of the Kubernetes objects.
        options: The section ``cluster.kubernetes`` of the configuration.
        size: Number of trainer pods, and number of processes and GPUs in each of them.
        servers: Number of pods with dedicated parameter servers.
        goes_on: Whether the run can continue after it has lost a trainer pod.
        folder: Path of the run folder in the pods.
        configuration: The run's configuration as YAML.
        python: Python interpreter in the pods.
        setup: Shell commands to run in each pod before the run starts.
        command: The command line of ``submit``, for a comment in the YAML file.
    """

    name: str
    options: KubernetesOptions
    size: Size
    servers: int
    goes_on: bool
    folder: str
    configuration: str
    python: str
    setup: tuple[str, ...]
    command: str


def job_name(name: str, role: str) -> str:
    """Return the name of the Job for the pods of a role.

    Args:
        name: Name of the run.
        role: Role of the pods: `TRAINER` or `SERVERS`.
    """
    return name if role == TRAINER else f"{name}-{role}"


def host(name: str, role: str, number: int) -> str:
    """Return the host name of a pod. The other pods resolve this name with the run's headless service."""
    return f"{job_name(name, role)}-{number}.{name}"


def objects(run: PodRun) -> list[Object]:
    """Return the Kubernetes objects of a run, in the order of their creation. The last object starts the run."""
    configuration = _object(run, "v1", "ConfigMap", immutable=True, data={"config.yaml": run.configuration})
    # The headless service gives the pods their host names. The pods need these names before they are ready, because
    # they connect to each other while they start.
    names = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": _labels(run)}
    roles = [SERVERS, TRAINER] if run.servers else [TRAINER]
    return [configuration, _object(run, "v1", "Service", spec=names), *(_job(run, role) for role in roles)]


def text(run: PodRun) -> str:
    """Return the Kubernetes objects of a run as YAML, for ``kubectl create``."""
    parts = [yaml.dump(entry, Dumper=_ManifestDumper, sort_keys=False, width=120) for entry in objects(run)]
    return f"# Written by: {run.command}\n" + "---\n".join(parts)


class _ManifestDumper(yaml.SafeDumper):
    """YAML dumper that writes texts of several lines as literal blocks, and does not use anchors and aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: _ManifestDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_ManifestDumper.add_representer(str, _represent_text)


def _labels(run: PodRun) -> dict[str, str]:
    return {"app.kubernetes.io/name": "cnnstrategies", "app.kubernetes.io/instance": run.name}


def _object(run: PodRun, version: str, kind: str, **content: object) -> Object:
    metadata: Object = {"name": run.name, "labels": _labels(run)}
    if run.options.namespace is not None:
        metadata["namespace"] = run.options.namespace
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}


def _job(run: PodRun, role: str) -> Object:
    """Return the Indexed Job for the pods of a role.

    In an Indexed Job, a pod that replaces a failed pod has the same index and the same host name.
    """
    pods = run.size.nodes if role == TRAINER else run.servers
    spec = {
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods,
        # If one pod fails, all other pods fail as well. Each failed pod counts towards the limit, so the number of
        # restarts is multiplied by the number of pods.
        "backoffLimit": run.options.max_restarts * (run.size.nodes + run.servers),
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [HOPELESS]}},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [STOPPED]}},
            ]
        },
        "template": {"metadata": {"labels": _labels(run)}, "spec": _pod(run, role)},
    }
    job = _object(run, "batch/v1", "Job", spec=spec)
    job["metadata"]["name"] = job_name(run.name, role)
    if run.options.queue is not None:
        job["metadata"]["labels"][QUEUE] = run.options.queue
    return job


def _pod(run: PodRun, role: str) -> Object:
    return {
        "subdomain": run.name,
        "restartPolicy": "Never",  # The Job itself replaces failed pods, if necessary on a different node.
        "terminationGracePeriodSeconds": run.options.whole_grace,
        "containers": [_container(run, role)],
        "volumes": [{"name": name, **source} for name, _, source in _mounted(run)],
        **run.options.pod,
    }


def _container(run: PodRun, role: str) -> Object:
    options = run.options
    trains = role == TRAINER
    amounts = options.resources if trains else options.server_resources
    resources = {key: str(value) for key, value in amounts.items()}
    if trains and run.size.gpus_per_node:
        resources[options.gpu] = str(run.size.gpus_per_node)
    result: Object = {
        **options.container,
        "name": role,
        "image": options.image,
        "command": ["/bin/sh", "-c", trainer_script(run) if trains else server_script(run)],
        "env": _environment(run),
        "ports": [{"containerPort": MAIN_PORT if trains else SERVER_PORT, "protocol": "TCP"}],
        "volumeMounts": [{"name": name, "mountPath": path} for name, path, _ in _mounted(run)],
    }
    if resources:
        # Requests are equal to limits, because a pod with smaller requests is evicted earlier when memory runs out.
        result["resources"] = {"requests": resources, "limits": resources}
    return result


def _environment(run: PodRun) -> list[Object]:
    fixed: dict[str, Any] = {
        "MASTER_ADDR": host(run.name, TRAINER, 0),
        "MASTER_PORT": str(MAIN_PORT),
        "NNODES": str(run.size.nodes),
        "PYTHONUNBUFFERED": "1",  # Without buffering, the log of a killed pod is complete.
        **run.options.env,
    }
    index: Object = {"name": "NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}}
    return [index, *({"name": name, **_variable(value)} for name, value in fixed.items())]


def _variable(value: EnvValue) -> Object:
    """Return the fields of an environment variable. Kubernetes accepts only texts, so numbers become texts."""
    if isinstance(value, dict):
        return value
    return {"value": str(value).lower() if isinstance(value, bool) else str(value)}


def _mounted(run: PodRun) -> list[tuple[str, str, Object]]:
    """Return the name, the directory in the pod and the source of each volume of a pod."""
    options = run.options
    memory: Object = {"medium": "Memory"}
    if options.shared_memory is not None:
        memory["sizeLimit"] = options.shared_memory
    result: list[tuple[str, str, Object]] = [
        ("config", CONFIGURATION, {"configMap": {"name": run.name}}),
        # By default a container's /dev/shm has 64 MiB, which is not enough for data workers and NCCL.
        ("shared-memory", "/dev/shm", {"emptyDir": memory}),
    ]
    if options.key_secret is not None:
        result.append(("keys", KEYS, {"secret": {"secretName": options.key_secret, "defaultMode": 0o400}}))
    for number, (path, claim) in enumerate(options.volumes.items()):
        result.append((f"volume-{number}", path, {"persistentVolumeClaim": {"claimName": claim}}))
    return result


def trainer_script(run: PodRun) -> str:
    """Return the shell script of a trainer pod."""
    # A run with a parameter server continues without a lost worker. The script then starts the worker's program again,
    # and the worker joins the run again.
    again = '[ "$NODE_RANK" -ne 0 ] && [ ! -e "$finished" ]' if run.goes_on else "false"
    return f"""running=
# The first process of a container receives only signals for which it has a handler.
trap 'if [ -n "$running" ]; then kill -TERM $!; else exit {STOPPED}; fi' TERM
{_setup(run)}while :; do
    running=yes
    {shlex.quote(run.python)} -m cnnstrategies fit --config {CONFIGURATION}/config.yaml &
    child=$!
    wait $child
    code=$?
    while kill -0 $child 2>/dev/null; do # A signal has interrupted the wait, but the run has not ended yet.
        wait $child
        code=$?
    done
    running=
    if [ $code -eq 0 ] || [ $code -eq {STOPPED} ]; then break; fi
    if ! {{ {again}; }}; then break; fi
    sleep 10 & wait $!
done
if [ $code -eq 0 ] && [ "$NODE_RANK" -eq 0 ]; then touch "$finished"; fi
if [ $code -ne {STOPPED} ] && [ -e "$finished" ]; then code=0; fi
exit $code
"""


def server_script(run: PodRun) -> str:
    """Return the shell script of a server pod. Each time the run starts again, the script starts a new server."""
    server = f"{shlex.quote(run.python)} -m cnnstrategies.commands.server --config {CONFIGURATION}/config.yaml"
    return f"""running= ended=
# After a signal the server asks the run to stop. It continues until then, because the run still needs it.
trap 'ended={STOPPED}; if [ -n "$running" ]; then kill -TERM $! 2>/dev/null; else exit $ended; fi' TERM
{_setup(run)}begin=$(date +%s)
until [ -e "$finished" ]; do
    running=yes
    {server} --index "$NODE_RANK" &
    child=$!
    while kill -0 $child 2>/dev/null && [ ! -e "$finished" ]; do sleep 1; done
    if [ -e "$finished" ]; then
        kill -KILL $child 2>/dev/null # The server may be waiting for the run to start again.
        exit 0
    fi
    if wait $child; then begin=$(date +%s); fi
    running=
    if [ -n "$ended" ]; then exit $ended; fi
    if [ $(($(date +%s) - begin)) -gt {PATIENCE} ]; then exit 1; fi
    sleep 1
done
"""


def _setup(run: PodRun) -> str:
    remedy = "build an image as described in docs/kubernetes.md, or set cluster.python to the interpreter in the image"
    message = f"cnnstrategies: error: the image {run.options.image} does not contain cnnstrategies: {remedy}"
    otherwise = f"{{ echo {shlex.quote(message)} >&2; exit {HOPELESS}; }}"
    lines = [
        f"run={shlex.quote(run.folder)}",
        f"finished=$run/.finished-{run.name}",
        f"{shlex.quote(run.python)} -c 'import cnnstrategies' || {otherwise}",
    ]
    if run.options.key_secret is not None:
        # The key file must be readable only by its user. In the mounted volume the group may also have read permission,
        # so the pod uses a copy.
        lines.append(f"install -m 600 {KEYS}/{KEY} {OWN_KEY} || exit {HOPELESS}")
    # Change to the run folder, because paths in the configuration are relative to it. PYTHONPATH makes sure that the
    # user's classes in the image's working directory can still be imported.
    lines += [
        'export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"',
        'mkdir -p "$run" && cd "$run" || exit 1',
        "begin=$(date +%s) # Wait until the first pod is scheduled and has an address.",
        'until getent hosts "$MASTER_ADDR" >/dev/null; do',
        f"    if [ $(($(date +%s) - begin)) -gt {PATIENCE} ]; then",
        f'        echo "cnnstrategies: error: {UNKNOWN}" >&2',
        "        exit 1",
        "    fi",
        "    sleep 1",
        "done",
    ]
    return "".join(f"{line}\n" for line in [*run.setup, *lines])
