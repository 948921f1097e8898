"""The checkpoint that a run starts from: by its path, by a word, or the last one of a run that is started again.

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
FOUND = "CNNSTRATEGIES_CHECKPOINT"  # Environment variable.


def checkpoint_of(trainer: Trainer, given: Path | str | None, training: bool, name: str | None) -> Path | str | None:
    """The checkpoint to load: a file in the place of ``last`` and ``best``; the last one of a run started again.

    A rank that another one has started as a program takes what that one has found: it reads the configuration again,
    and may be started again in the middle of the run, when there can be a newer checkpoint. The trainer gets callbacks:
    one makes sure that all ranks have found the same, and one that the loggers of a run started again go on. ``name``
    is that of a run that may be started again.
    """
    path = given
    said = starter_variable(FOUND)
    if name is not None:
        trainer.callbacks.insert(0, RunRecord(name))  # type: ignore[attr-defined]  # set by the callback connector
    name = name if training else None
    if name is not None:
        path = (said or None) if said is not None else last_checkpoint(trainer, name) or given
    if path in WORDS:
        path = said or str(find_checkpoint(str(path), trainer))
    if path != given and said is None:
        rank_zero_info(f"Going on from {path}" if training else f"Weights: {path}")
    if name is not None or given in WORDS:
        os.environ[FOUND] = str(path or "")
        trainer.callbacks.append(SameCheckpoint(path))  # type: ignore[attr-defined]
    return path


def find_checkpoint(word: str, trainer: Trainer) -> Path:
    """``last.ckpt`` or ``best.ckpt`` of the version whose checkpoints were written last.

    Lightning looks where the new run will write, which is a new version as a rule, and starts from scratch.
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
    found = newest.with_name(f"{word}.ckpt")
    if not found.exists():
        raise ConfigurationError(
            f"ckpt_path={word}: {newest} is the newest checkpoint, and there is no {word}.ckpt beside it; give a "
            "checkpoint's path"
        )
    return found


def _places(trainer: Trainer) -> list[tuple[str, str]]:
    """Where runs of this name write, as ModelCheckpoint decides it: folders, and what of them to look into."""
    if trainer.loggers and not isinstance(trainer.loggers[0], DummyLogger):  # Lightning's under fast_dev_run
        logger = trainer.loggers[0]
        usual = (str(Path(logger.save_dir or trainer.default_root_dir) / str(logger.name)), "*/checkpoints/")
    else:
        usual = (str(Path(trainer.default_root_dir) / "checkpoints"), "")
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    places = [usual if callback.dirpath is None else (str(callback.dirpath), "") for callback in callbacks]
    return list(dict.fromkeys(places)) or [usual]


class SameCheckpoint(Callback):
    """Ends a run whose ranks have found different checkpoints, before any is loaded.

    Where a launcher starts the ranks, each looks for itself. One may see an older state of the file system, or another
    run of the same name may have written in between.
    """

    def __init__(self, path: Path | str | None) -> None:
        self.path = str(path)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        first: Any = trainer.strategy.broadcast(self.path)
        if not trainer.strategy.reduce_boolean_decision(first == self.path):
            raise ConfigurationError(f"ckpt_path: rank 0 has found {first}, another rank another file; give the path")


class RunRecord(Callback):
    """A run that is started again goes on in its loggers' runs, and in the lines of its metrics.csv.

    Says in ``run.json``, beside the checkpoints, whose they are and which runs of its loggers are this one's. What is
    logged is on the disk when a checkpoint is: after a restart nothing is missing from before it, and lines of
    metrics.csv from after it, which will be written again, are removed.
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
                _ = logger.experiment  # type: ignore[attr-defined]  # Begins the run, which has an id from then on.
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
    """Refuse to evaluate weights that nobody has trained.

    Those that a module gets where it is built, as of ``pretrained``, are the same each time; random ones are not.
    """
    other = dict(again().named_parameters())
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter) or not torch.equal(parameter, other[name]):
            raise ConfigurationError(
                f"{command} without ckpt_path: {name} has random values, as {type(model).__name__} is built, so this "
                "would say nothing of a trained network: add --ckpt_path best, or a checkpoint's path"
            )
    rank_zero_info(f"Weights: those that {type(model).__name__} is built with, as no ckpt_path is given")
