"""The folder of a sweep's trial, from within its run."""

import os
from pathlib import Path
from typing import Any

from cnnstrategies.cluster.run_folder import WITH_FOLDERS, checkpoint_arguments, keep_version
from cnnstrategies.sweeping.talk import FOLDER


def keep_apart(config: Any) -> None:
    """Have a trial's loggers and checkpoints write to its own folder; in a run that is none, nothing is changed.

    Args:
        config: The configuration of ``fit``; changed.
    """
    folder = os.environ.get(FOLDER)
    if folder is None:
        return
    config.trainer.default_root_dir = folder
    for logger in keep_version(config.trainer, Path(folder).name):
        arguments = getattr(logger, "init_args", None) or {}
        if "save_dir" in arguments:
            arguments["save_dir"] = folder
        if str(getattr(logger, "class_path", "")).endswith(WITH_FOLDERS):
            arguments["name"] = arguments["version"] = ""
    for arguments in checkpoint_arguments(config):
        if arguments.dirpath is not None:
            arguments.dirpath = f"{folder}/checkpoints"
