"""A run that its launcher starts again goes on where it was."""

import os
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from cnnstrategies.errors import ConfigurationError


def run_name() -> str | None:
    """A name that stays the same when the launcher starts the run again; None where it never does.

    Under torchrun it is that of ``--rdzv-id``; torchrun makes one up where ``--nnodes`` is 1.

    Raises:
        ConfigurationError: The run may be started again, but has no name.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    name = os.environ["TORCHELASTIC_RUN_ID"]
    if name != "none":
        return f"torchrun_{name}"
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        raise ConfigurationError(
            "torchrun --max-restarts without a name for the run: restarted processes would not find its checkpoints; "
            "add --rdzv-backend=c10d --rdzv-endpoint=<first machine>:29400 --rdzv-id=<name>"
        )
    return None


def keep_version(trainer: Any, name: str) -> None:
    """Give the loggers of a configuration a version, so that a run started again writes to the same folder.

    Args:
        trainer: ``trainer`` of the configuration; changed. A version that the user gave stays, and so does a logger
            that has none.
        name: The version.
    """
    if trainer.logger is False:
        return
    if trainer.logger is None or trainer.logger is True:
        # What Lightning would make.
        trainer.logger = Namespace(  # type: ignore[no-untyped-call]
            class_path="lightning.pytorch.loggers.TensorBoardLogger",
            init_args=Namespace(save_dir=str(trainer.default_root_dir or Path.cwd()), version=None),  # type: ignore[no-untyped-call]
        )
    for logger in trainer.logger if isinstance(trainer.logger, list) else [trainer.logger]:
        arguments = getattr(logger, "init_args", None) or {}
        if "version" in arguments and arguments["version"] is None:
            arguments["version"] = name


def last_checkpoint(trainer: Trainer) -> Path | None:
    """The checkpoint from which a run goes on that its launcher has started again; None at the first start.

    Where ``checkpoint.dirpath`` is given, other runs may have written there before, so it is looked into only after a
    restart by torchrun itself.
    """
    name = run_name()
    if name is None:
        return None
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, ModelCheckpoint):
            continue
        if callback.dirpath is not None:
            folder = Path(callback.dirpath) if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" else None
        else:
            folder = _folder(trainer, name)
        path = folder and folder / f"{callback.CHECKPOINT_NAME_LAST}{callback.FILE_EXTENSION}"
        if path and path.exists():
            return path
    return None


def _folder(trainer: Trainer, name: str) -> Path | None:
    """Where ModelCheckpoint writes; None where another run may have written before."""
    if not trainer.loggers or trainer.loggers[0].version != name:
        return None
    logger = trainer.loggers[0]
    return Path(logger.save_dir or trainer.default_root_dir) / str(logger.name) / name / "checkpoints"
