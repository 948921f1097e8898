"""Atomic writing and checked reading of checkpoint files, with one-line error messages."""

import os
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from typing_extensions import override

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.runtime.whole_file import whole_file


class AtomicCheckpointIO(TorchCheckpointIO):
    """Checkpoint plugin that writes files atomically, and verifies the checksums of a file before it loads the file.

    Lightning's own plugin writes to a temporary directory and then moves the file. If the temporary directory and the
    checkpoint's directory are on different file systems, the move is a copy, which can be interrupted. Checkpoints at
    URLs are still written by Lightning's plugin.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Save ``checkpoint`` at ``path``. A local file is written atomically."""
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        remedy = "free some space, or set checkpoint.dirpath to another disk, and resume with --ckpt_path=last"
        with whole_file(Path(path), remedy) as file:
            torch.save(checkpoint, file)

    @override
    def load_checkpoint(
        self, path: str | Path, map_location: Callable[..., Any] | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load the checkpoint at ``path``, and verify the checksums of a local file."""
        if str(path).startswith(("http://", "https://")):
            # Lightning would execute pickled code from the URL. Lightning would also use a cached file that was
            # downloaded from a different URL if the two file names are equal. URLs are therefore refused.
            raise ConfigurationError(
                f"ckpt_path: {path} is a URL, which cannot be loaded: download the file, for example with `curl -O`, "
                "and set ckpt_path to its path"
            )
        if not Path(path).is_file():
            return super().load_checkpoint(path, map_location or _to_memory, weights_only)
        check_sums(path)
        try:
            return super().load_checkpoint(path, map_location or _to_memory, weights_only)
        except Exception as error:
            raise unreadable(path, error) from error


def load_mapped(path: str | Path, weights_only: bool | None) -> dict[str, Any]:
    """Load a checkpoint by memory mapping, so that only the tensors that are used are read into memory.

    Raises:
        ConfigurationError: The file cannot be read.
    """
    check_sums(path)
    try:
        mapped: dict[str, Any] = torch.load(path, _to_memory, weights_only=weights_only, mmap=True)
        return mapped
    except Exception as error:
        raise unreadable(path, error) from error


def _to_memory(storage: Any, location: str) -> Any:
    """Return a tensor's storage unchanged. torch has loaded the storage into the CPU's memory, where it stays.

    Lightning's default for ``map_location`` does the same.
    """
    return storage


def check_sums(path: str | Path) -> None:
    """Verify the checksums of a checkpoint file, which is a zip archive. ``torch.load`` does not verify them.

    Raises:
        ConfigurationError: A checksum does not match the file's content.
    """
    if zipfile.is_zipfile(path):
        try:
            with zipfile.ZipFile(path) as archive:
                changed = archive.testzip()
        except Exception as error:  # A changed byte in the zip archive's directory can cause an error of any class.
            changed = f"the archive's directory ({error})"
        if changed is not None:
            raise ConfigurationError(
                f"ckpt_path: {path} is damaged: the checksum of {changed} is wrong; copy the file again, or set "
                "another checkpoint"
            )


def unreadable(path: str | Path, error: Exception) -> ConfigurationError:
    """Return an error that says why a checkpoint file could not be loaded.

    Args:
        path: Path of the file.
        error: The error that ``torch.load`` has raised.
    """
    with open(path, "rb") as file:
        return ConfigurationError(f"ckpt_path: {path} {_reason(file, error)}")


def _reason(file: BinaryIO, error: Exception) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    start = file.read(16)
    is_archive = zipfile.is_zipfile(file)
    if not start:
        return "is empty, because the disk was full or copying did not finish: copy it again, or set another checkpoint"
    if start.startswith(b"PK") and not is_archive:
        return f"is truncated after {size:,} bytes, because copying did not finish: copy it again"
    if not is_archive and not start.startswith(pickle.PROTO):
        return f"is not a checkpoint: it begins with {start!r}"
    if isinstance(error, pickle.UnpicklingError):
        match = re.search(r"GLOBAL (\S+)", str(error))
        return (
            f"contains Python objects other than weights and plain values ({match[1] if match else 'unknown class'}): "
            "if you trust the file's origin, add --weights_only=false"
        )
    return f"cannot be read: {type(error).__name__}: {error}"
