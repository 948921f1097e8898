"""By what a sweep tells a run that it is a trial: environment variables, which all ranks inherit."""

import os
from typing import Any

from cnnstrategies.cluster.run_name import keep_version

SOCKET = "CNNSTRATEGIES_SWEEP"  # Where the metric is reported.
METRIC = "CNNSTRATEGIES_SWEEP_METRIC"  # Its name.
FOLDER = "CNNSTRATEGIES_SWEEP_FOLDER"  # Of the trial.
OF_FOLDERS = ("TensorBoardLogger", "CSVLogger")  # Their name and version are folders below.


def keep_apart(config: Any) -> None:
    """Have a trial's loggers and checkpoints write to its own folder; in a run that is none, nothing is changed.

    Args:
        config: The configuration of ``fit``; changed.
    """
    folder = os.environ.get(FOLDER)
    if folder is None:
        return
    trainer = config.trainer
    keep_version(trainer, "")
    trainer.default_root_dir = folder
    for logger in _listed(trainer.logger):
        arguments = getattr(logger, "init_args", None) or {}
        if "save_dir" in arguments:
            arguments["save_dir"] = folder
        if str(getattr(logger, "class_path", "")).endswith(OF_FOLDERS):
            arguments["name"] = arguments["version"] = ""
    saving = [getattr(callback, "init_args", None) or {} for callback in _listed(trainer.callbacks)]
    for arguments in (config.checkpoint, *saving):
        if arguments.get("dirpath") is not None:
            arguments["dirpath"] = f"{folder}/checkpoints"


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
