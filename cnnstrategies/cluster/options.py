"""Options in the ``cluster:`` section of a configuration."""

import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from cnnstrategies.cluster.kubernetes_fields import check_fields
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.quantities import Duration, seconds

# Keys: keys of the configuration. Values: options of sbatch that `cnnstrategies submit` sets according to the key.
# Users must not set these options in cluster.sbatch.
DECIDED = {
    "trainer.num_nodes": ("-N", "--nodes"),
    "trainer.devices": (
        *("-n", "--ntasks", "--ntasks-per-node", "--tasks-per-node", "--ntasks-per-gpu", "--ntasks-per-socket"),
        *("-G", "--gpus", "--gpus-per-node", "--gpus-per-task", "--gpus-per-socket"),
    ),
    "cluster.job_name": ("-J", "--job-name"),
    "cluster.cpus_per_task": ("-c", "--cpus-per-task"),  # submit also passes this option to srun.
    "cluster.signal": ("--signal",),
    "cluster.requeue": ("--requeue", "--no-requeue"),
    "cluster.folder": ("-o", "--output", "-e", "--error", "--open-mode", "-a", "--array"),
}
# Job names with which Lightning assumes an interactive shell and ignores SLURM's ranks.
INTERACTIVE = ("bash", "interactive")
# A run that has not stopped is killed this many seconds before the time limit. The remaining time is needed to end the
# processes and to requeue the job.
MARGIN_SECONDS = 20
# A run that has not stopped is killed this many seconds before the end of its pod's grace period. The remaining time is
# needed to end the processes.
POD_MARGIN_SECONDS = 10
# Directories in pods where users cannot mount volumes, because the package itself uses the directories.
POD_FOLDERS = ("/dev/shm", "/run/cnnstrategies")
# Fields of a pod's specification that users cannot set, because submit sets them.
POD_FIELDS = {"containers", "restartPolicy", "subdomain", "terminationGracePeriodSeconds", "volumes"}
# Fields of a container that users cannot set, because submit sets them.
CONTAINER_FIELDS = {"args", "command", "env", "image", "name", "ports", "resources", "restartPolicy", "volumeMounts"}
# Value of an environment variable of a pod. A mapping is the variable's source, in Kubernetes' format.
EnvValue = str | int | float | bool | dict[str, Any]
# Environment variables that users cannot set, because submit or Lightning sets them.
NODE_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "NNODES", "LOCAL_RANK", "RANK", "WORLD_SIZE")


