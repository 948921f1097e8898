"""Atomic writing of files and folders: a file or folder is either complete or does not exist.

A file is first written under a temporary name. Each process uses its own temporary names, so two processes can write
the same file at the same time: the file of the process that finishes last remains. The next process that writes to the
same folder removes the temporary files of processes that have ended.
"""

import contextlib
import errno
import itertools
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from cnnstrategies.errors import ConfigurationError, causes
from cnnstrategies.runtime.process_ids import ProcessId

DISK_ERRORS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO),
    *(errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG),
}
# Largest number of characters of the final name that a temporary name repeats. A file name has at most 255 bytes, and a
# character has at most 4 bytes.
REPEATED = 40
TEMPORARY = re.compile(r"\..+\.([0-9a-f]*)-(\d+)-(\d+)-\d+\.partial")
# Age in seconds from which the temporary file of a process on another machine is removed. Large files are written in
# many parts, each of which changes the time of the file, so a file that has not changed for a day has lost its writer.
ABANDONED = 86400.0
_numbers = itertools.count()


@contextmanager
def whole_file(path: Path, remedy: str) -> Iterator[BinaryIO]:
    """Write a file atomically: write it under a temporary name, flush it to the disk, and rename it.

    If the process or the machine stops at any time, the path has either the previous file or the complete new file.

    Args:
        path: Path of the file. Its directory is created if it does not exist.
        remedy: End of the error message: what to do if the disk is full or cannot be written to.

    Raises:
        ConfigurationError: The disk is full, or cannot be written to.
    """
    partial = temporary_name(path)
    with writing(path, remedy):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(partial, "xb") as file:
                remove_abandoned(path.parent, os.fstat(file.fileno()).st_mtime)
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextmanager
def whole_folder(path: Path, remedy: str) -> Iterator[Path]:
    """Create a folder atomically: yield a temporary folder next to it, and rename the temporary folder at the end.

    Args:
        path: Path of the folder, which must not exist. Its parent folder is created if it does not exist.
        remedy: End of the error message: what to do if the disk is full or cannot be written to.

    Raises:
        ConfigurationError: The disk is full or cannot be written to, or another process has created the folder.
    """
    partial = temporary_name(path)
    with writing(path, remedy):
        try:
            partial.mkdir(parents=True)
            remove_abandoned(path.parent, partial.stat().st_mtime)
            yield partial
            try:
                partial.rename(path)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                raise ConfigurationError(
                    f"{path} exists, because another process has created it in the meantime: remove it, or set another "
                    "path"
                ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def temporary_name(path: Path) -> Path:
    """Return a temporary name next to a path. Each call returns a new name, which no other process uses."""
    process = ProcessId.current()
    mark = f"{process.system}-{process.pid}-{process.start}-{next(_numbers)}"
    return path.with_name(f".{path.name[:REPEATED]}.{mark}.partial")


def remove_abandoned(folder: Path, now: float) -> None:
    """Remove temporary files and folders whose processes have ended.

    Args:
        folder: The folder to search.
        now: Current time by the clock of the folder's file server, such as the time of a file that was just created.
    """
    for partial in folder.glob(".*.partial"):
        if (match := TEMPORARY.fullmatch(partial.name)) is None:
            continue
        ended = ProcessId(match[1], int(match[2]), int(match[3])).has_ended()
        with contextlib.suppress(OSError):  # Another process may have removed the file.
            if ended or (ended is None and now - partial.stat().st_mtime > ABANDONED):
                if partial.is_dir():
                    shutil.rmtree(partial, ignore_errors=True)
                else:
                    partial.unlink()


@contextmanager
def writing(path: Path, remedy: str) -> Iterator[None]:
    """Convert disk errors, such as a full disk, to a :class:`ConfigurationError` with a one-line error message.

    The arguments are those of :func:`whole_file`.
    """
    try:
        yield
    except BaseException as error:
        for link in causes(error):  # torch raises errors of its own, whose cause is the operating system's error.
            if isinstance(link, OSError) and link.errno in DISK_ERRORS:
                raise ConfigurationError(f"cannot write {path}: {os.strerror(link.errno)}; {remedy}") from error
        raise
