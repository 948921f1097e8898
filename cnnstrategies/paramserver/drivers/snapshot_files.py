"""The files of a server's snapshots: whole or not there, checked before they are loaded, for their owner only.

A file is a line of text, the number of bytes and the checksum of what follows, and that. Two generations are kept: what
is damaged on the disk costs the updates in between, not all.
"""

import contextlib
import errno
import fcntl
import hashlib
import io
import os
import shutil
import stat
import struct
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

import torch

from cnnstrategies.errors import ConfigurationError

TITLE = b"cnnstrategies snapshot 1\n"
_HEAD = struct.Struct("<Q32s")
DYING_SECONDS = 5.0  # for a process that was killed to end, when another takes its place
_START = len(TITLE) + _HEAD.size


class DamagedSnapshotError(ValueError):
    """A file is not as it was written; the message names it."""


class SummedFile(io.BytesIO):
    """Writes to a file, and counts and sums up what it has written.

    Attributes:
        error: Why the file cannot be written. It is not raised in the middle: torch would report something else.
    """

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self.error: OSError | None = None
        self.length = 0
        self.sum = hashlib.sha256()
        self._file = file

    def write(self, data: Any) -> int:
        """Write, and sum up."""
        self.length += memoryview(data).nbytes
        self.sum.update(data)
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
        return memoryview(data).nbytes


class SnapshotFiles:
    """The snapshots of one server of one run. No other run, and no other process, can have the same.

    Args:
        directory: Where all runs write theirs; the run's own directory is made in it.
        session: The run's number.
        server: Id of the server.

    Raises:
        ConfigurationError: Others may write in the run's directory, or another process has this server's place.
    """

    def __init__(self, directory: str | Path, session: int, server: int) -> None:
        run = Path(directory) / f"run-{session:016x}"
        self.directory = run / f"server-{server}"
        self.newest = self.directory / "newest"
        self.before = self.directory / "before"
        Path(directory).mkdir(parents=True, exist_ok=True)
        for own in (run, self.directory):
            own.mkdir(mode=0o700, exist_ok=True)
            about = own.lstat()
            if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
                raise ConfigurationError(f"{own} is not a directory of this user's alone: choose a snapshot_directory")
        self._lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + DYING_SECONDS
        while not self._is_mine():
            if time.monotonic() > deadline:
                os.close(self._lock)
                raise ConfigurationError(f"another process writes the snapshots in {self.directory}: end it")
            time.sleep(0.02)

    def _is_mine(self) -> bool:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in (errno.EACCES, errno.EAGAIN)  # Else the file system has no locks.
        return True

    def write(self, contents: dict[str, Any]) -> None:
        """Write the next generation.

        Raises:
            OSError: The disk is full, for example; the generations before are as they were.
        """
        scratch = self.directory / "scratch"
        scratch.unlink(missing_ok=True)
        try:
            descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(bytes(_START))
                summed = SummedFile(file)
                torch.save(contents, summed)
                if summed.error is not None:
                    raise summed.error
                file.seek(0)
                file.write(TITLE + _HEAD.pack(summed.length, summed.sum.digest()))
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            with contextlib.suppress(OSError):
                scratch.unlink(missing_ok=True)
            raise
        with contextlib.suppress(FileNotFoundError):
            self.newest.replace(self.before)
        scratch.replace(self.newest)
        directory = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def load(self) -> dict[str, Any] | None:
        """The newest generation that is whole, or None; says which ones are not."""
        for path in (self.newest, self.before):
            try:
                return read(path)
            except FileNotFoundError:
                continue
            except (DamagedSnapshotError, OSError) as error:
                print(f"a snapshot is not used: {error}", file=sys.stderr, flush=True)
        return None

    def close(self, remove: bool = False) -> None:
        """Let another process have this place.

        Args:
            remove: The run is over, and nobody will want its snapshots.
        """
        os.close(self._lock)
        if remove:
            shutil.rmtree(self.directory, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.directory.parent.rmdir()


def read(path: Path) -> dict[str, Any]:
    """What a file holds.

    Raises:
        DamagedSnapshotError: It is not as it was written.
        OSError: It cannot be read.
    """
    data = path.read_bytes()
    if len(data) < _START or not data.startswith(TITLE):
        raise DamagedSnapshotError(f"{path} is no snapshot of this version")
    length, checksum = _HEAD.unpack_from(data, len(TITLE))
    body = memoryview(data)[_START:]
    if len(body) != length or hashlib.sha256(body).digest() != checksum:
        raise DamagedSnapshotError(f"{path} is damaged: its checksum is another one")
    contents: dict[str, Any] = torch.load(io.BytesIO(body), weights_only=True)
    return contents
