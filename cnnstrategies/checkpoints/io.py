"""Checkpoint files that are either complete or absent, and one-line errors for writing and reading."""

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
    """Writes complete checkpoint files, and checks files before it loads them.

    Lightning's own writer uses a temporary directory; moving a file from another file system is a copy that can be cut
    short. Lightning still writes to remote URLs.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Save ``checkpoint`` at ``path``."""
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
        """Load the checkpoint at ``path``."""
        if str(path).startswith(("http://", "https://")):
            # Lightning would run pickled code from the URL, and would reuse the cached file of another URL that ends
            # with the same name.
            raise ConfigurationError(f"ckpt_path: {path}: download it first, as with `curl -O`, and give the file")
        if not Path(path).is_file():
            return super().load_checkpoint(path, map_location or _to_memory, weights_only)
        check_sums(path)
        try:
            return super().load_checkpoint(path, map_location or _to_memory, weights_only)
        except Exception as error:
            raise unreadable(path, error) from error


def load_mapped(path: str | Path, weights_only: bool | None) -> dict[str, Any]:
    """Load a checkpoint; only the tensors that are used are read into memory.

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
    """Return a storage in the processor's memory, wherever the tensor was saved from; this is Lightning's default."""
    return storage


def check_sums(path: str | Path) -> None:
    """Compare a file with the checksums in its archive, which torch writes and does not check.

    Raises:
        ConfigurationError: The file has changed since it was written.
    """
    if zipfile.is_zipfile(path):
        try:
            with zipfile.ZipFile(path) as archive:
                changed = archive.testzip()
        except Exception as error:  # A changed byte in the archive's directory can lead to any error.
            changed = f"its directory ({error})"
        if changed is not None:
            raise ConfigurationError(
                f"ckpt_path: {path} is damaged: {changed} has changed since it was written; copy the file again, or "
                "give another checkpoint"
            )


def unreadable(path: str | Path, error: Exception) -> ConfigurationError:
    """Return an error with the reason why a file could not be loaded."""
    with open(path, "rb") as file:
        return ConfigurationError(f"ckpt_path: {path} {_reason(file, error)}")


def _reason(file: BinaryIO, error: Exception) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    start = file.read(16)
    is_archive = zipfile.is_zipfile(file)
    if not start:
        return "is empty: the disk was full, or copying the file did not finish; give another checkpoint"
    if start.startswith(b"PK") and not is_archive:
        return f"is cut short after {size:,} bytes: copying the file did not finish; copy it again"
    if not is_archive and not start.startswith(pickle.PROTO):
        return f"is not a checkpoint: it begins with {start!r}"
    if isinstance(error, pickle.UnpicklingError):
        match = re.search(r"GLOBAL (\S+)", str(error))
        return (
            f"holds more than weights and plain values ({match[1] if match else 'objects'}): if you trust its origin, "
            "add --weights_only=false"
        )
    return f"cannot be read: {type(error).__name__}: {error}"
