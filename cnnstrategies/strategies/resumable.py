"""Which checkpoints training can go on from: what forked and spawned ranks cannot bring back, and who must say so."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from cnnstrategies._lightning_private import ranks_are_children
from cnnstrategies.errors import ConfigurationError


def warn_of_weights_alone(checkpoint: Mapping[str, Any], path: str | Path, launcher: Any, start_method: str) -> None:
    """Warn when a checkpoint is saved after the ranks that had the optimizers have ended; Lightning's DDP says nothing.

    Args:
        checkpoint: What is saved.
        path: Where.
        launcher: The strategy's.
        start_method: How it started the ranks.
    """
    if ranks_are_children(launcher) and checkpoint.get("optimizer_states") == []:
        rank_zero_warn(
            f"{path} holds weights alone: the optimizers and the count of steps have ended with the ranks that "
            f"were started by {start_method}; resume from a checkpoint that was saved during fit"
        )


def check_optimizer_states(saved: int, needed: int) -> None:
    """Refuse to resume from a checkpoint without the optimizers' states.

    Args:
        saved: Number of optimizers whose states it holds.
        needed: Number of optimizers of the run.

    Raises:
        ConfigurationError: The numbers differ.
    """
    if saved != needed:
        raise ConfigurationError(
            f"the checkpoint holds the states of {saved} optimizers, and this run has {needed}: one that was saved "
            "after ranks were forked or spawned has none; resume from one that was saved during fit, or load its "
            "weights alone"
        )
