"""The ``cluster:`` section of a configuration."""

import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.quantities import Duration, seconds

# Options of sbatch, by the key that decides them: an extra line with such an option could disagree with the key.
DECIDED = {
    "trainer.num_nodes": ("-N", "--nodes"),
    "trainer.devices": (
        *("-n", "--ntasks", "--ntasks-per-node", "--tasks-per-node", "--ntasks-per-gpu", "--ntasks-per-socket"),
        *("-G", "--gpus", "--gpus-per-node", "--gpus-per-task", "--gpus-per-socket"),
    ),
    "cluster.job_name": ("-J", "--job-name"),
    "cluster.cpus_per_task": ("-c", "--cpus-per-task"),  # srun needs this option as well.
    "cluster.signal": ("--signal",),
    "cluster.requeue": ("--requeue", "--no-requeue"),
    "cluster.folder": ("-o", "--output", "-e", "--error", "--open-mode", "-a", "--array"),
}
# Names of jobs that Lightning takes for a shell; it then ignores SLURM's ranks.
INTERACTIVE = ("bash", "interactive")
# Seconds between the end of the run's grace and the time limit. In this time the processes end and the job is requeued.
MARGIN_SECONDS = 20
# Seconds between the end of the run's grace and the moment when the pod is killed. In this time the processes end.
POD_MARGIN_SECONDS = 10
# Folders that the package itself uses in every pod.
POD_FOLDERS = ("/dev/shm", "/run/cnnstrategies")
# Fields of a pod's specification that follow from the run.
POD_FIELDS = {"containers", "restartPolicy", "subdomain", "terminationGracePeriodSeconds", "volumes"}
# Environment variables that follow from the nodes; a variable from the user could disagree.
NODE_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "NNODES", "LOCAL_RANK", "RANK", "WORLD_SIZE")


@dataclass
class KubernetesOptions:
    """Resources of a run's pods. ``submit fit --to kubernetes`` reads them.

    Each node of the trainer is a pod: there are ``trainer.num_nodes`` pods, and with ``trainer.accelerator: gpu`` each
    requests ``trainer.devices`` GPUs.

    Attributes:
        image: Container image that has this package.
        namespace: Namespace of the objects; by default that of the current context.
        queue: Local queue of Kueue.
        pod: Other fields of the pods' specification, as Kubernetes writes them, such as nodeSelector, tolerations,
            priorityClassName, imagePullSecrets, or a securityContext with runAsUser and fsGroup.
        resources: Requests and limits of a pod of the trainer, such as {cpu: 8, memory: 64Gi}.
        gpu: Name of the resource for GPUs.
        server_resources: Requests and limits of a pod that holds parameters (cluster.server_nodes).
        volumes: Persistent volume claims, by the directory where the pods see them, such as {/runs: my-claim}.
        shared_memory: Largest size of /dev/shm, such as 8Gi, which counts as the pod's memory; by default only the
            pod's memory limits it.
        key_secret: Secret with the keys of a parameter server, made from a file run.key.
        env: Environment variables of the pods, such as {NCCL_SOCKET_IFNAME: eth0}.
        grace_seconds: Time, as seconds or ``minutes:seconds``, between a pod's SIGTERM and its end. A step, or a
            validation if it comes then, and the writing of the checkpoint must fit into it.
        max_restarts: How often pods that fail are started again. Pods that end with a checkpoint, because their node is
            drained or needed, do not count.

    Raises:
        ConfigurationError: A value is out of range.
    """

    image: str | None = None
    namespace: str | None = None
    queue: str | None = None
    pod: dict[str, Any] = field(default_factory=dict)
    resources: dict[str, str | int] = field(default_factory=dict)
    gpu: str = "nvidia.com/gpu"
    server_resources: dict[str, str | int] = field(default_factory=dict)
    volumes: dict[str, str] = field(default_factory=dict)
    shared_memory: str | None = None
    key_secret: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    grace_seconds: Duration = 120
    max_restarts: int = 6

    def __post_init__(self) -> None:
        if self.whole_grace < POD_MARGIN_SECONDS + 10:
            raise ConfigurationError(
                f"cluster.kubernetes.grace_seconds={self.grace_seconds}: a run needs time to finish its step and to "
                f"save; at least {POD_MARGIN_SECONDS + 10}, and 120 is usual"
            )
        if self.max_restarts < 0:
            raise ConfigurationError(
                f"cluster.kubernetes.max_restarts={self.max_restarts} is negative; 0 starts no failed pod again"
            )
        for path in self.volumes:
            parts = PurePosixPath(path)
            if not parts.is_absolute() or path == "/" or any(parts.is_relative_to(folder) for folder in POD_FOLDERS):
                raise ConfigurationError(
                    f"cluster.kubernetes.volumes: {path!r}: name a directory from the root, such as /runs, outside of "
                    f"{' and '.join(POD_FOLDERS)}"
                )
        if decided := self.pod.keys() & POD_FIELDS:
            raise ConfigurationError(
                f"cluster.kubernetes.pod: {', '.join(sorted(decided))}: submit decides this; leave it out"
            )
        for name in self.env:
            if name in NODE_VARIABLES or name.startswith("PET_"):
                raise ConfigurationError(
                    f"cluster.kubernetes.env: {name} follows from trainer.num_nodes and trainer.devices, and could "
                    "disagree with them; leave it out"
                )

    @property
    def whole_grace(self) -> int:
        """Seconds between a pod's SIGTERM and its end."""
        return round(seconds(self.grace_seconds, "cluster.kubernetes.grace_seconds", least=0))

    @property
    def grace(self) -> int:
        """Seconds between SIGTERM and the moment when a run that has not stopped is killed."""
        return self.whole_grace - POD_MARGIN_SECONDS


