"""The checkpoint that a run starts from."""

from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info

from cnnstrategies.checkpoint_check import SameOptimizer, check_weights
from cnnstrategies.checkpoint_words import FOUND, WORDS, SameCheckpoint, find_once
from cnnstrategies.cluster.environment import local_rank
from cnnstrategies.cluster.run_name import last_checkpoint, run_name
from cnnstrategies.processes import told_by_starter


def checkpoint_of(trainer: Trainer, given: Path | str | None, training: bool) -> Path | str | None:
    """The checkpoint to load: a file in the place of ``last`` and ``best``; the last one of a restarted run.

    Args:
        trainer: Gets what makes sure that all ranks have found the same one.
        given: ``ckpt_path``.
        training: Whether the command is ``fit``.

    Raises:
        ConfigurationError: There is none of this name.
    """
    path = given
    said = told_by_starter(FOUND) is not None
    restarts = training and run_name() is not None
    if restarts:
        path = last_checkpoint(trainer) or given
    if path in WORDS:
        path = find_once(str(path), trainer)
    if path != given and not said:
        rank_zero_info(f"Going on from {path}" if training else f"Weights: {path}")
    if restarts or given in WORDS:
        trainer.callbacks.append(SameCheckpoint(path))  # type: ignore[attr-defined]  # set by the callback connector
    return path


def check_it(
    trainer: Trainer, model: LightningModule, path: Path | str, weights_only: bool | None, training: bool
) -> None:
    """Refuse a checkpoint that this run cannot start from.

    Args:
        trainer: Gets what refuses another optimizer's, once there is one.
        model: The run's.
        path: The checkpoint.
        weights_only: As for ``torch.load``.
        training: Whether the command is ``fit``.

    Raises:
        ConfigurationError: It is no checkpoint, or that of another network.
    """
    if local_rank() == 0:
        check_weights(model, path, weights_only, training)
    if training:
        trainer.callbacks.append(SameOptimizer(path))  # type: ignore[attr-defined]
