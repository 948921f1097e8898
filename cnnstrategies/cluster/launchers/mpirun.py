"""Launchers for the mpirun of Open MPI and that of MPICH. mpirun starts ranks on several machines, by SSH or SLURM."""

import os
import sys
from pathlib import Path

from typing_extensions import override

from cnnstrategies.cluster.launchers.launcher import Environ, Launcher
from cnnstrategies.cluster.launchers.registry import register
from cnnstrategies.cluster.variables import number_of


class Mpirun(Launcher):
    """Base class of the launchers for Open MPI and MPICH, both of which have a program called mpirun.

    Attributes:
        per_machine: Option of mpirun for the number of ranks on each machine, with ``{}`` for the number. The ranks of
            a machine then have consecutive numbers.
        address_option: First part of the option of mpirun that sets ``MASTER_ADDR`` on all machines; the address
            follows.
    """

    program = "mpirun"
    per_machine: str
    address_option: str

    @override
    def detect(self, environ: Environ) -> bool:
        return {self.rank_variable, self.local_rank_variable} <= environ.keys()

    @override
    def start_command(self, nodes: int, devices: int) -> str:
        return f"mpirun -n {nodes * devices} {self.per_machine.format(devices)}"

    @property
    @override
    def address_remedy(self) -> str:
        return f"add `{self.address_option}<the first machine in the hostfile>` to mpirun"


@register
class OpenMPI(Mpirun):
    """Launcher for Open MPI's mpirun."""

    name = "openmpi"
    title = "Open MPI"
    precedence = 20
    rank_variable, size_variable = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
    local_rank_variable, local_size_variable = "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
    variables = ("OMPI_*", "PMIX_*")
    per_machine, address_option = "--map-by ppr:{}:node", "-x MASTER_ADDR="

    @override
    def launch_id(self, environ: Environ) -> str | None:
        return environ.get("PMIX_NAMESPACE")


@register
class AzureML(OpenMPI):
    """Launcher for MPI jobs of Azure ML, which calls Open MPI's mpirun itself and names the first node."""

    name = "azureml"
    title = "Azure ML"
    precedence = 18

    @override
    def detect(self, environ: Environ) -> bool:
        return super().detect(environ) and self.main_address(environ) is not None

    @override
    def main_address(self, environ: Environ) -> str | None:
        first = environ.get("AZ_BATCH_MASTER_NODE", environ.get("AZ_BATCHAI_MPI_MASTER_NODE", ""))
        return first.partition(":")[0] or None


@register
class MPICH(Mpirun):
    """Launcher for the mpirun of MPICH, and of MPI libraries that are derived from MPICH, such as Intel MPI.

    The mpirun of these libraries is the program Hydra.
    """

    name = "mpich"
    title = "MPICH"
    precedence = 30
    # srun with PMI also sets PMI_RANK. It does not set the variables for the local rank and the local world size, which
    # therefore distinguish mpirun from srun.
    rank_variable, size_variable = "PMI_RANK", "PMI_SIZE"
    local_rank_variable, local_size_variable = "MPI_LOCALRANKID", "MPI_LOCALNRANKS"
    variables = ("PMI_*", "MPI_LOCAL*")
    per_machine, address_option = "-ppn {}", "-genv MASTER_ADDR "

    @override
    def launch_id(self, environ: Environ) -> str:
        """Return an id made of the user id, the working directory and the command-line arguments.

        Hydra itself does not set a job id. On a single machine, a Hydra process is the parent of all ranks. The result
        then also contains the process id of this parent, so that two launches with equal arguments have different ids.
        """
        alone = environ.get(self.local_size_variable) == environ.get(self.size_variable)
        parent = os.getppid() if alone and _is_hydra(os.getppid()) else ""
        return repr((os.getuid(), os.getcwd(), sys.argv[1:], parent))

    @override
    def refusal(self, environ: Environ) -> str | None:
        """Refuse ranks of a library that does not set the variables of a node, such as an MPI that uses only PMI.

        In a SLURM job the launcher for SLURM decides, because srun may also set these variables.
        """
        if "SLURM_JOB_ID" in environ:
            return None
        for rank, size in (("PMI_RANK", "PMI_SIZE"), ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE")):
            if rank in environ and (number_of(environ, size) or 1) > 1:
                return (
                    f"{rank}={environ[rank]} and {size}={environ[size]} say that there are several processes, but "
                    f"{self.local_rank_variable} is not set: start the run with the mpirun of Open MPI or MPICH, or "
                    f"with torchrun, or unset {rank} and {size} for independent runs"
                )
        return None


def _is_hydra(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/comm").read_text().startswith("hydra")
    except OSError:
        return False
