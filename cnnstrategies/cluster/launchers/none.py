"""Launcher "none", for processes that were not started by a launcher. Lightning starts the ranks on each node."""

from typing_extensions import override

from cnnstrategies.cluster.launchers.launcher import Environ, Launcher
from cnnstrategies.cluster.launchers.registry import register

TYPE_CHECKING = False
if TYPE_CHECKING:
    from lightning.fabric.plugins import ClusterEnvironment


@register
class NoLauncher(Launcher):
    """Launcher "none". For several nodes, users start one process on each node.

    They set ``NNODES``, ``NODE_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT`` for each process.
    """

    name = "none"
    title = "no launcher"
    precedence = 100
    variables = ("NODE_RANK",)

    @override
    def detect(self, environ: Environ) -> bool:
        return True

    @override
    def starts_nodes(self, environ: Environ) -> bool:
        return {"NNODES", "NODE_RANK"} <= environ.keys()

    @override
    def environment(self) -> "ClusterEnvironment":
        from lightning.fabric.plugins.environments.lightning import LightningEnvironment

        return LightningEnvironment()

    @override
    def nodes(self, environ: Environ) -> int:
        return int(environ["NNODES"])
