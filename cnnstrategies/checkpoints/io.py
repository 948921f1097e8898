"""Checkpoints that are either whole or not there, and one line for those that cannot be written or read."""

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
    """Writes a checkpoint as a whole, and looks at what it reads.

    Lightning's own writer goes through a temporary directory, and moving a file from another file system is a
    copy that can be cut short. Writing to remote URLs is left to Lightning.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Save ``checkpoint`` at ``path``."""
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        remedy = "make room there or set checkpoint.dirpath to another disk, and go on with --ckpt_path=last"
        with whole_file(Path(path), remedy) as file:
            torch.save(checkpoint, file)

    @override
    def load_checkpoint(
        self, path: str | Path, map_location: Callable[..., Any] | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load the checkpoint at ``path``."""
        if str(path).startswith(("http://", "https://")):
            # Lightning would run what is pickled there, and take the file of another URL that ends in the same name.
            raise ConfigurationError(f"ckpt_path: {path}: download it first, as by `curl -O`, and give the file")
        if not Path(path).is_file():
            return super().load_checkpoint(path, map_location or _to_memory, weights_only)
        check_sums(path)
        try:
            return super().load_checkpoint(path, map_location or _to_memory, weights_only)
        except Exception as error:
            raise unreadable(path, error) from error


def load_mapped(path: str | Path, weights_only: bool | None) -> dict[str, Any]:
    """Load the checkpoint of a file, of which only what is used comes into memory."""
    check_sums(path)
    try:
        mapped: dict[str, Any] = torch.load(path, _to_memory, weights_only=weights_only, mmap=True)
        return mapped
    except Exception as error:
        raise unreadable(path, error) from error


def _to_memory(storage: Any, location: str) -> Any:
    """Lightning's default: whatever device a tensor was on, it comes into the processor's memory."""
    return storage


def check_sums(path: str | Path) -> None:
    """Compare a file with the checksums that torch and others write into each archive, and nobody reads."""
    if zipfile.is_zipfile(path):
        try:
            with zipfile.ZipFile(path) as archive:
                changed = archive.testzip()
        except Exception as error:  # Whatever a changed byte of its directory leads to.
            changed = f"its directory ({error})"
        if changed is not None:
            raise ConfigurationError(
                f"ckpt_path: {path} is not as it was written: {changed} has changed since: copy it again, or "
                "take another checkpoint"
            )


def unreadable(path: str | Path, error: Exception) -> ConfigurationError:
    """The error that says why a file could not be loaded."""
    with open(path, "rb") as file:
        return ConfigurationError(f"ckpt_path: {path} {_what_is_wrong(file, error)}")


def _what_is_wrong(file: BinaryIO, error: Exception) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    start = file.read(16)
    is_archive = zipfile.is_zipfile(file)
    if not start:
        return "is empty: the disk was full, or a copy of it did not end; give another checkpoint"
    if start.startswith(b"PK") and not is_archive:
        return f"is cut short after {size:,} bytes: a copy of it did not end; copy it again"
    if not is_archive and not start.startswith(pickle.PROTO):
        return f"is no checkpoint: it begins with {start!r}"
    if isinstance(error, pickle.UnpicklingError):
        found = re.search(r"GLOBAL (\S+)", str(error))
        return (
            f"holds more than weights and plain values ({found[1] if found else 'objects'}): if you trust its origin, "
            "add --weights_only=false"
        )
    return f"cannot be read: {type(error).__name__}: {error}"
