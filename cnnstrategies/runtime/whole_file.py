"""Files that are either complete or absent."""

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
    """Write a file under a temporary name, flush it to the disk and rename it.

    Whenever the process or the machine stops, the file at the path is either the previous file or the new file.

    Args:
        path: Path of the file; its directory is made if necessary.
        remedy: The message's last part: what to do if the disk is full or cannot be written to.

    Raises:
        ConfigurationError: The disk is full, or cannot be written to.
    """
    # The temporary name is always the same, so that the next write overwrites the rest of a killed one.
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
    """Turn errors of the disk into a :class:`ConfigurationError` of one line; see :func:`whole_file`."""
    try:
        yield
    except BaseException as error:
        for link in causes(error):  # torch wraps the system's errors in errors of its own.
            if isinstance(link, OSError) and link.errno in DISK_ERRORS:
                raise ConfigurationError(f"cannot write {path}: {os.strerror(link.errno)}; {remedy}") from error
        raise
