"""The objects of a run, as they are sent to Kubernetes: Indexed Jobs that start their pods again, and their names."""

from typing import Any

import yaml

from cnnstrategies.cluster.pods import (
    CONFIGURATION,
    HOPELESS,
    KEYS,
    MAIN_PORT,
    SERVER_PORT,
    SERVERS,
    STOPPED,
    TRAINER,
    Run,
    host,
    job_name,
    server_script,
    trainer_script,
)

QUEUE = "kueue.x-k8s.io/queue-name"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
Object = dict[str, Any]


def objects(run: Run) -> list[Object]:
    """All objects of a run, in the order in which they are made; the last one starts it."""
    configuration = _object(run, "v1", "ConfigMap", immutable=True, data={"config.yaml": run.configuration})
    # Gives the pods their names, and before they are ready: they find each other by then.
    names = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": _labels(run)}
    roles = [SERVERS, TRAINER] if run.servers else [TRAINER]
    return [configuration, _object(run, "v1", "Service", spec=names), *(_job(run, role) for role in roles)]


def text(run: Run) -> str:
    """The objects as YAML, such as ``kubectl create`` takes."""
    parts = [yaml.dump(one, Dumper=_Dumper, sort_keys=False, width=120) for one in objects(run)]
    return f"# Written by: {run.command}\n" + "---\n".join(parts)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as such, and nothing as a reference to something above."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _represent_text)


def _labels(run: Run) -> dict[str, str]:
    return {"app.kubernetes.io/name": "cnnstrategies", "app.kubernetes.io/instance": run.name}


def _object(run: Run, version: str, kind: str, **content: object) -> Object:
    metadata: Object = {"name": run.name, "labels": _labels(run)}
    if run.options.namespace is not None:
        metadata["namespace"] = run.options.namespace
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}


def _job(run: Run, role: str) -> Object:
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


def _pod(run: Run, role: str) -> Object:
    options = run.options
    spec: Object = {
        "subdomain": run.name,
        "restartPolicy": "Never",  # The Job starts it again, on another node if need be.
        "terminationGracePeriodSeconds": options.grace_seconds,
        "containers": [_container(run, role)],
        "volumes": _volumes(run),
    }
    if options.user is not None:
        spec["securityContext"] = dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), options.user)
    if options.pull_secret is not None:
        spec["imagePullSecrets"] = [{"name": options.pull_secret}]
    if options.priority_class is not None:
        spec["priorityClassName"] = options.priority_class
    if options.node_selector:
        spec["nodeSelector"] = options.node_selector
    if options.tolerations:
        spec["tolerations"] = options.tolerations
    return spec


def _container(run: Run, role: str) -> Object:
    options = run.options
    trains = role == TRAINER
    asked = options.resources if trains else options.server_resources
    resources = {key: str(value) for key, value in asked.items()}
    if trains and run.size.gpus_per_node:
        resources[options.gpu] = str(run.size.gpus_per_node)
    mounts: list[Object] = [
        {"name": "config", "mountPath": CONFIGURATION, "readOnly": True},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    if options.key_secret is not None:
        mounts.append({"name": "keys", "mountPath": KEYS, "readOnly": True})
    mounts += [{"name": f"volume-{number}", "mountPath": path} for number, path in enumerate(options.volumes)]
    result: Object = {
        "name": role,
        "image": options.image,
        "command": ["/bin/sh", "-c", trainer_script(run) if trains else server_script(run)],
        "env": _environment(run),
        "ports": [{"containerPort": MAIN_PORT if trains else SERVER_PORT, "protocol": "TCP"}],
        "volumeMounts": mounts,
    }
    if resources:
        # Both: a pod that asks for less than it may take is the first to be ended when memory is short.
        result["resources"] = {"requests": resources, "limits": resources}
    return result


def _environment(run: Run) -> list[Object]:
    fixed = {
        "MASTER_ADDR": host(run.name, TRAINER, 0),
        "MASTER_PORT": str(MAIN_PORT),
        "NNODES": str(run.size.nodes),
        "PYTHONUNBUFFERED": "1",  # The log of a pod that is killed is whole.
        **run.options.env,
    }
    index: Object = {"name": "NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}}
    return [index, *({"name": name, "value": value} for name, value in fixed.items())]


def _volumes(run: Run) -> list[Object]:
    options = run.options
    memory: Object = {"medium": "Memory"}
    if options.shared_memory is not None:
        memory["sizeLimit"] = options.shared_memory
    result: list[Object] = [
        {"name": "config", "configMap": {"name": run.name}},
        # A container's own /dev/shm has 64 MiB, too little for data workers and for NCCL.
        {"name": "shared-memory", "emptyDir": memory},
    ]
    if options.key_secret is not None:
        result.append({"name": "keys", "secret": {"secretName": options.key_secret, "defaultMode": 0o400}})
    for number, claim in enumerate(options.volumes.values()):
        result.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}})
    return result
