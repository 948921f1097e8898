"""Launcher for PBS on machines whose mpiexec belongs to HPE's PALS, and refusal of the tasks of pbsdsh."""

from pathlib import Path

from typing_extensions import override

from cnnstrategies.cluster.launchers.launcher import Environ, Launcher
from cnnstrategies.cluster.launchers.registry import register
from cnnstrategies.cluster.variables import number_of

# Number of hexadecimal digits in PBS_TASKNUM of a task that PBS has started. PBS_TASKNUM of the job's script is 1.
DIGITS = 8


@register
class PBS(Launcher):
    """Launcher for PBS. The ranks are the processes that the ``mpiexec`` of HPE's PALS starts.

    The ``mpiexec`` of another MPI is handled by that MPI's launcher.
    """

    name = "pbs"
    title = "PBS"
    precedence = 32
    program = "mpiexec"
    rank_variable, size_variable = "PALS_RANKID", "PMI_SIZE"
    local_rank_variable, local_size_variable = "PALS_LOCAL_RANKID", "PMI_LOCAL_SIZE"
    variables = ("PALS_*", "PMI_*", "PBS_NODENUM", "PBS_TASKNUM")

    @override
    def detect(self, environ: Environ) -> bool:
        return {self.rank_variable, self.size_variable, self.local_rank_variable} <= environ.keys()

    @override
    def local_size(self, environ: Environ) -> int | None:
        return number_of(environ, self.local_size_variable) or number_of(environ, "PALS_LOCAL_SIZE")

    @override
    def main_address(self, environ: Environ) -> str | None:
        try:
            return Path(environ["PBS_NODEFILE"]).read_text(encoding="utf-8").split()[0]
        except (KeyError, OSError, IndexError):
            return None

    @override
    def launch_id(self, environ: Environ) -> str | None:
        return environ.get("PALS_APID", environ.get("PBS_JOBID"))

    @override
    def start_command(self, nodes: int, devices: int) -> str:
        return f"mpiexec -n {nodes * devices} -ppn {devices}"

    @property
    @override
    def address_remedy(self) -> str:
        return "add `export MASTER_ADDR=$(head -n 1 $PBS_NODEFILE)` to the job's script"

    @override
    def refusal(self, environ: Environ) -> str | None:
        """Refuse the tasks of pbsdsh. A process in the job's script is the only process of its run, and is accepted."""
        node, task = number_of(environ, "PBS_NODENUM") or 0, environ.get("PBS_TASKNUM", "1")
        if "PBS_JOBID" not in environ or (node == 0 and len(task) != DIGITS):
            return None
        return (
            f"PBS_NODENUM={node} and PBS_TASKNUM={task} say that pbsdsh has started a process on each node, but pbsdsh "
            "does not name ranks: start the run with mpiexec or torchrun, or unset both variables for independent runs"
        )
