"""Launcher for jsrun, which starts ranks in jobs of IBM's LSF."""

from pathlib import Path

from typing_extensions import override

from cnnstrategies.cluster.launchers.launcher import Environ, Launcher
from cnnstrategies.cluster.launchers.registry import register
from cnnstrategies.cluster.variables import number_of

# File with the hosts of the job, one line for each slot. The first line is the host that runs the job's script.
HOSTS = "LSB_DJOB_RANKFILE"


@register
class LSF(Launcher):
    """Launcher for LSF. The tasks of jsrun are the ranks.

    It comes before Open MPI, because jsrun may also set the variables of Open MPI, which do not name an address.
    """

    name = "lsf"
    title = "LSF"
    precedence = 15
    program = "jsrun"
    rank_variable, size_variable = "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"
    local_rank_variable, local_size_variable = "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"
    variables = ("JSM_*", "LSF_PM_*")

    @override
    def detect(self, environ: Environ) -> bool:
        return {self.rank_variable, self.size_variable, self.local_rank_variable} <= environ.keys()

    @override
    def main_address(self, environ: Environ) -> str | None:
        try:
            return Path(environ[HOSTS]).read_text(encoding="utf-8").split()[1]
        except (KeyError, OSError, IndexError):
            return None

    @override
    def launch_id(self, environ: Environ) -> str | None:
        return environ.get("LSB_JOBID")

    @override
    def start_command(self, nodes: int, devices: int) -> str:
        return f"jsrun --nrs={nodes * devices} --rs_per_host={devices} --tasks_per_rs=1"

    @override
    def refusal(self, environ: Environ) -> str | None:
        """Refuse the second and later tasks of blaunch. The first task may also be an interactive job."""
        task = number_of(environ, "LSF_PM_TASKID") or 1
        if task < 2 or "LSB_JOBID" not in environ:
            return None
        return (
            f"LSF_PM_TASKID={task} says that blaunch has started several processes, but blaunch does not name ranks: "
            "start the run with jsrun, mpirun or torchrun, or unset LSF_PM_TASKID for independent runs"
        )
