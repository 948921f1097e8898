"""Launcher for custom training jobs of Vertex AI, which start one process on each replica of a worker pool."""

import json
from typing import Any

from typing_extensions import override

from cnnstrategies.cluster.launchers.launcher import Environ
from cnnstrategies.cluster.launchers.nodes import NodeLauncher, NodePlace
from cnnstrategies.cluster.launchers.registry import register
from cnnstrategies.errors import ConfigurationError

# Pools whose replicas train: the primary replica, and the workers. The other pools are for reduction servers, parameter
# servers of TensorFlow, and evaluators.
POOLS = ("workerpool0", "workerpool1")


@register
class VertexAI(NodeLauncher):
    """Launcher for Vertex AI, which describes the replicas of a job in ``CLUSTER_SPEC``."""

    name = "vertex"
    title = "Vertex AI"
    precedence = 76
    variables = ("CLUSTER_SPEC", "TF_CONFIG")

    @override
    def place(self, environ: Environ) -> NodePlace | None:
        if "CLUSTER_SPEC" not in environ:
            return None
        replicas, pool, index = _cluster("CLUSTER_SPEC", environ["CLUSTER_SPEC"])
        hosts = [host for name in POOLS for host in replicas.get(name, [])]
        if pool not in POOLS or index >= len(replicas.get(pool, [])):
            raise ConfigurationError(
                f"CLUSTER_SPEC says that this process is replica {index} of {pool}, but only the replicas of "
                f"{' and '.join(POOLS)} can train: start the run only there"
            )
        if len(hosts) < 2:
            return None
        node = index if pool == POOLS[0] else len(replicas.get(POOLS[0], [])) + index
        address, _, port = hosts[0].partition(":")
        number = int(port) if port.isdigit() else None
        return NodePlace(node, len(hosts), address, number, f"CLUSTER_SPEC with {len(hosts)} replicas")

    @override
    def refusal(self, environ: Environ) -> str | None:
        """Refuse jobs for TensorFlow, whose ``TF_CONFIG`` does not number all processes in one order."""
        if "TF_CONFIG" not in environ:
            return None
        try:
            count = sum(len(hosts) for hosts in _cluster("TF_CONFIG", environ["TF_CONFIG"])[0].values())
        except ConfigurationError:
            return None  # Another program's variable of this name does not concern this run.
        if count < 2:
            return None
        return (
            f"TF_CONFIG says that there are {count} processes, but it belongs to a job for TensorFlow: create a job "
            "for PyTorch, or set NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT on each node"
        )


def _cluster(source: str, text: str) -> tuple[dict[str, list[str]], str, int]:
    """Return the hosts of each pool, the pool of this process, and its index in the pool."""
    try:
        content: Any = json.loads(text)
        task = content.get("task") or {}
        replicas = {str(name): [str(host) for host in hosts] for name, hosts in (content.get("cluster") or {}).items()}
        return replicas, str(task.get("type", "")), int(task.get("index", 0))
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigurationError(
            f"{source} is not a description of a cluster in JSON ({error}): correct it, or unset it"
        ) from error
