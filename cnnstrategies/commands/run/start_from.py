"""The checkpoint that a run starts from: given by a path or a word, or the last checkpoint of a restarted run.

``last`` and ``best`` as ``ckpt_path`` are files of the newest version of the run's name.
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

WORDS = ("best", "last")
FOUND = "CNNSTRATEGIES_CHECKPOINT"  # environment variable with the checkpoint that the rank which starts others chose


def checkpoint_of(
    trainer: Trainer, ckpt_path: Path | str | None, training: bool, name: str | None
) -> Path | str | None:
    """Return the checkpoint to load, and give the trainer the callbacks that a restarted run needs.

    ``last`` and ``best`` become a file. A restarted run takes its own last checkpoint. A rank that another rank started
    as a program takes the checkpoint that the starting rank chose: the rank may be restarted in the middle of the run,
    when newer checkpoints exist.

    The trainer gets a :class:`SameCheckpoint`, and a :class:`RunRecord` if the run has a name.

    Args:
        trainer: Trainer of the run.
        ckpt_path: The configuration's ``ckpt_path``.
        training: Whether the command trains.
        name: Name of a run that may be restarted.
    """
    path = ckpt_path
    starters_path = starter_variable(FOUND)
    if name is not None:
        trainer.callbacks.insert(0, RunRecord(name))  # type: ignore[attr-defined]  # set by the callback connector
    name = name if training else None
    if name is not None:
        path = (starters_path or None) if starters_path is not None else last_checkpoint(trainer, name) or ckpt_path
    if path in WORDS:
        path = starters_path or str(find_checkpoint(str(path), trainer))
    if path != ckpt_path and starters_path is None:
        rank_zero_info(f"Going on from {path}" if training else f"Weights: {path}")
    if name is not None or ckpt_path in WORDS:
        os.environ[FOUND] = str(path or "")
        trainer.callbacks.append(SameCheckpoint(path))  # type: ignore[attr-defined]
    return path


def find_checkpoint(word: str, trainer: Trainer) -> Path:
    """Return ``last.ckpt`` or ``best.ckpt`` of the version whose checkpoints are the newest.

    Lightning looks only in the new run's folder, which is usually a new version without checkpoints, and then starts
    from scratch.

    Raises:
        ConfigurationError: No such checkpoint exists on the disk.
    """
    places = _places(trainer)
    for folder, _ in places:
        if "://" in folder:
            raise ConfigurationError(f"ckpt_path={word}: {folder} is not on a disk; give the checkpoint's path")
    files = [
        file for folder, pattern in places for name in WORDS for file in Path(folder).glob(f"{pattern}{name}.ckpt")
    ]
    if not files:
        where = " or ".join(str(Path(folder) / pattern) for folder, pattern in places)
        raise ConfigurationError(
            f"ckpt_path={word}: no {word}.ckpt in {where}; train without ckpt_path first, or give a checkpoint's path"
        )
    newest = max(files, key=lambda file: file.stat().st_mtime_ns)
    checkpoint = newest.with_name(f"{word}.ckpt")
    if not checkpoint.exists():
        raise ConfigurationError(
            f"ckpt_path={word}: {newest} is the newest checkpoint, and its folder has no {word}.ckpt; give a "
            "checkpoint's path"
        )
    return checkpoint


def _places(trainer: Trainer) -> list[tuple[str, str]]:
    """Return the folders to which runs of this name write, with the pattern of the subfolders that have checkpoints.

    The rules are those of ModelCheckpoint.
    """
    if trainer.loggers and not isinstance(trainer.loggers[0], DummyLogger):  # fast_dev_run uses a DummyLogger.
        logger = trainer.loggers[0]
        usual = (str(Path(logger.save_dir or trainer.default_root_dir) / str(logger.name)), "*/checkpoints/")
    else:
        usual = (str(Path(trainer.default_root_dir) / "checkpoints"), "")
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    places = [usual if callback.dirpath is None else (str(callback.dirpath), "") for callback in callbacks]
    return list(dict.fromkeys(places)) or [usual]


class SameCheckpoint(Callback):
    """Callback that refuses a run whose ranks chose different checkpoints, before a checkpoint is loaded.

    Ranks that a launcher starts each look for the checkpoint. A rank may see an older state of the file system, or
    another run of the same name may have written a checkpoint in between.
    """

    def __init__(self, path: Path | str | None) -> None:
        self.path = str(path)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        first: Any = trainer.strategy.broadcast(self.path)
        if not trainer.strategy.reduce_boolean_decision(first == self.path):
            raise ConfigurationError(
                f"ckpt_path: rank 0 chose {first}, and another rank chose another file; give the checkpoint's path"
            )


class RunRecord(Callback):
    """Callback that lets a restarted run continue its loggers' runs and its metrics.csv.

    The callback writes ``run.json`` beside the checkpoints, with the run's name and the ids of its loggers' runs. Logs
    are flushed before each checkpoint, so that after a restart no lines from before the checkpoint are missing. Lines
    of metrics.csv from after the checkpoint are removed, because the run writes them again.
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
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]  # set outside the class
            return
        ids = {}
        for number, logger in enumerate(trainer.loggers):
            if type(logger).__name__ in IDS:
                _ = logger.experiment  # type: ignore[attr-defined]  # This starts the logger's run, which gets an id.
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
        _flush(trainer)  # Lightning logs an epoch's means after its checkpoint.

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        _flush(trainer)


def _flush(trainer: Trainer) -> None:
    for logger in trainer.loggers:
        if isinstance(logger, KeptCSVLogger | TensorBoardLogger):
            logger.save()


def check_trained(command: str, model: LightningModule, again: Callable[[], LightningModule]) -> None:
    """Refuse to evaluate untrained weights.

    Weights that a module loads when it is built, such as those of ``pretrained``, are the same each time the module is
    built; random weights are not.

    Args:
        command: Name of the command, for the message.
        model: The module to evaluate.
        again: Function that builds the module a second time.
    """
    rebuilt = dict(again().named_parameters())
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter) or not torch.equal(parameter, rebuilt[name]):
            raise ConfigurationError(
                f"{command} without ckpt_path: {name} has random values, so this {type(model).__name__} is not "
                "trained: add --ckpt_path best, or a checkpoint's path"
            )
    rank_zero_info(f"Weights: no ckpt_path is given, so {type(model).__name__} keeps the weights it was built with")
