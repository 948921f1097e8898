"""mpirun of Open MPI and of MPICH, which start ranks on several machines over SSH or inside a job of SLURM."""

import os
import sys
from pathlib import Path

from typing_extensions import override

from cnnstrategies.cluster.launchers.launcher import Environ, Launcher
from cnnstrategies.cluster.launchers.registry import register


class Mpirun(Launcher):
    """Base class of the two launchers whose program is called mpirun.

    Attributes:
        per_machine: Option that starts a number of ranks on each machine and numbers them machine by machine.
        address_option: Option that sets ``MASTER_ADDR`` on all machines, up to the value.
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
    """Open MPI's mpirun."""

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
class MPICH(Mpirun):
    """The mpirun of MPICH, and of programs derived from it, such as Intel MPI: their Hydra starts the processes."""

    name = "mpich"
    title = "MPICH"
    precedence = 30
    # An srun that was built with PMI also sets PMI_RANK, but does not set the two local variables.
    rank_variable, size_variable = "PMI_RANK", "PMI_SIZE"
    local_rank_variable, local_size_variable = "MPI_LOCALRANKID", "MPI_LOCALNRANKS"
    variables = ("PMI_*", "MPI_LOCAL*")
    per_machine, address_option = "-ppn {}", "-genv MASTER_ADDR "

    @override
    def launch_id(self, environ: Environ) -> str:
        """Return the user, the working directory and the command-line arguments, because Hydra has no job id.

        On one machine Hydra's process is the parent of all ranks, and the id of this process is added. It distinguishes
        two launches with equal arguments.
        """
        alone = environ.get(self.local_size_variable) == environ.get(self.size_variable)
        parent = os.getppid() if alone and _is_hydra(os.getppid()) else ""
        return repr((os.getuid(), os.getcwd(), sys.argv[1:], parent))


def _is_hydra(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/comm").read_text().startswith("hydra")
    except OSError:
        return False
