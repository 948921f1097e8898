"""The default process group of ``torch.distributed`` in a worker, so that users' code can ask for its rank.

Rank and world size are Lightning's ``global_rank`` and ``world_size``. The world size stays the same when workers die
or join, and the rank of a joiner is not below the world size.
"""

import os
import sys
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.core.view import RunEnded
from cnnstrategies.paramserver.process_group import Exchange, open_group

if TYPE_CHECKING:
    from cnnstrategies.strategies.parameter_server.base import CoordinatedStrategy


class WorkerExchange(Exchange):
    """Exchange of the users' tensors among the workers, through the coordinator.

    Args:
        strategy: The strategy of this worker.
    """

    def __init__(self, strategy: "CoordinatedStrategy") -> None:
        self._strategy = strategy
        self._process = os.getpid()

    @property
    def alone(self) -> bool:
        """Whether this worker does not wait for other workers: it is a joiner, or the run was told to stop."""
        return self._strategy.alone

    def check(self, operation: str) -> None:
        """Check whether the workers can exchange tensors at this point of the run.

        Raises:
            ConfigurationError: This process is not the worker itself, or the workers make this step independently.
        """
        if os.getpid() != self._process:
            raise ConfigurationError(
                f"torch.distributed.{operation} was called in a process that a worker has forked, such as a loader's "
                "worker process: call it in the training process, or set num_workers to 0"
            )
        strategy = self._strategy
        if not strategy.steps_in_lockstep and strategy.is_in_batch:
            raise ConfigurationError(
                f"torch.distributed.{operation} was called within a training step, but in `mode: "
                f"{strategy.options.mode}` each worker makes its own steps and does not wait for the other workers: "
                "use `mode: sync` or strategy ddp, or call it between two epochs"
            )

    def barrier(self, operation: str) -> None:
        """Wait until all living workers have called this method."""
        self._strategy.gather(None, f"torch.distributed.{operation}")

    def gather(self, tensors: list[Tensor], operation: str) -> list[list[Tensor]]:
        """Return the tensors of all workers, in rank order.

        Raises:
            RunEnded: A worker is lost.
        """
        values = self._strategy.gather(tensors, f"torch.distributed.{operation}")
        self._check_present(operation)
        return [values[rank] for rank in sorted(values)]

    def reduce(self, tensor: Tensor, how: str, operation: str) -> Tensor:
        """Return the reduction of the workers' tensors.

        Raises:
            RunEnded: A worker is lost.
        """
        reduced: Tensor = self._strategy.reduce(tensor, reduce_op=how)
        self._check_present(operation)
        return reduced

    def _check_present(self, operation: str) -> None:
        present = self._strategy.collectives.present or ()
        if lost := [rank for rank in range(self._strategy.world_size) if rank not in present]:
            raise RunEnded(
                f"torch.distributed.{operation} needs the tensors of all workers, but the run has lost worker "
                f"{', '.join(map(str, lost))}: start the run again from its last checkpoint"
            )


def open_worker_group(strategy: "CoordinatedStrategy") -> bool:
    """Open the default process group, and return True. If the user's script has opened a group already, return False.

    Args:
        strategy: The strategy of this worker.
    """
    if dist.is_initialized():
        return False
    hook = sys.excepthook
    open_group(strategy.global_rank, strategy.world_size, WorkerExchange(strategy))
    # torch has replaced the hook to print the rank before each line of a traceback, and never restores it.
    sys.excepthook = hook
    return True


def close_worker_group() -> None:
    """Close the default process group, so that the next run in this process can open a group."""
    if dist.is_initialized():
        dist.destroy_process_group()
