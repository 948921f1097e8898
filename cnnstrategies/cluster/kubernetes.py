"""The objects of a run on Kubernetes: Indexed Jobs, which restart their pods, with names and the pods' scripts."""

import shlex
import signal
from dataclasses import dataclass
from typing import Any

import yaml

from cnnstrategies.cluster.job import Size
from cnnstrategies.cluster.options import KubernetesOptions

MAIN_PORT, SERVER_PORT = 29500, 29600
CONFIGURATION, KEYS, KEY = "/run/cnnstrategies/config", "/run/cnnstrategies/keys", "run.key"
OWN_KEY = f"/dev/shm/{KEY}"  # A copy of the key file, in memory, that only the pod's user can read.
STOPPED = 128 + int(signal.SIGTERM)  # exit code: stopped after a step with a checkpoint, or during start-up
HOPELESS = 78  # exit code (EX_CONFIG): a restarted pod would end in the same way
PATIENCE = 1800  # seconds that a server's pod waits for the next start of a run that has failed
UNKNOWN = (
    f"no address for $MASTER_ADDR in {PATIENCE} s: was that pod scheduled (kubectl get pods), and does the cluster's "
    "DNS answer?"
)
TRAINER, SERVERS = "node", "servers"  # The roles of pods.
QUEUE = "kueue.x-k8s.io/queue-name"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
Object = dict[str, Any]


@dataclass(frozen=True)
class PodRun:
    """A run as pods.

    Attributes:
        name: Name of the run's objects.
        options: The section ``cluster.kubernetes``.
        size: Number of pods of the trainer, and of processes and GPUs in each.
        servers: Number of pods that hold parameters.
        goes_on: Whether the run continues without a lost pod of the trainer.
        folder: The run folder, as the pods see it.
        configuration: The run's configuration as YAML.
        python: The interpreter in the pods.
        setup: Lines of ``sh`` before the run.
        command: The command line of ``submit``, for people who read the objects.
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
    """Return the name of a role's Job.

    Args:
        name: Name of the run.
        role: `TRAINER` or `SERVERS`.
    """
    return name if role == TRAINER else f"{name}-{role}"


def host(name: str, role: str, number: int) -> str:
    """Return the host name by which other pods reach a pod of a run."""
    return f"{job_name(name, role)}-{number}.{name}"


def objects(run: PodRun) -> list[Object]:
    """Return all objects of a run, in the order of their creation; the last object starts the run."""
    configuration = _object(run, "v1", "ConfigMap", immutable=True, data={"config.yaml": run.configuration})
    # The service gives the pods their names. Pods need the names before they are ready, to find each other.
    names = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": _labels(run)}
    roles = [SERVERS, TRAINER] if run.servers else [TRAINER]
    return [configuration, _object(run, "v1", "Service", spec=names), *(_job(run, role) for role in roles)]


def text(run: PodRun) -> str:
    """Return the objects as YAML, for ``kubectl create``."""
    parts = [yaml.dump(entry, Dumper=_ManifestDumper, sort_keys=False, width=120) for entry in objects(run)]
    return f"# Written by: {run.command}\n" + "---\n".join(parts)


class _ManifestDumper(yaml.SafeDumper):
    """A writer of YAML that keeps the lines of long texts, and uses no references."""

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
    """Return an Indexed Job with the pods of a role. A pod keeps its index and its host name after a restart."""
    pods = run.size.nodes if role == TRAINER else run.servers
    spec = {
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods,
        # A failure of one pod makes all other pods fail as well.
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
        "restartPolicy": "Never",  # The Job restarts the pod, if necessary on another node.
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
        "name": role,
        "image": options.image,
        "command": ["/bin/sh", "-c", trainer_script(run) if trains else server_script(run)],
        "env": _environment(run),
        "ports": [{"containerPort": MAIN_PORT if trains else SERVER_PORT, "protocol": "TCP"}],
        "volumeMounts": [{"name": name, "mountPath": path} for name, path, _ in _mounted(run)],
    }
    if resources:
        # Requests equal limits: a pod that requests less than its limit is ended first when memory is short.
        result["resources"] = {"requests": resources, "limits": resources}
    return result


def _environment(run: PodRun) -> list[Object]:
    fixed = {
        "MASTER_ADDR": host(run.name, TRAINER, 0),
        "MASTER_PORT": str(MAIN_PORT),
        "NNODES": str(run.size.nodes),
        "PYTHONUNBUFFERED": "1",  # The log of a killed pod is complete.
        **run.options.env,
    }
    index: Object = {"name": "NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}}
    return [index, *({"name": name, "value": value} for name, value in fixed.items())]


def _mounted(run: PodRun) -> list[tuple[str, str, Object]]:
    """Return the volumes of a pod: name, directory in the pod, and source."""
    options = run.options
    memory: Object = {"medium": "Memory"}
    if options.shared_memory is not None:
        memory["sizeLimit"] = options.shared_memory
    result: list[tuple[str, str, Object]] = [
        ("config", CONFIGURATION, {"configMap": {"name": run.name}}),
        # A container's own /dev/shm has 64 MiB, too little for data workers and for NCCL.
        ("shared-memory", "/dev/shm", {"emptyDir": memory}),
    ]
    if options.key_secret is not None:
        result.append(("keys", KEYS, {"secret": {"secretName": options.key_secret, "defaultMode": 0o400}}))
    for number, (path, claim) in enumerate(options.volumes.items()):
        result.append((f"volume-{number}", path, {"persistentVolumeClaim": {"claimName": claim}}))
    return result


def trainer_script(run: PodRun) -> str:
    """Return the script of a pod of the trainer."""
    # A run with a parameter server continues without a worker, and admits it again after the pod's program restarts.
    again = '[ "$NODE_RANK" -ne 0 ] && [ ! -e "$finished" ]' if run.goes_on else "false"
    return f"""running=
