"""A coordinator's journal as a file, in a directory that only its user can enter."""

import os
import sys
from pathlib import Path


class JournalFile:
    """A :class:`~cnnstrategies.paramserver.coordinator.journal.Store`.

    What cannot be written, since the disk is full, ends no run: the file is removed, and that is said. Whoever is to
    follow a coordinator that is killed then finds none, until all of it can be written anew.

    Args:
        path: Of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1

    def read(self) -> bytes:
        """All of it."""
        return self._path.read_bytes()

    def append(self, record: bytes) -> None:
        """Write at its end."""
        if self._file < 0:
            return
        try:
            _write(self._file, record)
        except OSError as error:
            self._remove(error)

    def replace(self, contents: bytes) -> None:
        """Write all of it anew, beside the old one, whose place it takes as soon as it is whole."""
        new = self._path.with_suffix(".new")
        self._close()
        try:
            self._file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            _write(self._file, contents)
            new.replace(self._path)
        except OSError as error:
            self._remove(error)

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _remove(self, error: OSError) -> None:
        self._close()
        self._path.unlink(missing_ok=True)
        text = f"the coordinator's journal {self._path} cannot be written ({error.strerror}): free some space"
        print(f"{text}, or the run ends if the coordinator is killed", file=sys.stderr, flush=True)


def _write(file: int, contents: bytes) -> None:
    rest = memoryview(contents)
    while rest:
        rest = rest[os.write(file, rest) :]
