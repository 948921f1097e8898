"""Checkpoints that are either whole or not there."""

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from typing_extensions import override


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place, flushes it to the disk and renames it.

    Whenever the process or the machine stops, the file at the path is the previous checkpoint or the new one.
    Lightning's own writer goes through a temporary directory, and moving a file from another file system is a
    copy that can be cut short. Remote URLs are left to Lightning.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Save ``checkpoint`` at ``path``.

        Args:
            checkpoint: What to save.
            path: Where; its directory is made if need be. A URL goes to Lightning's writer.
            storage_options: Refused by Lightning's writer when not None.
        """
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        final = Path(path)
        final.parent.mkdir(parents=True, exist_ok=True)
        # One name per checkpoint, so that what a kill leaves behind is overwritten by the next save.
        partial = final.with_name(f".{final.name}.partial")
        with open(partial, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, final)
        directory = os.open(final.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
