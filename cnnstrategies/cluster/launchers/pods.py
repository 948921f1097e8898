"""Launcher for platforms that set RANK and WORLD_SIZE once on each node, such as Kubeflow's PyTorchJob."""

from typing_extensions import override

from cnnstrategies.cluster.launchers.launcher import Environ
from cnnstrategies.cluster.launchers.nodes import STARTED_BY_TORCHRUN, NodeLauncher, NodePlace
from cnnstrategies.cluster.launchers.registry import register
from cnnstrategies.cluster.variables import number_of

START_TORCHRUN = "start `torchrun -m cnnstrategies fit ...`, which reads these variables"
BY_HAND = "set NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT on each node"


@register
class Pods(NodeLauncher):
    """Launcher for Kubeflow's PyTorchJob and TrainJob, Vertex AI, Volcano and others that count nodes by RANK.

    Each pod or machine has one process. Its variables ``RANK`` and ``WORLD_SIZE`` number the nodes if there is no
    ``LOCAL_RANK``. Newer versions of Kubeflow set ``WORLD_SIZE`` to the number of ranks, and the number of nodes in
    ``PET_NNODES``, which is meant for torchrun. These variables have precedence.
    """

    name = "pods"
    title = "the platform"
    precedence = 80
    variables = ("RANK", "WORLD_SIZE", "PET_*")

    @override
    def place(self, environ: Environ) -> NodePlace | None:
        if STARTED_BY_TORCHRUN in environ or "LOCAL_RANK" in environ:
            return None
        if "PET_NODE_RANK" in environ and environ.get("PET_NNODES", "").isdigit():
            names = ("PET_NODE_RANK", "PET_NNODES")
            address = environ.get("MASTER_ADDR", environ.get("PET_MASTER_ADDR"))
            port = number_of(environ, "PET_MASTER_PORT")
        else:
            names = ("RANK", "WORLD_SIZE")
            address, port = environ.get("MASTER_ADDR"), None
        node, nodes = (number_of(environ, name) for name in names)
        if node is None or nodes is None or nodes < 2:
            return None
        return NodePlace(node, nodes, address, port, " and ".join(f"{name}={environ[name]}" for name in names))

    @override
    def refusal(self, environ: Environ) -> str | None:
        if "LOCAL_RANK" in environ:  # Lightning has started this process.
            return None
        nodes, rank = environ.get("PET_NNODES", "1"), environ.get("RANK")
        if nodes != "1":
            return f"PET_NNODES={nodes} says that there are several pods, but does not number them: {START_TORCHRUN}"
        if (number_of(environ, "WORLD_SIZE") or 1) > 1 and rank is None:
            return (
                f"WORLD_SIZE={environ['WORLD_SIZE']} says that there are several processes, but RANK is not set: "
                f"{BY_HAND}, or unset WORLD_SIZE"
            )
        if (number_of(environ, "RANK") or 0) > 0:
            return (
                f"RANK={rank} says that there are several processes, but WORLD_SIZE is not set: {BY_HAND}, or unset "
                "RANK"
            )
        return None
