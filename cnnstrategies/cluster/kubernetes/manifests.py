"""The objects of a run, as they are sent to Kubernetes: pods, and the jobs that start them again."""

from typing import Any

import yaml

from cnnstrategies.cluster.kubernetes.run import (
    CONFIGURATION,
    HOPELESS,
    KEYS,
    MAIN_PORT,
    SERVER_PORT,
    SERVERS,
    STOPPED,
    TRAINER,
    Run,
    job_name,
    server_script,
    trainer_script,
)

TRAINER_API = "trainer.kubeflow.org/v1alpha1"
QUEUE = "kueue.x-k8s.io/queue-name"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
Object = dict[str, Any]


def roles(run: Run) -> list[str]:
    """The kinds of pods that a run has."""
    return [TRAINER, SERVERS] if run.servers else [TRAINER]


def labels(run: Run) -> dict[str, str]:
    """Those that every object of a run has."""
    return {"app.kubernetes.io/name": "cnnstrategies", "app.kubernetes.io/instance": run.name}


def job_spec(run: Run, role: str) -> Object:
    """An Indexed Job: each index is a pod, which gets the same number and name when it is started again."""
    pods = run.size.nodes if role == TRAINER else run.servers
    container = "node" if role == TRAINER else "server"
    return {
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods,
        # When one fails, so do the others.
        "backoffLimit": run.options.max_restarts * (run.size.nodes + run.servers),
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": container, "operator": "In", "values": [HOPELESS]},
                },
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "Ignore",
                    "onExitCodes": {"containerName": container, "operator": "In", "values": [STOPPED]},
                },
            ]
        },
        "template": {"metadata": {"labels": labels(run)}, "spec": _pod(run, role, container)},
    }


def objects(run: Run) -> list[Object]:
    """All objects of a run, in the order in which they are made; the last one starts it."""
    result = [_object(run, "v1", "ConfigMap", immutable=True, data={"config.yaml": run.configuration})]
    return result + (_train_job(run) if run.options.kind == "trainjob" else _jobs(run))


def text(run: Run) -> str:
    """The objects as YAML, such as ``kubectl apply`` takes."""
    parts = [yaml.dump(one, Dumper=_Dumper, sort_keys=False, width=120) for one in objects(run)]
    return f"# Written by: {run.command}\n" + "---\n".join(parts)


def _train_job(run: Run) -> list[Object]:
    """A TrainJob, and a TrainingRuntime of its own: a cluster's has no servers, and the default grace period."""
    jobs = []
    for role in roles(run):
        template: Object = {"spec": job_spec(run, role)}
        if role == TRAINER:
            template["metadata"] = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
        jobs.append({"name": role, "replicas": 1, "template": template})
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        # The servers wait for the next start of a run until it has ended.
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [TRAINER]},
        "replicatedJobs": jobs,
    }
    policy = {"numNodes": run.size.nodes, "torch": {}}
    runtime = _object(run, TRAINER_API, "TrainingRuntime", spec={"mlPolicy": policy, "template": {"spec": spec}})
    runtime["metadata"]["labels"]["trainer.kubeflow.org/framework"] = "torch"
    train_job = _object(
        run,
        TRAINER_API,
        "TrainJob",
        spec={
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": run.name},
            "trainer": {"numNodes": run.size.nodes, "numProcPerNode": run.size.tasks_per_node},
        },
    )
    return [runtime, _queued(run, train_job)]


def _jobs(run: Run) -> list[Object]:
    """A Job for each kind of pods, and the service that gives them their names."""
    service = _object(
        run,
        "v1",
        "Service",
        # Pods find each other before they are ready.
        spec={"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels(run)},
    )
    jobs = []
    for role in reversed(roles(run)):
        job = _queued(run, _object(run, "batch/v1", "Job", spec=job_spec(run, role)))
        job["metadata"]["name"] = job_name(run.name, role)
        jobs.append(job)
    return [service, *jobs]


def _object(run: Run, version: str, kind: str, **content: object) -> Object:
    metadata: Object = {"name": run.name, "labels": labels(run)}
    if run.options.namespace is not None:
        metadata["namespace"] = run.options.namespace
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}


def _queued(run: Run, job: Object) -> Object:
    if run.options.queue is not None:
        job["metadata"]["labels"][QUEUE] = run.options.queue
    return job


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as such, and nothing as a reference to something above."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _represent_text)


def _pod(run: Run, role: str, container: str) -> Object:
    options = run.options
    spec: Object = {
        "restartPolicy": "Never",  # The Job starts it again, on another node if need be.
        "terminationGracePeriodSeconds": options.grace_seconds,
        "containers": [_container(run, role, container)],
        "volumes": _volumes(run),
    }
    if options.kind == "job":
        spec["subdomain"] = run.name
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


def _container(run: Run, role: str, name: str) -> Object:
    options = run.options
    asked = options.resources if role == TRAINER else options.server_resources
    resources = {key: str(value) for key, value in asked.items() if key != options.gpu}
    if role == TRAINER and run.size.gpus_per_node:
        resources[options.gpu] = str(run.size.gpus_per_node)
    script = trainer_script(run) if role == TRAINER else server_script(run)
    result: Object = {
        "name": name,
        "image": options.image,
        "command": ["/bin/sh", "-c", script],
        "env": _environment(run),
        "ports": [{"containerPort": MAIN_PORT if role == TRAINER else SERVER_PORT, "protocol": "TCP"}],
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIGURATION, "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    if resources:
        # Both: a pod that asks for less than it may take is the first to be ended when memory is short.
        result["resources"] = {"requests": resources, "limits": resources}
    mounts = result["volumeMounts"]
    if options.key_secret is not None:
        mounts.append({"name": "keys", "mountPath": KEYS, "readOnly": True})
    mounts += [{"name": f"volume-{number}", "mountPath": path} for number, path in enumerate(options.volumes)]
    return result


def _environment(run: Run) -> list[Object]:
    fixed = {
        "MASTER_ADDR": run.host(TRAINER, 0),
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
