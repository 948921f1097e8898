"""Use of the package's strategies in the workers of Ray Train. Ray Train assigns the ranks and the devices."""

from typing import Any

import ray.train
import ray.train.torch
from lightning_utilities.core.rank_zero import rank_zero_only
from ray.train.collective import broadcast_from_rank_zero
from ray.train.lightning import RayLightningEnvironment
from typing_extensions import override

from cnnstrategies.cluster.addresses import free_port
from cnnstrategies.errors import ConfigurationError


class RayEnvironment(RayLightningEnvironment):  # type: ignore[misc]  # Ray is not installed where types are checked.
    """Ray's cluster environment for Lightning, with a main port that is free.

    The coordinator of a parameter server listens at the main port. ``TorchTrainer`` creates a process group, and the
    store of this process group already uses the main port of ``TorchTrainer``. Rank 0 therefore chooses another port
    and broadcasts it. All workers must create this object.

    Raises:
        ConfigurationError: The nodes have different numbers of workers.
    """

    def __init__(self) -> None:
        super().__init__()
        context = ray.train.get_context()
        local, rank = context.get_local_world_size(), context.get_world_rank()
        chosen = (ray.util.get_node_ip_address(), free_port(), local) if rank == 0 else None
        self._address, self._main_port, expected = broadcast_from_rank_zero(chosen)
        if local != expected or rank != context.get_node_rank() * local + context.get_local_rank():
            raise ConfigurationError(
                f"Ray Train has started {local} workers on node {context.get_node_rank()} and {expected} on the first "
                "node, but the strategies need the same number on each node: change num_workers or "
                "resources_per_worker of ScalingConfig"
            )
        rank_zero_only.rank = rank  # type: ignore[attr-defined]  # Lightning may have been imported before the worker had its rank.

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return str(self._address)

    @property
    @override
    def main_port(self) -> int:
        return int(self._main_port)


def trainer_arguments() -> dict[str, Any]:
    """Return arguments for Lightning's Trainer in the training function of Ray's ``TorchTrainer``.

    Call this once, on all workers.

    Returns:
        A mapping with the arguments ``accelerator``, ``devices``, ``num_nodes`` and ``plugins``.
    """
    context = ray.train.get_context()
    local = context.get_local_world_size()
    gpu = ray.train.torch.get_device().type == "cuda"
    return {
        "accelerator": "gpu" if gpu else "cpu",
        "devices": local,
        "num_nodes": context.get_world_size() // local,
        "plugins": [RayEnvironment()],
    }