@dataclass
class RayOptions:
    """The Ray cluster of ``submit --to ray``. Other keys of ``cluster`` give the resources of a node.

    Attributes:
        address: Address of the cluster, as ``ray.init`` accepts it; by default ``RAY_ADDRESS``, or else the cluster of
            this machine.
        max_restarts: How often the run is started again from its last checkpoint after a node or a process was lost.
        wait: Longest wait for free nodes, at the start and after a loss: seconds or ``minutes:seconds``.

    Raises:
        ConfigurationError: A value is out of range.
    """

    address: str | None = None
    max_restarts: int = 3
    wait: Duration = 600

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ConfigurationError(f"cluster.ray.max_restarts={self.max_restarts}: use 0 or more")
        if self.wait_seconds < 1:
            raise ConfigurationError(
                f"cluster.ray.wait={self.wait}: nodes need some seconds to start a process; use at least 30"
            )

    @property
    def wait_seconds(self) -> float:
        """Longest wait for nodes that are free, in seconds."""
        return seconds(self.wait, "cluster.ray.wait", least=0)


@dataclass
class ClusterOptions:
    """Resources of a job. ``submit`` reads them; ``fit`` ignores them.

    The trainer decides nodes, tasks and GPUs: ``trainer.num_nodes`` nodes, ``trainer.devices`` tasks on each node, and
    with ``trainer.accelerator: gpu`` as many GPUs on each node.

    Attributes:
        job_name: Name of the job, and first part of the run folder's name.
        partition: Partition.
        account: Account that pays for the time.
        time: Time limit as SLURM writes it, in quotes: "minutes", "hours:minutes:seconds" or
            "days-hours:minutes:seconds".
        cpus_per_task: CPUs of each process, for its threads and its data workers.
        memory: Memory of a node, such as 64G.
        gpu_type: Type of the GPUs, such as a100; by default any type.
        venv: Virtual environment to activate.
        setup: Other lines of the script before the run, such as ``module load cuda/12.4``.
        python: Interpreter; by default ``python`` with ``venv`` or ``container``, and otherwise the interpreter that
            runs ``submit``.
        container: Words that start a container, such as ``apptainer exec --nv image.sif``; the interpreter is in the
            image.
        sbatch: Other options of sbatch, such as ``--exclusive`` and ``--constraint=ib``.
        requeue: On the warning signal, stop after a step with a checkpoint, requeue the job, and resume there.
        signal: The warning signal.
        signal_seconds: Time, as seconds or ``minutes:seconds``, between the warning signal and the time limit. A step,
            or a validation if it comes then, must fit into it; SLURM may send the signal up to a minute earlier.
        max_requeues: How often a job may requeue itself.
        folder: Directory for run folders, on a disk that all nodes see; with ``--to ray`` the default is ``ray``.
        check_data: Look at the data before the job is queued; set this to false if only the nodes have the data.
        server_nodes: Number of additional nodes that hold the parameters of a ``ParameterServerStrategy``, with one
            dedicated server on each; they are the second part of a heterogeneous job. With 0 the trainer's nodes hold
            the parameters.
        server_sbatch: Options of sbatch for these nodes, such as ``--partition=cpu`` and ``--mem=32G``; by default
            partition, account and time are the trainer's.
        kubernetes: Options that only Kubernetes has. It also reads job_name, folder, python, setup and server_nodes,
            and ignores the other keys.
        ray: Options that only Ray has.

    Raises:
        ConfigurationError: A value is out of range, or an option of sbatch is one that the trainer decides.
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
                f"{', '.join(INTERACTIVE)}, which Lightning takes for a shell"
            )
        if self.cpus_per_task is not None and self.cpus_per_task < 1:
            raise ConfigurationError(f"cluster.cpus_per_task={self.cpus_per_task}: a process needs at least 1")
        if self.python is not None and " " in self.python.strip() and not Path(self.python).is_file():
            container, _, python = self.python.strip().rpartition(" ")
            raise ConfigurationError(
                f"cluster.python={self.python!r}: it must be only the path of an interpreter; for an interpreter in a "
                f"container give cluster.container={container!r} and cluster.python={python!r}"
            )
        for name, lines in (("sbatch", self.sbatch), ("server_sbatch", self.server_sbatch)):
            for line in lines:
                _check_extra(name, line)
        if self.server_nodes < 0:
            raise ConfigurationError(f"cluster.server_nodes={self.server_nodes}: use 1 or more, or 0 for no such nodes")
        if self.server_sbatch and not self.server_nodes:
            raise ConfigurationError(
                f"cluster.server_sbatch={self.server_sbatch} is for nodes that the job does not ask for: set "
                "cluster.server_nodes, or leave server_sbatch out"
            )
        if isinstance(self.time, int):
            raise ConfigurationError(
                f"cluster.time={self.time}: without quotes YAML reads 1:30:00 as the number 5400; write time: "
                "'1:30:00', or time: '90' for minutes"
            )
        if self.requeue and self.warning < MARGIN_SECONDS + 10:
            raise ConfigurationError(
                f"cluster.signal_seconds={self.signal_seconds}: a run needs time to finish its step and to save; at "
                f"least {MARGIN_SECONDS + 10}, and 120 is usual"
            )

    @property
    def warning(self) -> int:
        """Seconds between the warning signal and the time limit."""
        return round(seconds(self.signal_seconds, "cluster.signal_seconds", least=0))

    @property
    def grace(self) -> int:
        """Seconds between the warning signal and the moment when a run that has not stopped is killed."""
        return self.warning - MARGIN_SECONDS


def _check_extra(name: str, line: str) -> None:
    """Refuse options of sbatch that other keys of the configuration decide."""
    if not line.startswith("-") or "\n" in line:
        raise ConfigurationError(f"cluster.{name}: {line!r} is not an option of sbatch, such as --exclusive")
    for word in line.split():
        option = word.partition("=")[0]
        key = next((key for key, names in DECIDED.items() if option in names or option[:2] in names), None)
        if option == "--gres" and "gpu" in line:
            key = "trainer.devices"
        if key is not None and (name, key) != ("server_sbatch", "cluster.cpus_per_task"):
            raise ConfigurationError(
                f"cluster.{name}: {line!r} could disagree with {key}, which decides this: leave the option out, and "
                f"set {key}"
            )
