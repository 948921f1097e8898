"""A run that may be started again: its name, where it lies, and the checkpoint from which it goes on.

The name is, in this order,

1. what is given as ``--run_name`` or, by a program that starts ``fit``, in the variable ``CNNSTRATEGIES_RUN_NAME``,
2. what the launchers in :data:`LAUNCHERS` offer, one after the other.

Without either nobody can start the run again; it gets a new folder, as it always has. A launcher of
ours sets that variable; for a foreign one, which sets its own, a function here reads them.

The loggers' version is the name, and the checkpoints are in ``checkpoints`` below the first logger's folder, unless
``checkpoint.dirpath`` says otherwise. Beside them ``run.json`` says whose they are.
"""

import hashlib
import json
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch import loggers as loggers_of_lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning_utilities.core.rank_zero import rank_zero_info

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.runtime.loggers import KeptCSVLogger
from cnnstrategies.runtime.whole_file import whole_file

RUN_NAME = "CNNSTRATEGIES_RUN_NAME"  # Environment variable, of programs that start `fit`.
NOT_PART_OF_IT = ("config", "ckpt_path", "run_name", "dry_run")  # Keys by which a restart may differ.
MOST_CHARACTERS = 120
MADE_UP_BY_TORCHRUN = re.compile(r"torchrun_[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # A UUID, as with --standalone.
RECORD = "run.json"
CHECKPOINTS = "checkpoints"
# The arguments by which other loggers go on in a run, and show its name.
IDS = {"WandbLogger": ("version", "name"), "MLFlowLogger": ("run_id", "run_name")}
CSV = loggers_of_lightning.CSVLogger.__name__
WITH_FOLDERS = (TensorBoardLogger.__name__, CSV, KeptCSVLogger.__name__)  # Their version is a folder.
Environment = Mapping[str, str]


def torchrun(environ: Environment, configuration: str) -> str | None:
    """``--rdzv-id``; where it is left out torchrun makes one up, or has ``none``."""
    name = environ.get("TORCHELASTIC_RUN_ID", "none")
    return None if name == "none" else f"torchrun_{name}"


def kubernetes(environ: Environment, configuration: str) -> str | None:
    """The name of the Indexed Job or the TrainJob; the host name of their pods ends with the pod's number."""
    if "KUBERNETES_SERVICE_HOST" not in environ or "JOB_COMPLETION_INDEX" not in environ:
        return None
    host, number = environ.get("HOSTNAME", ""), environ["JOB_COMPLETION_INDEX"]
    # A TrainJob's pods are those of the replicated job `node`, of which there is one.
    job = re.sub(r"-node-0$", "", host.removesuffix(f"-{number}"))
    return f"kubernetes_{job}" if host.endswith(f"-{number}") else None


def ray(environ: Environment, configuration: str) -> str | None:
    """The submission id of a Ray job's entry point; a plain job id is the same in each new cluster."""
    try:
        metadata = json.loads(environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")).get("metadata") or {}
    except ValueError:
        return None
    submission = metadata.get("job_submission_id")
    # A script may train several things; that of the same configuration is the same.
    return None if submission is None else f"ray_{submission}_{configuration}"


def slurm(environ: Environment, configuration: str) -> str | None:
    """The job and its step, which are counted anew when the job is requeued.

    A job's script without srun may train several things; that of the same configuration is the same. The shell of an
    interactive job is no script: who types there does not start the same run again.
    """
    job, step = environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID")
    interactive = "SLURM_PTY_PORT" in environ or environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    if job is None or interactive or "SLURM_TASK_PID" not in environ:
        return None
    return f"slurm_{job}_{configuration if step is None else step}"


LAUNCHERS: tuple[Callable[[Environment, str], str | None], ...] = (torchrun, kubernetes, ray, slurm)


def find_run(given: str | None, configuration: str, environ: Environment) -> str | None:
    """The name of the run that this process is a part of; None where nobody starts it again."""
    for name, source in ((given, "run_name"), (environ.get(RUN_NAME), RUN_NAME)):
        if name is not None:
            return checked(name, source)
    names = [name for launcher in LAUNCHERS if (name := launcher(environ, configuration)) is not None]
    # What torchrun has made up does not outlive it; another launcher's, which may start it again, does.
    names.sort(key=lambda name: MADE_UP_BY_TORCHRUN.fullmatch(name) is not None)
    if names:
        return re.sub(r"[^\w.+-]", "-", names[0])[:MOST_CHARACTERS]
    if environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        raise ConfigurationError(
            "torchrun --max-restarts without a name for the run: restarted processes would not find its checkpoints; "
            "add --run_name <name> to the options of cnnstrategies, or --rdzv-id to those of a c10d rendezvous"
        )
    return None


def checked(name: str, source: str = "run_name") -> str:
    """A name, if it can be that of a run's folder."""
    if not re.fullmatch(r"\w[\w.+-]*", name) or len(name) > MOST_CHARACTERS:
        raise ConfigurationError(
            f"{source}={name!r}: it names a folder: at most {MOST_CHARACTERS} letters, digits and . + - _ are accepted"
        )
    if re.fullmatch(r"version_\d+", name):
        raise ConfigurationError(f"{source}={name}: runs without a name are numbered so; choose another one")
    return name


def configuration_hash(config: Mapping[str, object]) -> str:
    """Eight characters that are the same for the same configuration, whichever checkpoint it starts from."""
    content = sorted((str(key), str(value)) for key, value in config.items() if key not in NOT_PART_OF_IT)
    return hashlib.sha256(repr(content).encode()).hexdigest()[:8]


def place(config: Any, name: str) -> None:
    """Give loggers and checkpoints of a configuration the run's folder and ids; what the user has said stays."""
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
    record = read_record(Path(checkpoint_arguments(config)[0].dirpath))
    ids = record.get("loggers", {}) if record.get("run") == name else {}
    for number, logger in enumerate(loggers):
        if _class(logger) in IDS:
            identifier, shown = IDS[_class(logger)]
            for argument, value in ((identifier, ids.get(str(number))), (shown, name)):
                if logger.init_args[argument] is None:
                    logger.init_args[argument] = value


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


def last_checkpoint(trainer: Trainer, name: str) -> Path | None:
    """The last whole checkpoint of a run; None where it has none yet."""
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
            "checkpoint.dirpath, or move it"
        )


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


def _class(namespace: Any) -> str:
    return str(getattr(namespace, "class_path", "")).rpartition(".")[2]
