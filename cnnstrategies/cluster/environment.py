"""What the launcher says about this process, where Lightning needs to be told; an mpirun's ranks and addresses."""

import os
import socket
import sys
import zlib
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies.protocol import facts_of

FIRST_SPECIAL_STEP = 0xFFFFFFF0  # From here on SLURM numbers what srun has not started: a job's script, its shell.
FIRST_PORT, PORTS = 20000, 10000
# Where they say how many nodes there are.
NODES: dict[type[ClusterEnvironment], str] = {
    TorchElasticEnvironment: "GROUP_WORLD_SIZE",
    SLURMEnvironment: "SLURM_NNODES",
    LightningEnvironment: "NNODES",
}


class MpirunEnvironment(ClusterEnvironment):
    """Takes ranks from the variables that ``mpirun`` sets, so neither mpi4py nor a working MPI library is needed.

    Lightning's ``MPIEnvironment`` needs mpi4py, and tells hosts apart by their names.
    """

    # Names of its variables.
    RANK: str
    SIZE: str
    LOCAL_RANK: str
    LOCAL_SIZE: str
    PER_MACHINE: str  # The option that starts so many ranks on each machine, one machine after the other.
    PASS_ON: str  # The options that set ``MASTER_ADDR``, up to its value.

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @classmethod
    @override
    def detect(cls) -> bool:
        """Whether this mpirun has started this process, and not only a launcher that has started it in turn."""
        # A torchrun under mpirun hands its own variables down, beside those of mpirun.
        return {cls.RANK, cls.LOCAL_RANK} <= os.environ.keys() and "TORCHELASTIC_RUN_ID" not in os.environ

    @abstractmethod
    def job(self) -> str:
        """What is the same on every rank, and another for each mpirun as far as that can be known."""

    @property
    @override
    def main_address(self) -> str:
        if "MASTER_ADDR" in os.environ:
            return os.environ["MASTER_ADDR"]
        if self.local_size() == self.world_size():
            return "127.0.0.1"
        raise ConfigurationError(
            f"mpirun has started ranks on several machines, and rank {self.global_rank()} does not know rank 0's "
            f"address: add `{self.PASS_ON}<the first machine in the hostfile>` to mpirun"
        )

    @property
    @override
    def main_port(self) -> int:
        if "MASTER_PORT" in os.environ:
            return int(os.environ["MASTER_PORT"])
        return FIRST_PORT + zlib.crc32(self.job().encode()) % PORTS

    @override
    def world_size(self) -> int:
        return int(os.environ[self.SIZE])

    @override
    def set_world_size(self, size: int) -> None:
        """Do nothing: mpirun has decided."""

    @override
    def global_rank(self) -> int:
        return int(os.environ[self.RANK])

    @override
    def set_global_rank(self, rank: int) -> None:
        """Do nothing: mpirun has decided."""

    @override
    def local_rank(self) -> int:
        return int(os.environ[self.LOCAL_RANK])

    def local_size(self) -> int:
        """Number of ranks on this machine."""
        return int(os.environ[self.LOCAL_SIZE])

    @override
    def node_rank(self) -> int:
        return self.global_rank() // self.local_size()

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Refuse another number of processes, and ranks that are not numbered machine by machine, as many on each."""
        local, world, expected = self.local_size(), self.world_size(), num_devices * num_nodes
        if num_devices != local or expected != world or self.global_rank() % local != self.local_rank():
            raise ConfigurationError(
                f"rank {self.global_rank()} of {world} is process {self.local_rank()} of {local} on "
                f"{socket.gethostname()}, and trainer.devices={num_devices} with trainer.num_nodes={num_nodes} are "
                f"numbered machine by machine: use `mpirun -n {expected} {self.PER_MACHINE.format(num_devices)}`"
            )


class OpenMPIEnvironment(MpirunEnvironment):
    """Under Open MPI's."""

    RANK, SIZE = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
    LOCAL_RANK, LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
    PER_MACHINE, PASS_ON = "--map-by ppr:{}:node", "-x MASTER_ADDR="

    @override
    def job(self) -> str:
        return os.environ["PMIX_NAMESPACE"]


class MPICHEnvironment(MpirunEnvironment):
    """Under MPICH's, and those that are made from it, such as Intel's: their Hydra starts the processes."""

    # SLURM's srun sets PMI_RANK too, where it was built so, but none of the local ones.
    RANK, SIZE, LOCAL_RANK, LOCAL_SIZE = "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"
    PER_MACHINE, PASS_ON = "-ppn {}", "-genv MASTER_ADDR "

    @override
    def job(self) -> str:
        # Hydra has no number for a job. On one machine its process there is the parent of all ranks.
        parent = os.getppid() if self.local_size() == self.world_size() and _is_hydra(os.getppid()) else ""
        return repr((os.getuid(), os.getcwd(), sys.argv[1:], parent))


MPIRUNS: tuple[type[MpirunEnvironment], ...] = (OpenMPIEnvironment, MPICHEnvironment)


