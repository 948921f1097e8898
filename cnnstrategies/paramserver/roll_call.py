"""Which workers a server that goes on from a snapshot has not heard of yet."""

import time
from collections.abc import Collection

PATIENCE_SECONDS = 2.0  # for workers that do not say where they are: those that have left do not


class RollCall:
    """Held by a server that does not know who is at which step: nobody may go on before all have said it."""

    def __init__(self) -> None:
        self._begins = False
        self._absent: set[int] = set()
        self._until = 0.0

    def begin(self) -> None:
        """Wait for all workers of the view that comes next."""
        self._begins = True

    def follow(self, workers: Collection[int]) -> None:
        """Go on with another view: wait no longer for workers that are gone."""
        if self._begins:
            self._begins = False
            self._absent = set(workers)
            self._until = time.monotonic() + PATIENCE_SECONDS
        self._absent &= set(workers)

    def here(self, worker: int) -> None:
        """A worker has said where it is."""
        self._absent.discard(worker)

    @property
    def complete(self) -> bool:
        """Whether all have, or have had time enough."""
        return not self._absent or time.monotonic() > self._until
