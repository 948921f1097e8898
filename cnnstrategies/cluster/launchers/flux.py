"""Launcher for Flux, whose ``flux run`` starts the ranks of a job."""

from typing_extensions import override

from cnnstrategies.cluster.launchers.launcher import Environ, Launcher
from cnnstrategies.cluster.launchers.registry import register
from cnnstrategies.cluster.variables import number_of


@register
class Flux(Launcher):
    """Launcher for Flux. The tasks of ``flux run`` are the ranks, with the same number on each node."""

    name = "flux"
    title = "Flux"
    precedence = 34
    program = "flux run"
    rank_variable, size_variable, local_rank_variable = "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"
    local_size_variable = "FLUX_JOB_NNODES"
    variables = ("FLUX_JOB_*", "FLUX_TASK_*")

    @override
    def detect(self, environ: Environ) -> bool:
        return {self.rank_variable, self.size_variable, self.local_rank_variable} <= environ.keys()

    @override
    def local_size(self, environ: Environ) -> int | None:
        nodes, world = number_of(environ, "FLUX_JOB_NNODES"), number_of(environ, self.size_variable)
        return world // nodes if nodes and world else None

    @override
    def launch_id(self, environ: Environ) -> str | None:
        return environ.get("FLUX_JOB_ID")

    @override
    def start_command(self, nodes: int, devices: int) -> str:
        return f"flux run --nodes={nodes} --tasks-per-node={devices}"

    @property
    @override
    def address_remedy(self) -> str:
        return "start the command with `env MASTER_ADDR=$(flux hostlist --nth=0 local)` in a script for flux run"