@dataclass
class KubernetesOptions:
    """Options of ``submit fit --to kubernetes``.

    Each node of the trainer is a pod: there are ``trainer.num_nodes`` trainer pods. With ``trainer.accelerator: gpu``
    each of them requests ``trainer.devices`` GPUs.

    Attributes:
        image: Container image, in which this package must be installed.
        namespace: Namespace of the Kubernetes objects; by default the namespace of kubectl's current context.
        queue: Name of a local queue of Kueue.
        pod: Other fields of the pods' specification, in Kubernetes' format, such as nodeSelector, tolerations,
            priorityClassName, imagePullSecrets, or a securityContext with runAsUser and fsGroup.
        container: Other fields of the pods' container, in Kubernetes' format, such as securityContext, envFrom or
            imagePullPolicy.
        resources: Resource requests and limits of a trainer pod, such as {cpu: 8, memory: 64Gi}.
        gpu: Kubernetes' name of the resource for GPUs.
        server_resources: Resource requests and limits of a pod with a dedicated server (cluster.server_nodes).
        volumes: Persistent volume claims to mount. Keys are directories in the pods, values are names of claims, such
            as {/runs: my-claim}.
        shared_memory: Largest size of /dev/shm, such as 8Gi. It counts towards the pod's memory; by default only the
            pod's memory limit applies.
        key_secret: Name of the Secret with a parameter server's keys. Create the Secret from a file named run.key.
        env: Environment variables of the pods, such as {NCCL_SOCKET_IFNAME: eth0}. A variable from a Secret is written
            as in Kubernetes: {TOKEN: {valueFrom: {secretKeyRef: {name: my-secret, key: token}}}}.
        grace_seconds: Time between SIGTERM and SIGKILL of a pod, as seconds or ``minutes:seconds``. In this time the
            run must finish its step, or a validation, and save a checkpoint.
        max_restarts: Number of times that failed pods are restarted. Pods that have stopped with a checkpoint, because
            their node is drained or pre-empted, are restarted in any case and are not counted.

    Raises:
        ConfigurationError: A value is out of its range.
    """

    image: str | None = None
    namespace: str | None = None
    queue: str | None = None
    pod: dict[str, Any] = field(default_factory=dict)
    container: dict[str, Any] = field(default_factory=dict)
    resources: dict[str, str | int | float] = field(default_factory=dict)
    gpu: str = "nvidia.com/gpu"
    server_resources: dict[str, str | int | float] = field(default_factory=dict)
    volumes: dict[str, str] = field(default_factory=dict)
    shared_memory: str | None = None
    key_secret: str | None = None
    env: dict[str, EnvValue] = field(default_factory=dict)
    grace_seconds: Duration = 120
    max_restarts: int = 6

    def __post_init__(self) -> None:
        if self.whole_grace < POD_MARGIN_SECONDS + 10:
            raise ConfigurationError(
                f"cluster.kubernetes.grace_seconds={self.grace_seconds} is too short to finish a step and save a "
                f"checkpoint: use at least {POD_MARGIN_SECONDS + 10}; 120 is usual"
            )
        if self.max_restarts < 0:
            raise ConfigurationError(
                f"cluster.kubernetes.max_restarts={self.max_restarts} is negative; use 0 for no restarts"
            )
        for path in self.volumes:
            parts = PurePosixPath(path)
            if not parts.is_absolute() or path == "/" or any(parts.is_relative_to(folder) for folder in POD_FOLDERS):
                raise ConfigurationError(
                    f"cluster.kubernetes.volumes: {path!r} cannot be mounted: use an absolute path, such as /runs, "
                    f"outside of {' and '.join(POD_FOLDERS)}"
                )
        for key, fields, kind, reserved in (
            ("pod", self.pod, "PodSpec", POD_FIELDS),
            ("container", self.container, "Container", CONTAINER_FIELDS),
        ):
            if decided := fields.keys() & reserved:
                raise ConfigurationError(
                    f"cluster.kubernetes.{key}: submit sets {', '.join(sorted(decided))}; leave these fields out"
                )
            check_fields(f"cluster.kubernetes.{key}", fields, kind)
        for name, value in self.env.items():
            if isinstance(value, dict):
                if value.keys() != {"valueFrom"}:
                    raise ConfigurationError(
                        f"cluster.kubernetes.env.{name}={value} is not the source of a variable: write {{valueFrom: "
                        "{secretKeyRef: {name: SECRET, key: KEY}}}"
                    )
                check_fields(f"cluster.kubernetes.env.{name}", value, "EnvVar")
            if name in NODE_VARIABLES or name.startswith("PET_"):
                raise ConfigurationError(
                    f"cluster.kubernetes.env: submit sets {name} according to trainer.num_nodes and trainer.devices; "
                    f"leave {name} out"
                )

    @property
    def whole_grace(self) -> int:
        """Seconds between SIGTERM and SIGKILL of a pod."""
        return round(seconds(self.grace_seconds, "cluster.kubernetes.grace_seconds", least=0))

    @property
    def grace(self) -> int:
        """Number of seconds after SIGTERM until a run that has not stopped kills itself."""
        return self.whole_grace - POD_MARGIN_SECONDS


