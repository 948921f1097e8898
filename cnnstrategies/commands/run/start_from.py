"""The checkpoint from which a run starts: the file in ``ckpt_path``, or the last checkpoint of a restarted run.

If ``ckpt_path`` is ``last`` or ``best``, this module searches for the file in the folders of runs with the same name.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from typing_extensions import override

from cnnstrategies.cluster.run_folder import IDS, last_checkpoint, read_record, write_record
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.runtime.loggers import KeptCSVLogger
from cnnstrategies.runtime.processes import starter_variable

KEYWORDS = ("best", "last")  # Values of ckpt_path for which this module searches for a file.
# Name of the environment variable with the path of the chosen checkpoint. The rank that chooses sets it for the ranks
# that it starts as programs.
FOUND = "CNNSTRATEGIES_CHECKPOINT"


def checkpoint_of(
    trainer: Trainer, ckpt_path: Path | str | None, training: bool, name: str | None
) -> Path | str | None:
    """Return the checkpoint to load, or None if no checkpoint is to be loaded.

    If `ckpt_path` is ``last`` or ``best``, the function searches for the file. A restarted run uses its own last
    checkpoint. If a rank starts other ranks as programs, these ranks use the checkpoint that the starting rank has
    chosen. If each rank chose for itself, a single restarted rank could choose a newer checkpoint than the other ranks.

    The function adds callbacks to the trainer: a :class:`SameCheckpoint` if a checkpoint is searched for, and a
    :class:`RunRecord` if the run has a name.

    Args:
        trainer: Trainer of the run.
        ckpt_path: The configuration's ``ckpt_path``.
        training: Whether the command trains.
        name: Name of the run; None without a name. Only a run with a name can be restarted.
    """
    path = ckpt_path
    starters_path = starter_variable(FOUND)
    if name is not None:
        trainer.callbacks.insert(0, RunRecord(name))  # type: ignore[attr-defined]
    name = name if training else None
    if name is not None:
        path = (starters_path or None) if starters_path is not None else last_checkpoint(trainer, name) or ckpt_path
    if path in KEYWORDS:
        path = starters_path or str(find_checkpoint(str(path), trainer))
    if path != ckpt_path and starters_path is None:
        rank_zero_info(f"Continuing from {path}" if training else f"Weights: {path}")
    if name is not None or ckpt_path in KEYWORDS:
        os.environ[FOUND] = str(path or "")
        trainer.callbacks.append(SameCheckpoint(path))  # type: ignore[attr-defined]
    return path


def find_checkpoint(word: str, trainer: Trainer) -> Path:
    """Return the file ``last.ckpt`` or ``best.ckpt`` from the folder with the newest checkpoints.

    Lightning's own search considers only the folder of the new run. This folder is usually a new version without
    checkpoints, so Lightning would start from scratch.

    Args:
        word: ``last`` or ``best``.
        trainer: Trainer of the run, whose callbacks and loggers determine the folders to search.

    Raises:
        ConfigurationError: There is no such file, or the folders are not on a disk.
    """
    places = _places(trainer)
    for folder, _ in places:
        if "://" in folder:
            raise ConfigurationError(f"ckpt_path={word}: {folder} is not on a disk; give the checkpoint's path instead")
    files = [
        file for folder, pattern in places for name in KEYWORDS for file in Path(folder).glob(f"{pattern}{name}.ckpt")
    ]
    if not files:
        where = " or ".join(str(Path(folder) / pattern) for folder, pattern in places)
        raise ConfigurationError(
            f"ckpt_path={word}: there is no {word}.ckpt in {where}; train without ckpt_path first, or give a "
            "checkpoint's path"
        )
    newest = max(files, key=lambda file: file.stat().st_mtime_ns)
    checkpoint = newest.with_name(f"{word}.ckpt")
    if not checkpoint.exists():
        raise ConfigurationError(
            f"ckpt_path={word}: {newest} is the newest checkpoint, but its folder contains no {word}.ckpt; give a "
            "checkpoint's path"
        )
    return checkpoint


def _places(trainer: Trainer) -> list[tuple[str, str]]:
    """Return the folders in which runs with this run's name write checkpoints, as pairs of a folder and a glob pattern.

    The pattern matches the subfolders that contain checkpoints, such as ``*/checkpoints/``. Lightning's ModelCheckpoint
    writes to these subfolders.
    """
    # With fast_dev_run, the trainer has a DummyLogger, which has no folder.
    if trainer.loggers and not isinstance(trainer.loggers[0], DummyLogger):
        logger = trainer.loggers[0]
        usual = (str(Path(logger.save_dir or trainer.default_root_dir) / str(logger.name)), "*/checkpoints/")
    else:
        usual = (str(Path(trainer.default_root_dir) / "checkpoints"), "")
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    places = [usual if callback.dirpath is None else (str(callback.dirpath), "") for callback in callbacks]
    return list(dict.fromkeys(places)) or [usual]


class SameCheckpoint(Callback):
    """Callback that checks whether all ranks have chosen the same checkpoint, before a checkpoint is loaded.

    If a launcher starts the ranks, each rank searches for the checkpoint. The results can differ: a rank may see an
    older state of the file system, or another run with the same name may have written a checkpoint in the meantime.

    Args:
        path: The checkpoint that this rank has chosen.
    """

    def __init__(self, path: Path | str | None) -> None:
        self.path = str(path)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        first: Any = trainer.strategy.broadcast(self.path)
        if not trainer.strategy.reduce_boolean_decision(first == self.path):
            raise ConfigurationError(
                f"ckpt_path: rank 0 chose {first}, but another rank chose another file; give the checkpoint's path"
            )


class RunRecord(Callback):
    """Callback for runs that can be restarted, so that a restarted run continues its logs.

    The callback writes the run's name and the ids of the loggers' runs to the file ``run.json``, in the folder of the
    checkpoints. It flushes all logs before each checkpoint, so that the logs are complete up to the checkpoint. When a
    run continues from a checkpoint, the callback removes the later lines from metrics.csv, because the run writes these
    lines again.

    Args:
        name: Name of the run.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folders = [
            Path(callback.dirpath)
            for callback in trainer.checkpoint_callbacks
            if isinstance(callback, ModelCheckpoint) and callback.dirpath and "://" not in str(callback.dirpath)
        ]
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        ids = {}
        for number, logger in enumerate(trainer.loggers):
            if type(logger).__name__ in IDS:
                # A logger starts its run when `experiment` is read for the first time. Only then does the run have an
                # id.
                _ = logger.experiment  # type: ignore[attr-defined]
                ids[str(number)] = str(logger.version)
        for folder in dict.fromkeys(folders):
            write_record(folder, {**read_record(folder), "run": self.name, "loggers": ids})

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                if isinstance(logger, KeptCSVLogger):
                    logger.drop_lines_from(trainer.global_step)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning logs the means of an epoch only after the epoch's checkpoint was saved and the logs were flushed, so
        # flush the logs again.
        _flush(trainer)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        _flush(trainer)


def _flush(trainer: Trainer) -> None:
    for logger in trainer.loggers:
        if isinstance(logger, KeptCSVLogger | TensorBoardLogger):
            logger.save()


def check_trained(command: str, model: LightningModule, again: Callable[[], LightningModule]) -> None:
    """Refuse to evaluate a module whose weights are random. Call this if no checkpoint was given.

    To find random weights, the module is built a second time. Pretrained weights are equal in both modules, and random
    weights differ.

    Args:
        command: Name of the command, for the error message.
        model: The module to evaluate.
        again: Function that builds the module a second time.

    Raises:
        ConfigurationError: A parameter has random values.
    """
    rebuilt = dict(again().named_parameters())
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter) or not torch.equal(parameter, rebuilt[name]):
            raise ConfigurationError(
                f"{command} without ckpt_path: {name} has random values, so this {type(model).__name__} is not "
                "trained: add --ckpt_path best, or a checkpoint's path"
            )
    rank_zero_info(f"Weights: no ckpt_path is given, so {type(model).__name__} uses the weights it was built with")
