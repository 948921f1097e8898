"""The name of a run, its folder, and the checkpoint from which it continues when it is started again.

The name is, in this order,

1. the value of ``--run_name``, or of the variable ``CNNSTRATEGIES_RUN_NAME`` from a program that starts ``fit``,
2. the name that a launcher gives (:meth:`~cnnstrategies.cluster.launchers.Launcher.run_name`), the innermost launcher
   first.

A run without a name cannot be started again; it gets a new, numbered folder.

The name becomes the loggers' version. The checkpoints are in the folder ``checkpoints`` below the first logger's
folder, unless ``checkpoint.dirpath`` names another. ``run.json`` beside the checkpoints names the run.
"""

import hashlib
import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch import loggers as loggers_of_lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning_utilities.core.rank_zero import rank_zero_info

from cnnstrategies.cluster.launchers import RUN_NAME, Environ, detected
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.runtime.loggers import KeptCSVLogger
from cnnstrategies.runtime.whole_file import whole_file

NOT_HASHED = ("config", "ckpt_path", "run_name", "dry_run")  # Keys whose values may differ after a restart.
MOST_CHARACTERS = 120
RECORD = "run.json"
CHECKPOINTS = "checkpoints"
# Arguments with which other loggers continue a run, and show its name.
IDS = {"WandbLogger": ("version", "name"), "MLFlowLogger": ("run_id", "run_name")}
CSV = loggers_of_lightning.CSVLogger.__name__
WITH_FOLDERS = (TensorBoardLogger.__name__, CSV, KeptCSVLogger.__name__)  # loggers whose version is a folder


def find_run(name: str | None, configuration: str, environ: Environ) -> str | None:
    """Return the name of the run that this process is a part of; None if nothing starts the run again.

    Args:
        name: Name from the configuration.
        configuration: The configuration's hash, from :func:`configuration_hash`.
        environ: Environment variables of this process.

    Raises:
        ConfigurationError: A name cannot be that of a folder, or the launcher restarts processes of an unnamed run.
    """
    for given_name, source in ((name, "run_name"), (environ.get(RUN_NAME), RUN_NAME)):
        if given_name is not None:
            return checked(given_name, source)
    launchers = detected(environ)
    # A launcher's temporary name ends with that launcher; an outer launcher's name lasts until the run starts again.
    for temporary in (False, True):
        for launcher in launchers:
            run_name = launcher.run_name(environ, configuration)
            if run_name is not None and launcher.is_temporary(run_name) == temporary:
                return re.sub(r"[^\w.+-]", "-", run_name)[:MOST_CHARACTERS]
    for launcher in launchers:
        if (reason := launcher.lacks_name(environ)) is not None:
            raise ConfigurationError(reason)
    return None


def checked(name: str, source: str = "run_name") -> str:
    """Return a run's name after checking that it can be the name of a folder.

    Args:
        name: The name.
        source: The option or variable that has given it, for the message.

    Raises:
        ConfigurationError: The name cannot be used.
    """
    if not re.fullmatch(r"\w[\w.+-]*", name) or len(name) > MOST_CHARACTERS:
        raise ConfigurationError(
            f"{source}={name!r}: it names a folder: at most {MOST_CHARACTERS} letters, digits and . + - _ are accepted"
        )
    if re.fullmatch(r"version_\d+", name):
        raise ConfigurationError(f"{source}={name}: runs without a name have such names; choose another name")
    return name


def configuration_hash(config: Mapping[str, object]) -> str:
    """Return a hash of eight characters of a configuration, without the keys of the checkpoint and the run's name."""
    content = sorted((str(key), str(value)) for key, value in config.items() if key not in NOT_HASHED)
    return hashlib.sha256(repr(content).encode()).hexdigest()[:8]


