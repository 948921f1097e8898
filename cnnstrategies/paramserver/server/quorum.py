"""Steps that do not wait for all workers: who has come too late.

Chen et al. 2016, "Revisiting Distributed Synchronous SGD": with backup workers a step is made of the gradients that
come first, and those that come later are dropped. A worker is told so with the values that it gets.
"""

from collections.abc import Collection


class Attendance:
    """Who has taken part in the last common steps, as far as one server has heard of their decisions."""

    def __init__(self) -> None:
        self._since = self._next = 0  # The decisions of the steps between are known.
        self._last: dict[int, int] = {}

    def note(self, step: int, members: Collection[int]) -> None:
        """A step is decided."""
        if step not in (self._next - 1, self._next):
            self._since = step
        self._next = step + 1
        self._last.update(dict.fromkeys(members, step))

    def missed(self, worker: int, step: int) -> bool:
        """Whether a step is known to have been made without a worker."""
        return self._since <= step < self._next and self._last.get(worker, -1) < step
