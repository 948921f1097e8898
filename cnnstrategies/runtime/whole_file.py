"""Files that are either whole or not there."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from cnnstrategies.errors import ConfigurationError, causes

OF_DISKS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO),
    *(errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG),
}


@contextmanager
def whole_file(path: Path, remedy: str) -> Iterator[BinaryIO]:
    """Write a file beside its place, flush it to the disk and rename it.

    Whenever the process or the machine stops, the file at the path is the previous one or the new one.

    Args:
        path: Its place; the directory is made if need be.
        remedy: What to do where the disk does not take it.

    Raises:
        ConfigurationError: The disk is full, or cannot be written to.
    """
    # One name per file, so that what a kill leaves behind is overwritten by the next one.
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
    """Tell an error of the disk in a line; see :func:`whole_file`."""
    try:
        yield
    except BaseException as error:
        for link in causes(error):  # torch raises errors of its own for the system's.
            if isinstance(link, OSError) and link.errno in OF_DISKS:
                raise ConfigurationError(f"cannot write {path}: {os.strerror(link.errno)}; {remedy}") from error
        raise