@dataclass
class RayOptions:
    """Options of ``submit --to ray``. Other keys of the section ``cluster`` set the resources of a node.

    Attributes:
        address: Address of the Ray cluster, in the format of ``ray.init``. The default is the value of
            ``RAY_ADDRESS``, or else the cluster on this machine.
        max_restarts: Number of times that the run is restarted from its last checkpoint after it has lost a node or a
            process.
        wait: Longest time to wait for free nodes, at the start and before a restart, as seconds or
            ``minutes:seconds``.

    Raises:
        ConfigurationError: A value is out of its range.
    """

    address: str | None = None
    max_restarts: int = 3
    wait: Duration = 600

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ConfigurationError(f"cluster.ray.max_restarts={self.max_restarts} is negative; use 0 for no restarts")
        if self.wait_seconds < 1:
            raise ConfigurationError(
                f"cluster.ray.wait={self.wait} is too short for nodes to start a process; use at least 30"
            )

    @property
    def wait_seconds(self) -> float:
        """Longest time to wait for free nodes, in seconds."""
        return seconds(self.wait, "cluster.ray.wait", least=0)


@dataclass
class ClusterOptions:
    """Options of a cluster job. ``submit`` reads them; ``fit`` ignores them.

    The size of the job follows from the trainer: it has ``trainer.num_nodes`` nodes and ``trainer.devices`` processes
    on each node. With ``trainer.accelerator: gpu`` each process has a GPU.

    Attributes:
        job_name: Name of the job. The name of the run folder begins with it.
        partition: Partition of the cluster.
        account: Account that is charged for the job.
        time: Time limit in SLURM's format, in quotes: "minutes", "hours:minutes:seconds" or
            "days-hours:minutes:seconds".
        cpus_per_task: Number of CPUs for each process, including its threads and its data workers.
        memory: Memory of each node, such as 64G.
        gpu_type: Type of the GPUs, such as a100; by default any type.
        venv: Path of a virtual environment to activate.
        setup: Additional shell commands in the job script before the run, such as ``module load cuda/12.4``.
        python: Python interpreter. The default is ``python`` if ``venv`` or ``container`` is set, and otherwise the
            interpreter that runs ``submit``.
        container: Command that runs a program in a container, such as ``apptainer exec --nv image.sif``. The Python
            interpreter must be in the container image.
        sbatch: Additional options of sbatch, such as ``--exclusive`` and ``--constraint=ib``.
        requeue: Whether the job, when it receives the warning signal, saves a checkpoint after the current step,
            requeues itself, and resumes from the checkpoint.
        signal: Signal that SLURM sends as a warning before the time limit.
        signal_seconds: Time between the warning signal and the time limit, as seconds or ``minutes:seconds``. In this
            time the run must finish its step, or a validation. SLURM may send the signal up to a minute earlier.
        max_requeues: Largest number of times that a job requeues itself.
        folder: Directory for run folders, on a file system that all nodes share. The default is the name of the
            launcher, ``slurm`` with ``--to slurm`` and ``ray`` with ``--to ray``. Kubernetes needs a directory in a
            volume.
        check_data: Whether ``submit`` checks on this machine that the data exist. Set this to false if only the nodes
            have the data.
        server_nodes: Number of additional nodes with a dedicated parameter server each, for a
            ``ParameterServerStrategy``. Under SLURM they are the second component of a heterogeneous job. With 0 the
            servers run on the trainer's nodes.
        server_sbatch: Options of sbatch for the server nodes, such as ``--partition=cpu`` and ``--mem=32G``. Their
            default partition, account and time limit are those of the trainer's nodes.
        kubernetes: Options for Kubernetes only. Jobs for Kubernetes also use the keys job_name, folder, python,
            setup and server_nodes. They ignore the other keys of the section ``cluster``.
        ray: Options for Ray only.

    Raises:
        ConfigurationError: A value is out of its range, or an option of sbatch is set that follows from other keys.
    """

    job_name: str = "cnnstrategies"
    partition: str | None = None
    account: str | None = None
    time: str | int | None = None
    cpus_per_task: int | None = None
    memory: str | None = None
    gpu_type: str | None = None
    venv: Path | None = None
    setup: list[str] = field(default_factory=list)
    python: str | None = None
    container: str | None = None
    sbatch: list[str] = field(default_factory=list)
    requeue: bool = True
    signal: Literal["USR1", "USR2"] = "USR1"
    signal_seconds: Duration = 120
    max_requeues: int = 100
    folder: Path = Path("slurm")
    check_data: bool = True
    server_nodes: int = 0
    server_sbatch: list[str] = field(default_factory=list)
    kubernetes: KubernetesOptions = field(default_factory=KubernetesOptions)
    ray: RayOptions = field(default_factory=RayOptions)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.+-]+", self.job_name) or self.job_name in INTERACTIVE:
            raise ConfigurationError(
                f"cluster.job_name={self.job_name!r}: use letters, digits and . + - _, but not the names "
                f"{', '.join(INTERACTIVE)}, with which Lightning assumes an interactive shell"
            )
        if self.cpus_per_task is not None and self.cpus_per_task < 1:
            raise ConfigurationError(f"cluster.cpus_per_task={self.cpus_per_task}: use at least 1")
        if self.python is not None and " " in self.python.strip() and not Path(self.python).is_file():
            container, _, python = self.python.strip().rpartition(" ")
            raise ConfigurationError(
                f"cluster.python={self.python!r} must be only the path of an interpreter: for an interpreter in a "
                f"container set cluster.container={container!r} and cluster.python={python!r}"
            )
        for name, lines in (("sbatch", self.sbatch), ("server_sbatch", self.server_sbatch)):
            for line in lines:
                _check_extra(name, line)
        if self.server_nodes < 0:
            raise ConfigurationError(f"cluster.server_nodes={self.server_nodes} is negative; use 0 for no server nodes")
        if self.server_sbatch and not self.server_nodes:
            raise ConfigurationError(
                f"cluster.server_sbatch={self.server_sbatch} has no effect without server nodes: set "
                "cluster.server_nodes, or leave server_sbatch out"
            )
        if isinstance(self.time, int):
            raise ConfigurationError(
                f"cluster.time={self.time}: without quotes YAML reads 1:30:00 as the number 5400; put the value in "
                "quotes: `time: '1:30:00'`, or `time: '90'` (90 minutes)"
            )
        if self.requeue and self.warning < MARGIN_SECONDS + 10:
            raise ConfigurationError(
                f"cluster.signal_seconds={self.signal_seconds} is too short to finish a step and save a checkpoint: "
                f"use at least {MARGIN_SECONDS + 10}; 120 is usual"
            )

    @property
    def warning(self) -> int:
        """Seconds between the warning signal and the time limit."""
        return round(seconds(self.signal_seconds, "cluster.signal_seconds", least=0))

    @property
    def grace(self) -> int:
        """Number of seconds after the warning signal until a run that has not stopped kills itself."""
        return self.warning - MARGIN_SECONDS


def _check_extra(name: str, line: str) -> None:
    """Refuse a line of additional options of sbatch if it is not a single option, or if another key sets the option."""
    if not line.startswith("-") or "\n" in line:
        raise ConfigurationError(f"cluster.{name}: {line!r} must be one option of sbatch, for example --exclusive")
    for word in line.split():
        option = word.partition("=")[0]
        key = next((key for key, names in DECIDED.items() if option in names or option[:2] in names), None)
        if option == "--gres" and "gpu" in line:
            key = "trainer.devices"
        if key is not None and (name, key) != ("server_sbatch", "cluster.cpus_per_task"):
            raise ConfigurationError(
                f"cluster.{name}: submit sets the option in {line!r} according to {key}: leave the option out, and set "
                f"{key}"
            )
