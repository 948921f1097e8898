"""A run on Kubernetes: its objects, Indexed Jobs that start their pods again, their names, and the commands in them."""

import shlex
import signal
from dataclasses import dataclass
from typing import Any

import yaml

from cnnstrategies.cluster.job import Size
from cnnstrategies.cluster.options import KubernetesOptions

MAIN_PORT, SERVER_PORT = 29500, 29600
CONFIGURATION, KEYS, KEY = "/run/cnnstrategies/config", "/run/cnnstrategies/keys", "run.key"
OWN_KEY = f"/dev/shm/{KEY}"  # In memory, and this user's alone.
STOPPED = 128 + int(signal.SIGTERM)  # exit code: after a step with a checkpoint, or while it was starting
HOPELESS = 78  # exit code (EX_CONFIG): a pod that is started again would end in the same way
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
    """What is to run as pods.

    Attributes:
        servers: Number of pods that hold parameters.
        goes_on: Whether the run goes on without a pod of the trainer that is lost.
        folder: Of the run, as the pods see it.
        setup: Lines of ``sh`` before the run.
        command: The command line that made it, for the reader.
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
    """The Job of a role."""
    return name if role == TRAINER else f"{name}-{role}"


def host(name: str, role: str, number: int) -> str:
    """The name by which the others reach a pod of a run."""
    return f"{job_name(name, role)}-{number}.{name}"


def objects(run: PodRun) -> list[Object]:
    """All objects of a run, in the order in which they are made; the last one starts it."""
    configuration = _object(run, "v1", "ConfigMap", immutable=True, data={"config.yaml": run.configuration})
    # Gives the pods their names, and before they are ready: they find each other by then.
    names = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": _labels(run)}
    roles = [SERVERS, TRAINER] if run.servers else [TRAINER]
    return [configuration, _object(run, "v1", "Service", spec=names), *(_job(run, role) for role in roles)]


def text(run: PodRun) -> str:
    """The objects as YAML, such as ``kubectl create`` takes."""
    parts = [yaml.dump(one, Dumper=_ManifestDumper, sort_keys=False, width=120) for one in objects(run)]
    return f"# Written by: {run.command}\n" + "---\n".join(parts)


class _ManifestDumper(yaml.SafeDumper):
    """Writes texts of several lines as such, and nothing as a reference to something above."""

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
    """An Indexed Job: each index is a pod, which gets the same number and name when it is started again."""
    pods = run.size.nodes if role == TRAINER else run.servers
    spec = {
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods,
        # When one fails, so do the others.
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
        "restartPolicy": "Never",  # The Job starts it again, on another node if need be.
        "terminationGracePeriodSeconds": run.options.whole_grace,
        "containers": [_container(run, role)],
        "volumes": [{"name": name, **source} for name, _, source in _mounted(run)],
        **run.options.pod,
    }


def _container(run: PodRun, role: str) -> Object:
    options = run.options
    trains = role == TRAINER
    asked = options.resources if trains else options.server_resources
    resources = {key: str(value) for key, value in asked.items()}
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
        # Both: a pod that asks for less than it may take is the first to be ended when memory is short.
        result["resources"] = {"requests": resources, "limits": resources}
    return result


def _environment(run: PodRun) -> list[Object]:
    fixed = {
        "MASTER_ADDR": host(run.name, TRAINER, 0),
        "MASTER_PORT": str(MAIN_PORT),
        "NNODES": str(run.size.nodes),
        "PYTHONUNBUFFERED": "1",  # The log of a pod that is killed is whole.
        **run.options.env,
    }
    index: Object = {"name": "NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}}
    return [index, *({"name": name, "value": value} for name, value in fixed.items())]


def _mounted(run: PodRun) -> list[tuple[str, str, Object]]:
    """The names of a pod's volumes, where it sees them, and what they are."""
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
    """What a pod of the trainer runs."""
    # The others go on without a worker of the parameter server; it is let in when the run is started again.
    again = '[ "$NODE_RANK" -ne 0 ] && [ ! -e "$finished" ]' if run.goes_on else "false"
    return f"""running=
# A container's first process gets no signal that it has not asked for.
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
    """What a pod that holds parameters runs: a server for each start of the run."""
    server = f"{shlex.quote(run.python)} -m cnnstrategies.commands.server --config {CONFIGURATION}/config.yaml"
    return f"""running= ended=
# A server outlives the signal, and asks the run to stop, which needs it until then.
trap 'ended={STOPPED}; if [ -n "$running" ]; then kill -TERM $! 2>/dev/null; else exit $ended; fi' TERM
{_setup(run)}begin=$(date +%s)
until [ -e "$finished" ]; do
    running=yes
    {server} --index "$NODE_RANK" &
    child=$!
    while kill -0 $child 2>/dev/null && [ ! -e "$finished" ]; do sleep 1; done
    if [ -e "$finished" ]; then
        kill -KILL $child 2>/dev/null # It may be waiting for another start of the run.
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
    lacks = "lacks the package: build one as docs/kubernetes.md says, or name its interpreter with cluster.python"
    message = f"cnnstrategies: error: the image {run.options.image} {lacks}"
    otherwise = f"{{ echo {shlex.quote(message)} >&2; exit {HOPELESS}; }}"
    lines = [
        f"run={shlex.quote(run.folder)}",
        f"finished=$run/.finished-{run.name}",
        f"{shlex.quote(run.python)} -c 'import cnnstrategies' || {otherwise}",
    ]
    if run.options.key_secret is not None:
        # As the volume has it, the file may be the group's too.
        lines.append(f"install -m 600 {KEYS}/{KEY} {OWN_KEY} || exit {HOPELESS}")
    # What the configuration names without a root is in the run folder; classes beside the image's code are found.
    lines += [
        'export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"',
        'mkdir -p "$run" && cd "$run" || exit 1',
        "begin=$(date +%s) # A pod has no name before it has a node.",
        'until getent hosts "$MASTER_ADDR" >/dev/null; do',
        f"    if [ $(($(date +%s) - begin)) -gt {PATIENCE} ]; then",
        f'        echo "cnnstrategies: error: {UNKNOWN}" >&2',
        "        exit 1",
        "    fi",
        "    sleep 1",
        "done",
    ]
    return "".join(f"{line}\n" for line in [*run.setup, *lines])
