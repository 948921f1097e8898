"""Name and folder of a run, and the checkpoint from which the run resumes after a restart.

The name of a run is the first of these that exists:

1. the value of ``--run_name``,
2. the value of the environment variable ``CNNSTRATEGIES_RUN_NAME``, which programs that start ``fit`` can set,
3. the name that a launcher gives (:meth:`~cnnstrategies.cluster.launchers.Launcher.run_name`); the innermost launcher
   comes first.

A run without a name cannot be restarted. It gets a new folder with a number.

The name is also the version of the loggers. Checkpoints are saved in the subfolder ``checkpoints`` of the first
logger's folder, unless ``checkpoint.dirpath`` is set. The file ``run.json`` next to the checkpoints has the run's name.
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

NOT_HASHED = ("config", "ckpt_path", "run_name", "dry_run")  # Keys whose values may change when a run is restarted.
MOST_CHARACTERS = 120  # Largest number of characters in a run's name.
RECORD = "run.json"
CHECKPOINTS = "checkpoints"
# Keys: loggers without a folder. Values: names of two arguments of the logger. The first argument is the id of the
# logged run: with the same id, a restarted run continues it. The second argument is the name that the logger shows.
IDS = {"WandbLogger": ("version", "name"), "MLFlowLogger": ("run_id", "run_name")}
CSV = loggers_of_lightning.CSVLogger.__name__
WITH_FOLDERS = (TensorBoardLogger.__name__, CSV, KeptCSVLogger.__name__)  # Loggers whose version is a folder's name.


def find_run(name: str | None, configuration: str, environ: Environ) -> str | None:
    """Return the name of this process's run, or None if the run has no name.

    Args:
        name: Value of ``--run_name``, or None.
        configuration: Hash of the configuration, from :func:`configuration_hash`.
        environ: Environment variables of this process.

    Raises:
        ConfigurationError: The name cannot be used for a folder, or the run has no name although its launcher restarts
            failed processes.
    """
    for given_name, source in ((name, "run_name"), (environ.get(RUN_NAME), RUN_NAME)):
        if given_name is not None:
            return checked(given_name, source)
    launchers = detected(environ)
    # A launcher's temporary name changes when an outer launcher starts the launcher again. A temporary name is
    # therefore used only if no launcher gives a permanent name.
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
    """Check that a run's name can be used for a folder, and return the name.

    Args:
        name: The name.
        source: Name of the option or environment variable from which the name comes, for the error message.

    Raises:
        ConfigurationError: The name cannot be used.
    """
    if not re.fullmatch(r"\w[\w.+-]*", name) or len(name) > MOST_CHARACTERS:
        raise ConfigurationError(
            f"{source}={name!r} cannot be used for a folder: use at most {MOST_CHARACTERS} letters, digits and . + - "
            "_, and begin with a letter, a digit or _"
        )
    if re.fullmatch(r"version_\d+", name):
        raise ConfigurationError(
            f"{source}={name}: names such as version_0 are reserved for runs without a name: choose another name"
        )
    return name


def configuration_hash(config: Mapping[str, object]) -> str:
    """Return a hash of a configuration, with eight hexadecimal digits.

    Keys that may change when a run is restarted, such as ``ckpt_path``, do not influence the hash.
    """
    content = sorted((str(key), str(value)) for key, value in config.items() if key not in NOT_HASHED)
    return hashlib.sha256(repr(content).encode()).hexdigest()[:8]


def place(config: Any, name: str) -> None:
    """Set the folders and ids of a run in the configuration of its loggers and checkpoint callbacks.

    Values that the user has set are not changed.

    Args:
        config: The configuration, which is changed in place.
        name: Name of the run.
    """
    loggers = keep_version(config.trainer, name)
    for logger in loggers:
        if getattr(logger, "class_path", None) == f"{loggers_of_lightning.__name__}.{CSV}":
            logger.class_path = f"{KeptCSVLogger.__module__}.{KeptCSVLogger.__name__}"
    folder = Path(str(config.trainer.default_root_dir or Path.cwd())) / name
    if loggers and _class(loggers[0]) in WITH_FOLDERS:
        arguments = loggers[0].init_args
        # The loggers compute the path of their folder with the same rule, so the checkpoints are saved in the folder
        # of the first logger.
        version = arguments["version"]
        if "://" in str(arguments["save_dir"]):  # The folder is a URL: ModelCheckpoint itself computes its path.
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
    """Set the version of the loggers to the run's name, so that a restarted run writes to the same folder.

    Versions that the user has set are not changed. Loggers without a version, and loggers whose version is an id, are
    not changed either.

    Args:
        trainer: Configuration of the trainer, which is changed in place.
        name: Name of the run.

    Returns:
        Configuration of each logger.
    """
    if trainer.logger is False:
        return []
    if trainer.logger is None or trainer.logger is True:
        # This is the logger that Lightning would create by default. It is created here so that its version can be set.
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
    """Return the arguments of each ModelCheckpoint among the configured callbacks.

    If the configuration has no such callback, return the arguments in its section ``checkpoint``.
    """
    callbacks = config.trainer.callbacks or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    arguments = [callback.init_args for callback in callbacks if _class(callback) == ModelCheckpoint.__name__]
    return arguments or [config.checkpoint]


def last_checkpoint(trainer: Trainer, name: str) -> Path | None:
    """Return the path of the last complete checkpoint of a run.

    The result is None if the run has no checkpoint yet.

    Raises:
        ConfigurationError: The last checkpoint in the folder belongs to a different run.
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
            rank_zero_info(f"{last} is incomplete, so the run resumes from {newest.name} instead")
            return newest
    return None


def refuse_anothers(last: Path, name: str) -> None:
    """Check that the file ``last``, if it exists, is a checkpoint of the run ``name``.

    Otherwise a restart of the run would resume from the checkpoint of a different run.

    Args:
        last: Path of the last checkpoint.
        name: Name of the run.

    Raises:
        ConfigurationError: The checkpoint belongs to a different run.
    """
    folder = last.parent
    record = read_record(folder)
    if last.exists() and record.get("run", folder.parent.name if folder.name == CHECKPOINTS else None) != name:
        raise ConfigurationError(
            f"{last} does not belong to the run {name}, but a restart would resume from it: set another "
            "checkpoint.dirpath, or move the file"
        )


def read_record(folder: Path) -> dict[str, Any]:
    """Return the content of ``run.json`` in a folder of checkpoints.

    The result is empty if the file is missing or invalid.
    """
    try:
        record: dict[str, Any] = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write ``run.json`` to a folder of checkpoints, atomically."""
    with whole_file(folder / RECORD, "free some space, or set checkpoint.dirpath to another disk") as file:
        file.write(f"{json.dumps(record, indent=1)}\n".encode())


def _is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint file is complete. A checkpoint that is a directory is assumed to be complete."""
    return checkpoint.is_dir() or zipfile.is_zipfile(checkpoint)


def _class(namespace: Any) -> str:
    return str(getattr(namespace, "class_path", "")).rpartition(".")[2]
