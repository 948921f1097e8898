"""What ``last`` and ``best`` mean as ``ckpt_path``: files of the newest version of the run's name."""

import os
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from typing_extensions import override

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.runtime.processes import told_by_starter

WORDS = ("best", "last")
FOUND = "CNNSTRATEGIES_CHECKPOINT"  # Environment variable.


def find_once(word: str, trainer: Trainer) -> str:
    """What :func:`find_checkpoint` finds in the process that starts the ranks of a machine, in all of them.

    A rank that is started as a program reads the configuration again, and may be started again in the middle of the
    run; by then there can be a newer checkpoint, that of this run.

    Raises:
        ConfigurationError: There is none.
    """
    found = told_by_starter(FOUND) or str(find_checkpoint(word, trainer))
    os.environ[FOUND] = found
    return found


def find_checkpoint(word: str, trainer: Trainer) -> Path:
    """The checkpoint that a word stands for.

    Lightning looks where the new run will write, which is a new version as a rule, and starts from scratch.

    Returns:
        ``last.ckpt`` or ``best.ckpt`` of the version whose checkpoints were written last.

    Raises:
        ConfigurationError: There is none.
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
