"""When a server writes snapshots of its slices, from which a process that replaces it goes on.

What is written is a copy of one moment. A disk that is full costs the snapshot, not the run.
"""

from typing import Any

from torch import Tensor

from cnnstrategies.paramserver.effects import Save
from cnnstrategies.paramserver.server.store import Store

LONGEST_PAUSE = 64  # times `snapshot_every`, after several that could not be written


class Snapshots:
    """Says when one is due. One is written at a time.

    Args:
        every: Updates between two; 0 for none.
        restored: Whether the server goes on from one: servers count updates from their own start.
    """

    def __init__(self, every: int, restored: bool) -> None:
        self._every = every
        self._next = every if restored else 0  # The first is of the values that training begins with.
        self._failures = 0  # one after the other
        self._updates = 0  # at the one that is being written
        self._writing = False

    def after(self, updates: int, store: Store) -> Save | None:
        """A snapshot to be written, if enough updates have been made since the last.

        Args:
            updates: Updates so far of all parameters.
            store: What to write.
        """
        if not self._every or updates < self._next or self._writing or min(store.versions.values(), default=-1) < 0:
            return None
        self._writing = True
        self._updates = updates
        self._next = updates + self._every
        return Save(_copied(store.contents()))

    def written(self, whole: bool) -> None:
        """The one that was begun last is on the disk, or could not be written."""
        self._writing = False
        self._failures = 0 if whole else self._failures + 1
        if not whole:
            self._next = self._updates + self._every * min(2**self._failures, LONGEST_PAUSE)


def _copied(value: Any) -> Any:
    """The same with tensors of its own."""
    if isinstance(value, dict):
        return {key: _copied(entry) for key, entry in value.items()}
    return value.clone() if isinstance(value, Tensor) else value
