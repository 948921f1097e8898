"""Check of the option ``ckpt_path``, which needs neither torch nor Lightning."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cnnstrategies.errors import ConfigurationError

SHARDED = (".metadata", "meta.pt", "checkpoint")  # A folder that contains one of these files is a sharded checkpoint.
CHECKPOINT_KEYWORDS = ("best", "last", "hpc")  # Values of ckpt_path that are keywords and not paths.


def check_checkpoint(path: Any, keywords: Sequence[str] = CHECKPOINT_KEYWORDS, folder: Any = None) -> None:
    """Raise a ConfigurationError if the checkpoint in ``ckpt_path`` does not exist.

    Args:
        path: The value of ``ckpt_path``: a path, or one of `keywords`, or None.
        keywords: Accepted values that are not paths, such as ``best``. If there are keywords, values that begin with
            ``registry:`` are also accepted.
        folder: The value of ``trainer.default_root_dir``: Lightning's folder for checkpoints of preempted jobs.
    """
    if path == "hpc" and path in keywords:
        _check_preempted(folder)
    if path is None or str(path) in keywords:
        return
    if "://" in str(path):  # A URL is not checked here. If its file is missing, loading the checkpoint fails later.
        return
    if Path(path).is_dir() and not any((Path(path) / name).exists() for name in SHARDED):
        raise ConfigurationError(f"ckpt_path: {str(path)!r} is a folder; give a file, such as last.ckpt in this folder")
    if Path(path).exists():
        return
    if keywords and re.match(r"registry(:|$)", str(path), re.IGNORECASE):
        return
    beside = ", ".join(sorted(file.name for file in Path(path).parent.glob("*.ckpt")))
    hint = f"the folder contains {beside}" if beside else "the folder contains no checkpoints"
    raise ConfigurationError(
        f"ckpt_path: there is no checkpoint {str(path)!r}; {hint}; give {' or '.join((*keywords, 'a path'))}"
    )


def _check_preempted(folder: Any) -> None:
    """Raise a ConfigurationError if Lightning has not saved a checkpoint of a preempted job."""
    root = str(folder or ".")
    if "://" not in root and not [*Path(root).glob("hpc_ckpt_*.ckpt")]:
        raise ConfigurationError(
            f"ckpt_path: 'hpc' means the newest file hpc_ckpt_N.ckpt in {Path(root).resolve()}, and there is no such "
            "file: give last, best or a path, or set trainer.default_root_dir to the folder of the file"
        )
