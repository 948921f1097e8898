"""Atomic writing of files: a file is either complete or does not exist."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from cnnstrategies.errors import ConfigurationError, causes

DISK_ERRORS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO),
    *(errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG),
}


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
    # The temporary name is fixed, so that the next call overwrites the temporary file of a killed process.
    partial = path.with_name(f".{path.name}.partial")
    with writing(path, remedy):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(partial, "wb") as file:
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
