"""The checkpoint that a run starts from."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn

from cnnstrategies.callbacks.run_record import RunRecord
from cnnstrategies.checkpoints.words import FOUND, WORDS, SameCheckpoint, find_once
from cnnstrategies.cluster.environment import local_rank
from cnnstrategies.cluster.run_folder import begins_anew, last_checkpoint, set_aside
from cnnstrategies.cluster.run_name import Run
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.runtime.processes import told_by_starter


def check_fresh(fresh: bool, run: Run | None) -> None:
    """Refuse ``fresh`` where there is nothing to start anew, or where each restart would do it.

    Raises:
        ConfigurationError: The run has no name, or who starts it again does not say so.
    """
    if fresh and run is None:
        raise ConfigurationError("fresh: a run without a name has a new folder anyway; leave it out, or add --run_name")
    if fresh and run is not None and run.starts is None:
        raise ConfigurationError(
            f"fresh: a pod that is started again does not know that it is, and would begin the run {run.name} anew "
            "each time; give another name instead, with --run_name"
        )


def checkpoint_of(
    trainer: Trainer, given: Path | str | None, training: bool, run: Run | None, fresh: bool
) -> Path | str | None:
    """The checkpoint to load: a file in the place of ``last`` and ``best``; the last one of a run started again.

    A rank that another one has started as a program takes what that one has found.

    Args:
        trainer: Gets what makes sure that all ranks have found the same one.
        given: ``ckpt_path``.
        training: Whether the command is ``fit``.
        run: The run, where it may be started again; of no matter to other commands.
        fresh: Start it anew. Its restarts go on.

    Raises:
        ConfigurationError: There is none of this name.
    """
    path = given
    said = told_by_starter(FOUND)
    if run is not None:
        trainer.callbacks.insert(0, RunRecord(run.name))  # type: ignore[attr-defined]  # set by the callback connector
    run = run if training else None
    if run is not None:
        if said is not None:
            path = said or None
        elif begins_anew(fresh, run):
            if is_first(trainer):
                set_aside(trainer, run)
        else:
            path = last_checkpoint(trainer, run) or given
    if path in WORDS:
        path = find_once(str(path), trainer)
    elif run is not None:
        os.environ[FOUND] = str(path or "")
    if path != given and said is None:
        rank_zero_info(f"Going on from {path}" if training else f"Weights: {path}")
    if run is not None or given in WORDS:
        trainer.callbacks.append(SameCheckpoint(path))  # type: ignore[attr-defined]
    return path


def is_first(trainer: Trainer) -> bool:
    """Whether this process is to be global rank 0, or starts it; known before any process starts."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    return local_rank() == 0 and (environment is None or environment.node_rank() == 0)


def check_trained(command: str, model: LightningModule, again: Callable[[], LightningModule]) -> None:
    """Refuse to evaluate weights that nobody has trained.

    Those that a module gets where it is built, as of ``pretrained``, are the same each time; random ones are not.

    Raises:
        ConfigurationError: Some of its weights are random.
    """
    other = dict(again().named_parameters())
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter) or not torch.equal(parameter, other[name]):
            raise ConfigurationError(
                f"{command} without ckpt_path: {name} has random values, as {type(model).__name__} is built, so this "
                "would say nothing of a trained network: add --ckpt_path best, or a checkpoint's path"
            )
    rank_zero_info(f"Weights: those that {type(model).__name__} is built with, as no ckpt_path is given")
