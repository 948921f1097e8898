"""Snapshots of a server's slices, from which a process that replaces it goes on."""

import contextlib
import os
from pathlib import Path

import torch

from cnnstrategies.paramserver.specification import Specification
from cnnstrategies.paramserver.store import Store


class Snapshots:
    """One file, replaced atomically: a crash at any moment leaves the last whole one.

    Args:
        specification: Says how often and where.
        server: Id of the server.
    """

    def __init__(self, specification: Specification, server: int) -> None:
        self._every = specification.snapshot_every
        self._session = specification.session
        directory = specification.snapshot_directory
        self._path = Path(directory) / f"server-{server}.pt" if directory is not None and self._every else None
        self._last = -self._every  # The first is of the values that training begins with.

    def after(self, updates: int, store: Store) -> bool:
        """Write one if enough updates have been made since the last.

        Args:
            updates: Updates so far of all parameters.
            store: What to write.

        Returns:
            Whether one was written.
        """
        if self._path is None or updates < self._last + self._every or min(store.versions.values(), default=-1) < 0:
            return False
        self._last = updates
        self._path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self._path.with_suffix(".new")
        with open(scratch, "wb") as file:
            torch.save({"session": self._session, **store.contents()}, file)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(self._path)
        return True

    def load(self, store: Store) -> bool:
        """Restore the last snapshot of this run; whether there is one."""
        if self._path is None:
            return False
        with contextlib.suppress(FileNotFoundError):
            contents = torch.load(self._path, weights_only=True)
            if contents["session"] == self._session:
                store.restore(contents)
                self._last = 0  # Servers count updates from their own start.
                return True
        return False