def place(config: Any, name: str) -> None:
    """Set the run's folder and ids in the loggers and checkpoints of a configuration; the user's values stay."""
    loggers = keep_version(config.trainer, name)
    for logger in loggers:
        if getattr(logger, "class_path", None) == f"{loggers_of_lightning.__name__}.{CSV}":
            logger.class_path = f"{KeptCSVLogger.__module__}.{KeptCSVLogger.__name__}"
    folder = Path(str(config.trainer.default_root_dir or Path.cwd())) / name
    if loggers and _class(loggers[0]) in WITH_FOLDERS:
        arguments = loggers[0].init_args
        # The loggers compose their folder in the same way.
        version = arguments["version"]
        if "://" in str(arguments["save_dir"]):  # The folder is not on a disk: ModelCheckpoint composes its path.
            return
        folder = Path(str(arguments["save_dir"])) / str(arguments["name"] or "")
        folder /= version if isinstance(version, str) else f"version_{version}"
    for arguments in checkpoint_arguments(config):
        if arguments.dirpath is None:
            arguments.dirpath = str(folder / CHECKPOINTS)
    record = read_record(Path(checkpoint_arguments(config)[0].dirpath))
    ids = record.get("loggers", {}) if record.get("run") == name else {}
    for number, logger in enumerate(loggers):
        if _class(logger) in IDS:
            identifier, shown = IDS[_class(logger)]
            for argument, value in ((identifier, ids.get(str(number))), (shown, name)):
                if logger.init_args[argument] is None:
                    logger.init_args[argument] = value


def keep_version(trainer: Any, name: str) -> list[Any]:
    """Set the version of a configuration's loggers, so that a restarted run writes to the same folder.

    A version from the user stays. Loggers without versions, and loggers whose version is an id, are not changed.

    Args:
        trainer: The configuration of the trainer, which is changed.
        name: The run's name.

    Returns:
        The configurations of the loggers.
    """
    if trainer.logger is False:
        return []
    if trainer.logger is None or trainer.logger is True:
        # Lightning would make this logger.
        trainer.logger = Namespace(  # type: ignore[no-untyped-call]
            class_path="lightning.pytorch.loggers.TensorBoardLogger",
            init_args=Namespace(  # type: ignore[no-untyped-call]
                save_dir=str(trainer.default_root_dir or Path.cwd()), name="lightning_logs", version=None
            ),
        )
    loggers = trainer.logger if isinstance(trainer.logger, list) else [trainer.logger]
    for logger in loggers:
        arguments = getattr(logger, "init_args", None) or {}
        if _class(logger) not in IDS and "version" in arguments and arguments["version"] is None:
            arguments["version"] = name
    return loggers


def checkpoint_arguments(config: Any) -> list[Any]:
    """Return the arguments of the user's ModelCheckpoints; without any, return the section ``checkpoint``."""
    callbacks = config.trainer.callbacks or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    arguments = [callback.init_args for callback in callbacks if _class(callback) == ModelCheckpoint.__name__]
    return arguments or [config.checkpoint]


def last_checkpoint(trainer: Trainer, name: str) -> Path | None:
    """Return the last complete checkpoint of a run; None if the run has no checkpoint yet.

    Raises:
        ConfigurationError: The folder's last checkpoint is of another run.
    """
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, ModelCheckpoint) or callback.dirpath is None or trainer.fast_dev_run:  # type: ignore[attr-defined]  # set outside the class
            continue
        folder = Path(callback.dirpath)
        last = folder / f"{callback.CHECKPOINT_NAME_LAST}{callback.FILE_EXTENSION}"
        if not last.exists():
            continue
        refuse_anothers(last, name)
        if _is_whole(last):
            return last
        others = [file for file in folder.glob(f"*{callback.FILE_EXTENSION}") if file != last and _is_whole(file)]
        if others:
            newest = max(others, key=lambda file: file.stat().st_mtime_ns)
            rank_zero_info(f"{last} is incomplete: {newest.name} is used instead")
            return newest
    return None


def refuse_anothers(last: Path, name: str) -> None:
    """Refuse a folder with the last checkpoint of another run, from which a restarted run would continue.

    Raises:
        ConfigurationError: The checkpoint is not of the run `name`.
    """
    folder = last.parent
    record = read_record(folder)
    if last.exists() and record.get("run", folder.parent.name if folder.name == CHECKPOINTS else None) != name:
        raise ConfigurationError(
            f"{last} is not of the run {name}, which would continue from it after a restart: give another "
            "checkpoint.dirpath, or move the file"
        )


def read_record(folder: Path) -> dict[str, Any]:
    """Return the content of ``run.json`` in a folder of checkpoints; empty if there is no valid file."""
    try:
        record: dict[str, Any] = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write ``run.json``, as a complete file."""
    with whole_file(folder / RECORD, "free some space, or set checkpoint.dirpath to another disk") as file:
        file.write(f"{json.dumps(record, indent=1)}\n".encode())


def _is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint file is complete. A checkpoint that is a directory is only checked when it is loaded."""
    return checkpoint.is_dir() or zipfile.is_zipfile(checkpoint)


def _class(namespace: Any) -> str:
    return str(getattr(namespace, "class_path", "")).rpartition(".")[2]
