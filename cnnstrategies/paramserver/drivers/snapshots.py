"""Writes a server's snapshots, in a thread: a slow disk holds up nobody."""

import threading
from typing import Any

from cnnstrategies.paramserver.drivers.snapshot_files import SnapshotFiles
from cnnstrategies.paramserver.server.store import Store
from cnnstrategies.paramserver.specification import Specification


class SnapshotWriter:
    """Writes them, one at a time, and finds the last one.

    Args:
        specification: Says whether and where.
        server: Id of the server.

    Raises:
        ConfigurationError: The directory is not this process's alone.
    """

    def __init__(self, specification: Specification, server: int) -> None:
        directory = specification.snapshot_directory
        wanted = directory is not None and specification.snapshot_every
        self.files = SnapshotFiles(directory, specification.session, server) if wanted and directory else None
        self._writer: threading.Thread | None = None
        self._error: str | None = None
        self._failure: Exception | None = None  # is no disk's, but a mistake in here

    def begin(self, contents: dict[str, Any]) -> None:
        """Begin to write one."""
        assert self._writer is None, "one at a time"
        self._error = None
        self._writer = threading.Thread(target=self._write, args=(contents,), name="snapshot")
        self._writer.start()

    def _write(self, contents: dict[str, Any]) -> None:
        assert self.files is not None
        try:
            self.files.write(contents)
        except OSError as error:
            self._error = str(error)
        except Exception as error:
            self._failure = error

    @property
    def done(self) -> bool:
        """Whether the one that was begun is written or has failed, and :meth:`result` has not been asked for."""
        return self._writer is not None and not self._writer.is_alive()

    def result(self) -> str | None:
        """Wait for the one that was begun; why it could not be written, or None.

        Raises:
            Exception: What else its thread has failed with.
        """
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return self._error

    def load(self, store: Store) -> bool:
        """Restore the last snapshot of this run; whether there is one."""
        contents = None if self.files is None else self.files.load()
        if contents is None:
            return False
        store.restore(contents)
        return True

    def close(self, remove: bool = False) -> None:
        """Write no more.

        Args:
            remove: The run is over: remove what was written.
        """
        self.result()
        if self.files is not None:
            self.files.close(remove)
            self.files = None
