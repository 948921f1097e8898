"""Launcher for platforms that set RANK, WORLD_SIZE and LOCAL_RANK for each process, such as Azure ML."""

from typing_extensions import override

from cnnstrategies.cluster.launchers.launcher import Environ, Launcher, is_inherited
from cnnstrategies.cluster.launchers.nodes import PROCESSES, STARTED_BY_TORCHRUN
from cnnstrategies.cluster.launchers.registry import register
from cnnstrategies.cluster.variables import number_of

NODES_OF_AZURE = "AZUREML_NODE_COUNT"
# Variables that tell on which node a process is. Without them the ranks of a node cannot be told from other ranks.
OF_A_NODE = ("LOCAL_WORLD_SIZE", "NODE_RANK", NODES_OF_AZURE)


@register
class Processes(Launcher):
    """Launcher for Azure ML's PyTorch jobs, and other programs that set torch's variables for each rank."""

    name = PROCESSES
    title = "the platform"
    precedence = 70
    program = "The platform"
    rank_variable, size_variable = "RANK", "WORLD_SIZE"
    local_rank_variable, local_size_variable = "LOCAL_RANK", "LOCAL_WORLD_SIZE"

    @override
    def detect(self, environ: Environ) -> bool:
        if STARTED_BY_TORCHRUN in environ or is_inherited(environ):
            return False
        rank, local_rank = self.number(environ), self.local_number(environ)
        if rank is None or local_rank is None or self.size_variable not in environ:
            return False
        # Lightning sets LOCAL_RANK for ranks that it starts, but not RANK, which may have been set for another process.
        return rank >= local_rank and any(name in environ for name in OF_A_NODE)

    @override
    def local_size(self, environ: Environ) -> int | None:
        local, world = super().local_size(environ), number_of(environ, self.size_variable)
        nodes = number_of(environ, NODES_OF_AZURE)
        return world // nodes if local is None and nodes and world else local

    @override
    def refusal(self, environ: Environ) -> str | None:
        if "RANK" not in environ or (number_of(environ, "WORLD_SIZE") or 1) < 2 or "LOCAL_RANK" not in environ:
            return None
        return (
            f"RANK={environ['RANK']}, WORLD_SIZE={environ['WORLD_SIZE']} and LOCAL_RANK={environ['LOCAL_RANK']} do not "
            "say how many ranks each machine has: set LOCAL_WORLD_SIZE for each rank"
        )

    @override
    def start_command(self, nodes: int, devices: int) -> str:
        return f"torchrun --nnodes={nodes} --nproc-per-node={devices}"
