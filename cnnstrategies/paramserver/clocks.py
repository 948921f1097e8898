"""Who may go on when: the state machines of the modes, without sockets."""

from collections.abc import Iterable


class SyncClock:
    """Steps that all members make together.

    Args:
        expected: Workers that step 0 waits for.

    Attributes:
        step: The step that is not decided yet.
        log: Every decided step with its members.
    """

    def __init__(self, expected: int) -> None:
        self.step = 0
        self.log: list[tuple[int, frozenset[int]]] = []
        self._expected = expected
        self._first: dict[int, int] = {}
        self._gone: set[int] = set()

    @property
    def known(self) -> frozenset[int]:
        """All workers that have joined."""
        return frozenset(self._first)

    @property
    def members(self) -> frozenset[int]:
        """The workers of the present step."""
        return frozenset(worker for worker, first in self._first.items() if first <= self.step)

    def join(self, worker: int, first: int | None = None) -> int:
        """Count a worker from a step on; by default from the present one. The same again changes nothing."""
        if worker not in self._first or (first is not None and first > self._first[worker]):
            self._first[worker] = self.step if first is None else first
        return max(self._first[worker], self.step)

    def leave(self, worker: int) -> None:
        """Count a worker no longer."""
        self._gone.add(worker)
        self._first.pop(worker, None)

    def ready(self, complete: Iterable[int]) -> frozenset[int] | None:
        """The workers that make up the present step, or None while one of them is waited for.

        Args:
            complete: Workers whose pushes of the present step have all arrived.
        """
        started = self.step > 0 or len(self._first.keys() | self._gone) >= self._expected
        members = self.members
        return members if started and members and members <= set(complete) else None

    def decide(self, step: int, members: Iterable[int]) -> None:
        """Note that a step is decided, here or by another server."""
        if step >= self.step:
            self.step = step + 1
            self.log.append((step, frozenset(members)))


class StaleClock:
    """Clocks of workers that run on their own: async, or stale synchronous parallel (Ho et al., NeurIPS 2013).

    Args:
        staleness: Steps that a worker may be ahead of the slowest; None for any number.
        expected: Workers of the run's start: until all of them have come, the slowest has finished no step.

    Attributes:
        log: Every change in order: the worker and its clock, the number of steps that it has finished. A worker that
            leaves or dies is logged with clock -1.
    """

    def __init__(self, staleness: int | None, expected: int = 0) -> None:
        self.log: list[tuple[int, int]] = []
        self._staleness = staleness
        self._expected = expected
        self._seen: set[int] = set()
        self._last = 0
        self._clocks: dict[int, int] = {}

    @property
    def known(self) -> frozenset[int]:
        """All workers that have joined."""
        return frozenset(self._clocks)

    @property
    def slowest(self) -> int:
        """The smallest clock; without workers that of the last one to leave."""
        if len(self._seen) < self._expected:
            return 0
        return min(self._clocks.values(), default=self._last)

    def join(self, worker: int, clock: int | None = None) -> int:
        """Count a worker, by default from where the slowest is; a clock only ever moves forward."""
        if clock:
            self._expected = 0  # The run has begun: a server that replaces another need not meet all who began it.
        if worker not in self._clocks:
            self._clocks[worker] = self.slowest if clock is None else clock
            self._seen.add(worker)
            self.log.append((worker, self._clocks[worker]))
        elif clock is not None:
            self.finished(worker, clock)
        return self._clocks[worker]

    def finished(self, worker: int, clock: int) -> None:
        """A worker has finished `clock` steps."""
        if clock > self._clocks.get(worker, clock):
            self._clocks[worker] = clock
            self.log.append((worker, clock))

    def leave(self, worker: int) -> None:
        """Wait for a worker no longer, even if it has not come yet."""
        self._seen.add(worker)
        clock = self._clocks.pop(worker, None)
        if clock is not None:
            self._last = max(self._last, clock)
            self.log.append((worker, -1))

    def may_start(self, clock: int) -> bool:
        """Whether a worker that has finished `clock` steps may begin the next."""
        return self._staleness is None or clock - self.slowest <= self._staleness
