"""The objects of a run, as they are sent to Kubernetes."""

import yaml

from cnnstrategies.cluster.kubernetes.pods import Object, job_spec, labels, roles
from cnnstrategies.cluster.kubernetes.run import TRAINER, Run, job_name

TRAINER_API = "trainer.kubeflow.org/v1alpha1"
QUEUE = "kueue.x-k8s.io/queue-name"


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
