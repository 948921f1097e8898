"""When a server writes snapshots of its slices, from which a process that replaces it goes on.

What is written is a copy of one moment, and a thread of its own writes it: a slow disk holds up nobody, and one that is
full costs the snapshot, not the run.
"""

import sys
import threading
from typing import Any

from torch import Tensor

from cnnstrategies.paramserver.snapshot_files import SnapshotFiles
from cnnstrategies.paramserver.specification import Specification
from cnnstrategies.paramserver.store import Store

LONGEST_PAUSE = 64  # times `snapshot_every`, after several that could not be written


class Snapshots:
    """Writes them, and finds the last one.

    Args:
        specification: Says how often and where.
        server: Id of the server.

    Raises:
        ConfigurationError: The directory is not this process's alone.
    """

    def __init__(self, specification: Specification, server: int) -> None:
        self._server = server
        self._every = specification.snapshot_every
        directory = specification.snapshot_directory
        wanted = directory is not None and self._every
        self.files = SnapshotFiles(directory, specification.session, server) if wanted and directory else None
        self._next = 0  # The first is of the values that training begins with.
        self._failures = 0  # one after the other
        self._writer: threading.Thread | None = None

    def after(self, updates: int, store: Store) -> bool:
        """Begin to write one if enough updates have been made since the last.

        Args:
            updates: Updates so far of all parameters.
            store: What to write.

        Returns:
            Whether one is being written.
        """
        if self.files is None or updates < self._next or min(store.versions.values(), default=-1) < 0:
            return False
        if self._writer is not None and self._writer.is_alive():
            return False
        self._next = updates + self._every
        self._writer = threading.Thread(target=self._write, args=(_copied(store.contents()), updates), name="snapshot")
        self._writer.start()
        return True

    def _write(self, contents: dict[str, Any], updates: int) -> None:
        assert self.files is not None
        try:
            self.files.write(contents)
            self._failures = 0
        except OSError as error:
            self._failures += 1
            self._next = updates + self._every * min(2**self._failures, LONGEST_PAUSE)
            print(
                f"server {self._server} could not write a snapshot: {error}; it goes on with the last one",
                file=sys.stderr,
                flush=True,
            )

    def wait(self) -> None:
        """Wait until the one that is being written is there."""
        if self._writer is not None:
            self._writer.join()

    def load(self, store: Store) -> bool:
        """Restore the last snapshot of this run; whether there is one."""
        contents = None if self.files is None else self.files.load()
        if contents is None:
            return False
        store.restore(contents)
        self._next = self._every  # Servers count updates from their own start.
        return True

    def close(self, remove: bool = False) -> None:
        """Write no more.

        Args:
            remove: The run is over: remove what was written.
        """
        self.wait()
        if self.files is not None:
            self.files.close(remove)
            self.files = None


def _copied(value: Any) -> Any:
    """The same with tensors of its own."""
    if isinstance(value, dict):
        return {key: _copied(entry) for key, entry in value.items()}
    return value.clone() if isinstance(value, Tensor) else value
