"""Which workers a server has not heard of yet that goes on from a snapshot, or begins to lead."""

from collections.abc import Collection

PATIENCE_SECONDS = 2.0  # for workers that do not say where they are: those that have left do not


class RollCall:
    """Held by a server that does not know who is at which step: nobody may go on before all have said it."""

    def __init__(self) -> None:
        self._begins = False
        self._absent: set[int] = set()
        self._until: float | None = None

    def begin(self) -> None:
        """Wait for all workers of the view that comes next."""
        self._begins = True

    def call(self, workers: Collection[int]) -> None:
        """Wait for some workers, and for nobody else."""
        self._absent = set(workers)
        self._until = None

    def follow(self, workers: Collection[int]) -> None:
        """Go on with another view: wait no longer for workers that are gone."""
        if self._begins:
            self._begins = False
            self._absent = set(workers)
        self._absent &= set(workers)

    def here(self, worker: int) -> None:
        """A worker has said where it is."""
        self._absent.discard(worker)

    def expire(self, now: float) -> bool:
        """Whether those who have not said it have just had time enough."""
        if not self._absent:
            return False
        if self._until is None:
            self._until = now + PATIENCE_SECONDS
        if now < self._until:
            return False
        self._absent.clear()
        return True

    def stopped(self, seconds: float) -> None:
        """This process was stopped for so long, and maybe all others: that was no time to say it."""
        if self._until is not None:
            self._until += seconds

    @property
    def complete(self) -> bool:
        """Whether nobody is waited for."""
        return not self._absent