def local_rank() -> int:
    """Number of this process on its machine, known before Lightning has found its environment; 0 without a launcher."""
    # srun's own after those of an mpirun inside its job: SLURM has started one process there, which is its number 0.
    names = ("LOCAL_RANK", *(kind.LOCAL_RANK for kind in MPIRUNS), "SLURM_LOCALID")
    return next((int(os.environ[name]) for name in names if name in os.environ), 0)


def environment_plugins(plugins: list[Any], num_nodes: int = 1) -> list[ClusterEnvironment]:
    """What to add to ``trainer.plugins`` for the launcher that started this process.

    mpirun inside a SLURM job comes first: its ranks are those that count. Under srun Lightning would save its
    checkpoint inside the handler of the warning signal, when the ranks may be in different steps; here GracefulStop
    stops them at the same one, and the job's script requeues it. A job's script, or its shell, without srun is one
    process that has the job's variables: Lightning would take it for rank 0 and wait for the others.

    A cluster environment among the configuration's plugins is left alone.
    """
    if any(isinstance(plugin, ClusterEnvironment) for plugin in plugins):
        return []
    if (started := launcher()) is not None:
        return [] if isinstance(started, TorchElasticEnvironment) else [started]  # Lightning finds torchrun itself.
    if num_nodes > 1 and "SLURM_JOB_ID" in os.environ and "NODE_RANK" not in os.environ:
        raise ConfigurationError(
            f"trainer.num_nodes={num_nodes}: this job of SLURM has started one process, on its first node: write srun "
            "before the command in its script, with one task for each device (--ntasks-per-node), or let "
            "`cnnstrategies submit fit` write the script"
        )
    if int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) > 1 and local_rank() == 0:
        rank_zero_info(
            f"This job of SLURM has {os.environ['SLURM_JOB_NUM_NODES']} nodes, and the run only this one: start it "
            "with srun, one task for each device, or from a login node with cnnstrategies submit"
        )
    return [LightningEnvironment()] if _in_slurm() else []


def launcher() -> ClusterEnvironment | None:
    """What has started this process and its others; None where Lightning is to start them."""
    if TorchElasticEnvironment.detect():
        return TorchElasticEnvironment()
    if (mpirun := next((kind for kind in MPIRUNS if kind.detect()), None)) is not None:
        return mpirun()
    is_task = int(os.environ.get("SLURM_STEP_ID", FIRST_SPECIAL_STEP)) < FIRST_SPECIAL_STEP  # of srun
    return SLURMEnvironment(auto_requeue=False) if is_task and _in_slurm() else None


def _in_slurm() -> bool:
    # Asked first: Lightning's `detect` warns where srun is installed and not used.
    return "SLURM_NTASKS" in os.environ and SLURMEnvironment.detect()


@dataclass(frozen=True)
class DoctorPlace:
    """A process of the doctor: its host, and its number there; only the first one of each host works."""

    node: int
    nodes: int
    local_rank: int
    main_address: str
    main_port: int


def find_place() -> DoctorPlace | None:
    """Read the variables of srun, torchrun, mpirun, or those set by hand; None where nothing has started others."""
    environment = launcher()
    if environment is None and {"NNODES", "NODE_RANK"} <= os.environ.keys():
        environment = LightningEnvironment()
    if environment is None:
        return None
    if isinstance(environment, MpirunEnvironment):
        nodes = environment.world_size() // environment.local_size()
    else:
        nodes = int(os.environ[NODES[type(environment)]])
    address, port = environment.main_address, environment.main_port
    return DoctorPlace(environment.node_rank(), nodes, environment.local_rank(), address, port)


def check_world(trainer: Trainer) -> None:
    """Refuse a launcher that has started another number of processes than the trainer divides the work among.

    Each would train on its share of the data, and nobody on the rest.
    """
    environment = facts_of(trainer.strategy).environment or launcher()
    # With Lightning's own, its processes are told how many they are by the trainer.
    if environment is None or isinstance(environment, LightningEnvironment):
        return
    nodes, devices, world = trainer.num_nodes, trainer.num_devices, environment.world_size()
    if world != nodes * devices:
        raise ConfigurationError(
            f"The launcher has started {world} {'process' if world == 1 else 'processes'}, and trainer.num_nodes="
            f"{nodes} x trainer.devices={devices} are {nodes * devices}: start as many (srun with "
            f"--nodes={nodes} --ntasks-per-node={devices}, torchrun --nnodes={nodes} --nproc-per-node={devices}, "
            f"mpirun -n {nodes * devices}), or change trainer.num_nodes and trainer.devices"
        )
    try:
        environment.validate_settings(num_devices=devices, num_nodes=nodes)
    except ValueError as error:
        raise ConfigurationError(f"trainer.num_nodes={nodes}, trainer.devices={devices}: {error}") from error


def _is_hydra(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/comm").read_text().startswith("hydra")
    except OSError:
        return False
