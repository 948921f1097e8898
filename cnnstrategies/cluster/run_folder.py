"""Where a run with a name lies, and the checkpoint from which it goes on when it is started again.

Its loggers' version is the name, and its checkpoints are in ``checkpoints`` below the first logger's folder, unless
``checkpoint.dirpath`` says otherwise. Beside them ``run.json`` says whose they are.
"""

import itertools
import json
import zipfile
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch import loggers as loggers_of_lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning_utilities.core.rank_zero import rank_zero_info

from cnnstrategies.cluster.run_name import Run
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.runtime.loggers import KeptCSVLogger
from cnnstrategies.runtime.whole_file import whole_file

RECORD = "run.json"
CHECKPOINTS = "checkpoints"
# The arguments by which other loggers go on in a run, and show its name.
IDS = {"WandbLogger": ("version", "name"), "MLFlowLogger": ("run_id", "run_name")}
CSV = loggers_of_lightning.CSVLogger.__name__
WITH_FOLDERS = (TensorBoardLogger.__name__, CSV, KeptCSVLogger.__name__)  # Their version is a folder.


def place(config: Any, run: Run) -> None:
    """Give loggers and checkpoints of a configuration the run's folder and ids; what the user has said stays."""
    name = run.name
    loggers = keep_version(config.trainer, name)
    for logger in loggers:
        if getattr(logger, "class_path", None) == f"{loggers_of_lightning.__name__}.{CSV}":
            logger.class_path = f"{KeptCSVLogger.__module__}.{KeptCSVLogger.__name__}"
    folder = Path(str(config.trainer.default_root_dir or Path.cwd())) / name
    if loggers and _class(loggers[0]) in WITH_FOLDERS:
        arguments = loggers[0].init_args
        # As the loggers themselves put it together.
        version = arguments["version"]
        if "://" in str(arguments["save_dir"]):  # Not on a disk: ModelCheckpoint puts it together.
            return
        folder = Path(str(arguments["save_dir"])) / str(arguments["name"] or "")
        folder /= version if isinstance(version, str) else f"version_{version}"
    for arguments in checkpoint_arguments(config):
        if arguments.dirpath is None:
            arguments.dirpath = str(folder / CHECKPOINTS)
    record = {} if begins_anew(config.fresh, run) else read_record(Path(checkpoint_arguments(config)[0].dirpath))
    ids = record.get("loggers", {}) if record.get("run") == name else {}
    for number, logger in enumerate(loggers):
        if _class(logger) in IDS:
            identifier, shown = IDS[_class(logger)]
            for argument, value in ((identifier, ids.get(str(number))), (shown, name)):
                if logger.init_args[argument] is None:
                    logger.init_args[argument] = value


def begins_anew(fresh: bool, run: Run) -> bool:
    """Whether this start is to set aside what is there; a restart of a run that began so goes on."""
    return fresh and not run.starts


def keep_version(trainer: Any, name: str) -> list[Any]:
    """Give the loggers of a configuration a version, so that a run started again writes to the same folder.

    A version that the user gave stays, and so does a logger that has none, or for which it is an id.

    Returns:
        The loggers, as the configuration, which is changed, has them.
    """
    if trainer.logger is False:
        return []
    if trainer.logger is None or trainer.logger is True:
        # What Lightning would make.
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
    """The arguments of the configuration's own ModelCheckpoints, or else of the command line's."""
    callbacks = config.trainer.callbacks or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    own = [callback.init_args for callback in callbacks if _class(callback) == ModelCheckpoint.__name__]
    return own or [config.checkpoint]


def last_checkpoint(trainer: Trainer, run: Run) -> Path | None:
    """The last whole checkpoint of a run; None where it has none yet."""
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, ModelCheckpoint) or callback.dirpath is None or trainer.fast_dev_run:  # type: ignore[attr-defined]  # set outside the class
            continue
        folder = Path(callback.dirpath)
        last = folder / f"{callback.CHECKPOINT_NAME_LAST}{callback.FILE_EXTENSION}"
        if not last.exists():
            continue
        refuse_anothers(last, run.name)
        if _is_whole(last):
            return last
        others = [file for file in folder.glob(f"*{callback.FILE_EXTENSION}") if file != last and _is_whole(file)]
        if others:
            newest = max(others, key=lambda file: file.stat().st_mtime_ns)
            rank_zero_info(f"{last} is not whole: {newest.name} is taken")
            return newest
    return None


def refuse_anothers(last: Path, name: str) -> None:
    """Refuse a folder with the last checkpoint of another run; a restart would go on from it."""
    folder = last.parent
    record = read_record(folder)
    if last.exists() and record.get("run", folder.parent.name if folder.name == CHECKPOINTS else None) != name:
        raise ConfigurationError(
            f"{last} is not of the run {name}, which would go on from it after a restart: give another "
            "checkpoint.dirpath, or move it; `fit --fresh` sets it aside"
        )


def set_aside(trainer: Trainer, run: Run) -> None:
    """Move what a run of this name has left, so that a new one finds an empty folder; before its loggers open files."""
    folders = [
        Path(logger.root_dir) / str(logger.version)
        for logger in trainer.loggers
        if isinstance(logger, TensorBoardLogger | loggers_of_lightning.CSVLogger)
    ]
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
            checkpoints = Path(callback.dirpath)
            if checkpoints.name == CHECKPOINTS and checkpoints.parent.name == run.name:
                folders.append(checkpoints.parent)
            else:  # A folder that the user has chosen: other things may be there.
                _move([*checkpoints.glob(f"*{callback.FILE_EXTENSION}"), checkpoints / RECORD], checkpoints / "before")
    for folder in dict.fromkeys(folders):
        if folder.name == run.name and folder.exists():
            folder.rename(_free(folder.with_name(f"{folder.name}.before")))


def read_record(folder: Path) -> dict[str, Any]:
    """What ``run.json`` in a folder of checkpoints says; empty where there is none."""
    try:
        found: dict[str, Any] = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write ``run.json`` whole."""
    with whole_file(folder / RECORD, "make room there, or give another checkpoint.dirpath") as file:
        file.write(f"{json.dumps(record, indent=1)}\n".encode())


def _is_whole(checkpoint: Path) -> bool:
    """Whether nothing is missing at its end; one of several files is left to who loads it."""
    return checkpoint.is_dir() or zipfile.is_zipfile(checkpoint)


def _move(files: list[Path], beginning: Path) -> None:
    there = [file for file in files if file.exists()]
    if there:
        folder = _free(beginning)
        folder.mkdir()
        for file in there:
            file.rename(folder / file.name)


def _free(path: Path) -> Path:
    """The first of ``path_1``, ``path_2`` and so on that is not there."""
    return next(new for number in itertools.count(1) if not (new := path.with_name(f"{path.name}_{number}")).exists())


def _class(namespace: Any) -> str:
    return str(getattr(namespace, "class_path", "")).rpartition(".")[2]