# A container's first process receives only signals for which it has a handler.
trap 'if [ -n "$running" ]; then kill -TERM $!; else exit {STOPPED}; fi' TERM
{_setup(run)}while :; do
    running=yes
    {shlex.quote(run.python)} -m cnnstrategies fit --config {CONFIGURATION}/config.yaml &
    child=$!
    wait $child
    code=$?
    while kill -0 $child 2>/dev/null; do # A signal has ended the wait, and not yet the run.
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
    """Return the script of a pod that holds parameters. It runs a server for each start of the run."""
    server = f"{shlex.quote(run.python)} -m cnnstrategies.commands.server --config {CONFIGURATION}/config.yaml"
    return f"""running= ended=
# A server outlives the signal: it asks the run to stop, and the run needs the server until then.
trap 'ended={STOPPED}; if [ -n "$running" ]; then kill -TERM $! 2>/dev/null; else exit $ended; fi' TERM
{_setup(run)}begin=$(date +%s)
until [ -e "$finished" ]; do
    running=yes
    {server} --index "$NODE_RANK" &
    child=$!
    while kill -0 $child 2>/dev/null && [ ! -e "$finished" ]; do sleep 1; done
    if [ -e "$finished" ]; then
        kill -KILL $child 2>/dev/null # The server may wait for another start of the run.
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
    lacks = "lacks the package: build an image as docs/kubernetes.md says, or name its interpreter with cluster.python"
    message = f"cnnstrategies: error: the image {run.options.image} {lacks}"
    otherwise = f"{{ echo {shlex.quote(message)} >&2; exit {HOPELESS}; }}"
    lines = [
        f"run={shlex.quote(run.folder)}",
        f"finished=$run/.finished-{run.name}",
        f"{shlex.quote(run.python)} -c 'import cnnstrategies' || {otherwise}",
    ]
    if run.options.key_secret is not None:
        # In the volume the file may be readable by the group.
        lines.append(f"install -m 600 {KEYS}/{KEY} {OWN_KEY} || exit {HOPELESS}")
    # Relative paths of the configuration are in the run folder; classes in the image's working directory are found.
    lines += [
        'export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"',
        'mkdir -p "$run" && cd "$run" || exit 1',
        "begin=$(date +%s) # A pod has no address before it has a node.",
        'until getent hosts "$MASTER_ADDR" >/dev/null; do',
        f"    if [ $(($(date +%s) - begin)) -gt {PATIENCE} ]; then",
        f'        echo "cnnstrategies: error: {UNKNOWN}" >&2',
        "        exit 1",
        "    fi",
        "    sleep 1",
        "done",
    ]
    return "".join(f"{line}\n" for line in [*run.setup, *lines])
