"""The ``cluster.kubernetes`` section of a configuration."""

import re
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal

from cnnstrategies.errors import ConfigurationError

# Between the end of the run's grace and the moment when the pod is killed: for the end of its processes.
MARGIN_SECONDS = 10
# Where every pod has something of ours.
RESERVED = ("/dev/shm", "/run/cnnstrategies")
# What follows from the nodes: a variable that says it again could disagree.
DECIDED = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "NNODES", "LOCAL_RANK", "RANK", "WORLD_SIZE")


@dataclass
class KubernetesOptions:
    """What the pods of a run ask for; read by ``submit fit --to kubernetes``.

    A node of the trainer is a pod: their number is ``trainer.num_nodes``, and with ``trainer.accelerator: gpu`` each
    asks for as many GPUs as ``trainer.devices``.

    Attributes:
        kind: A TrainJob of Kubeflow Trainer with a TrainingRuntime of its own, or a Job with a headless service.
        image: Container image that has this package.
        namespace: Where the objects are made; by default that of the current context.
        queue: Local queue of Kueue.
        priority_class: Priority class of the pods.
        node_selector: Labels that the nodes must have.
        tolerations: Tolerations of the pods, as Kubernetes writes them.
        resources: Requests and limits of a pod of the trainer, such as {cpu: 8, memory: 64Gi}. The GPUs of a node,
            such as nvidia.com/gpu: 8, are compared with trainer.devices.
        gpu: Name of the resource that a GPU is.
        server_resources: Those of a pod that holds parameters (cluster.server_nodes).
        volumes: Persistent volume claims by the directory where the pods see them, such as {/runs: my-claim}.
        shared_memory: Most that /dev/shm holds, such as 8Gi; it counts as the pod's memory. No limit of its own when
            left out.
        key_secret: Secret with the keys of a parameter server, made of a file run.key.
        pull_secret: Secret with which the image is fetched.
        user: Number of the user that the pods run as; by default the image's.
        env: Environment variables of the pods, such as {NCCL_SOCKET_IFNAME: eth0}.
        grace_seconds: Time between a pod's SIGTERM and its end. A step, or a validation if it comes then, and the
            writing of the checkpoint must fit into it.
        max_restarts: How often pods that fail are started again. Those that end because a node is drained or their
            place is needed, with a checkpoint, do not count.

    Raises:
        ConfigurationError: A value is out of range.
    """

    kind: Literal["trainjob", "job"] = "trainjob"
    image: str | None = None
    namespace: str | None = None
    queue: str | None = None
    priority_class: str | None = None
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: list[dict[str, Any]] = field(default_factory=list)
    resources: dict[str, str | int] = field(default_factory=dict)
    gpu: str = "nvidia.com/gpu"
    server_resources: dict[str, str | int] = field(default_factory=dict)
    volumes: dict[str, str] = field(default_factory=dict)
    shared_memory: str | None = None
    key_secret: str | None = None
    pull_secret: str | None = None
    user: int | None = None
    env: dict[str, str] = field(default_factory=dict)
    grace_seconds: int = 120
    max_restarts: int = 6

    def __post_init__(self) -> None:
        if self.grace_seconds < MARGIN_SECONDS + 10:
            raise ConfigurationError(
                f"cluster.kubernetes.grace_seconds={self.grace_seconds}: a run needs time to finish its step and to "
                f"save; at least {MARGIN_SECONDS + 10}, and 120 is usual"
            )
        if self.max_restarts < 0:
            raise ConfigurationError(
                f"cluster.kubernetes.max_restarts={self.max_restarts} is negative; 0 starts no failed pod again"
            )
        for path in self.volumes:
            parts = PurePosixPath(path)
            if not parts.is_absolute() or path == "/" or any(parts.is_relative_to(own) for own in RESERVED):
                raise ConfigurationError(
                    f"cluster.kubernetes.volumes: {path!r}: name a directory from the root, such as /runs, outside of "
                    f"{' and '.join(RESERVED)}"
                )
        for name in self.env:
            if name in DECIDED or name.startswith("PET_"):
                raise ConfigurationError(
                    f"cluster.kubernetes.env: {name} could disagree with the rest: it follows from trainer.num_nodes "
                    "and trainer.devices; leave it out"
                )
        for section in ("resources", "server_resources"):
            for name, value in getattr(self, section).items():
                if not re.fullmatch(r"\d+(\.\d+)?(m|[kMGTPE]i?|e\d+)?", str(value)):
                    raise ConfigurationError(
                        f"cluster.kubernetes.{section}: {name}: {value} is no quantity of Kubernetes, such as 8, 500m "
                        "or 64Gi"
                    )

    @property
    def grace(self) -> int:
        """Seconds between SIGTERM and the moment when a run that has not stopped is killed."""
        return self.grace_seconds - MARGIN_SECONDS
