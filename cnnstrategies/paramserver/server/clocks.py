"""State machines that say which worker may go on, one for each kind of mode; they use no sockets.

Each clock expects a number of workers at the run's start (`expected`): nobody goes on until all of them have joined or
died.
"""

from collections import Counter
from collections.abc import Collection, Mapping

PATIENCE_SECONDS = 2.0  # how long a server waits for workers' reports of their steps: workers that have left send none


class SyncClock:
    """Clock of steps that all members make together.

    Args:
        expected: Number of nodes at the run's start.
        per_node: Number of workers on a node where one worker pushes for all of them. The node has joined once its
            first worker has joined, and is gone once all its workers are gone.

    Attributes:
        step: The present step, which is not decided yet.
        members: Ids of the workers that take part in the present step.
    """

    def __init__(self, expected: int, per_node: int = 1) -> None:
        self.step = 0
        self.members: frozenset[int] = frozenset()
        self._expected = expected
        self._per_node = per_node
        self._first: dict[int, int] = {}
        self._gone: set[int] = set()

    @property
    def known(self) -> frozenset[int]:
        """The ids of all workers that have joined."""
        return frozenset(self._first)

    def _count(self) -> None:
        self.members = frozenset(worker for worker, first in self._first.items() if first <= self.step)

    def join(self, worker: int, first: int | None = None) -> int:
        """Count a worker from step `first` on, by default from the present step. Return the step with which it begins.

        A second call with the same arguments changes nothing.
        """
        if worker not in self._first or (first is not None and first > self._first[worker]):
            self._first[worker] = self.step if first is None else first
            self._count()
        return max(self._first[worker], self.step)

    def all_after(self, step: int) -> bool:
        """Whether every worker begins after a step."""
        return all(first > step for first in self._first.values())

    def any_after(self, step: int) -> bool:
        """Whether at least one worker begins after a step."""
        return any(first > step for first in self._first.values())

    def leave(self, worker: int) -> None:
        """Stop counting a worker."""
        self._gone.add(worker)
        self._first.pop(worker, None)
        self._count()

    def ready(self, complete: Collection[int]) -> frozenset[int] | None:
        """Return the members of the present step, if the pushes of all of them are complete; else None.

        Args:
            complete: Ids of the workers whose pushes of the present step are complete.
        """
        members = self.members
        # This runs for each vote, so the most frequent case comes first.
        if not members or len(complete) < len(members):
            return None
        return members if (self.step > 0 or self._all_have_joined) and members.issubset(complete) else None

    @property
    def _all_have_joined(self) -> bool:
        gone = Counter(worker // self._per_node for worker in self._gone)
        nodes = {worker // self._per_node for worker in self._first}
        nodes |= {node for node, workers in gone.items() if workers == self._per_node}
        return len(nodes) >= self._expected

    def decide(self, step: int) -> None:
        """Note that a step is decided, here or by another server."""
        if step >= self.step:
            self.step = step + 1
            self._count()


class StaleClock:
    """Clock of workers that make steps independently: async, or stale synchronous parallel (Ho et al., NeurIPS 2013).

    A worker may be ahead of the slowest worker by at most `staleness` steps, without limit if `staleness` is None.
    """

    def __init__(self, staleness: int | None, expected: int = 0) -> None:
        self._staleness = staleness
        self._expected = expected
        self._seen: set[int] = set()
        self._last = 0
        self._clocks: dict[int, int] = {}

    @property
    def known(self) -> frozenset[int]:
        """The ids of all workers that have joined."""
        return frozenset(self._clocks)

    @property
    def expects(self) -> bool:
        """Whether some workers of the run's start have not joined."""
        return len(self._seen) < self._expected

    @property
    def slowest(self) -> int:
        """The smallest clock; without workers, the largest clock of the workers that have left."""
        if self.expects:
            return 0
        return min(self._clocks.values(), default=self._last)

    def join(self, worker: int, clock: int | None = None) -> int:
        """Count a worker, by default with the clock of the slowest one; a clock never goes back.

        Returns the worker's clock.
        """
        if clock:
            # The run has begun. A server that replaces another one may never hear of some workers of the run's start.
            self._expected = 0
        if worker not in self._clocks:
            self._clocks[worker] = self.slowest if clock is None else clock
            self._note(worker)
        elif clock is not None:
            self.finished(worker, clock)
        return self._clocks[worker]

    def finished(self, worker: int, clock: int) -> None:
        """Note that a worker has finished `clock` steps."""
        if worker in self._clocks:
            self._clocks[worker] = max(clock, self._clocks[worker])

    def leave(self, worker: int) -> None:
        """Stop counting a worker, and do not wait for it if it has not joined yet."""
        self._note(worker)
        clock = self._clocks.pop(worker, None)
        if clock is not None:
            self._last = max(self._last, clock)

    def _note(self, worker: int) -> None:
        if worker < self._expected:  # Joiners are additional members; they do not replace a worker of the original set.
            self._seen.add(worker)

    def may_start(self, clock: int) -> bool:
        """Whether a worker that has finished `clock` steps may begin the next step."""
        return self._staleness is None or clock - self.slowest <= self._staleness


class RollCall:
    """Roll call at a server that does not know the steps of all workers: all must report before any may go on.

    Args:
        expected: Number of workers at the run's start.

    Attributes:
        incarnations: The incarnation of each worker of the view.
    """

    def __init__(self, expected: int = 0) -> None:
        self.incarnations: Mapping[int, int] = {}
        self._expected = expected
        self._absent: set[int] = set()
        self._until: float | None = None

    def call(self, workers: Collection[int]) -> None:
        """Wait for the given workers, and for no others."""
        self._absent = set(workers)
        self._until = None

    def follow(self, incarnations: Mapping[int, int]) -> list[int]:
        """Follow another view. Return the workers that are gone, and are therefore not waited for."""
        gone = [worker for worker, incarnation in self.incarnations.items() if incarnations.get(worker) != incarnation]
        # Workers of the run's start that are missing in the first view with workers have died before it.
        if incarnations:
            gone += set(range(self._expected)) - incarnations.keys()
            self._expected = 0
        self.incarnations = incarnations
        self._absent &= incarnations.keys()
        return gone

    def note_position(self, worker: int) -> None:
        """Note that a worker has reported its step."""
        self._absent.discard(worker)

    def expire(self, now: float) -> bool:
        """Whether the time for missing reports has just run out; the missing workers are then no longer waited for.

        The time begins with the first call after :meth:`call`.
        """
        if not self._absent:
            return False
        if self._until is None:
            self._until = now + PATIENCE_SECONDS
        if now < self._until:
            return False
        self._absent.clear()
        return True

    def extend(self, seconds: float) -> None:
        """Give missing workers more time after this process was stopped: the others may have been stopped with it.

        Args:
            seconds: How long this process was stopped.
        """
        if self._until is not None:
            self._until += seconds

    @property
    def complete(self) -> bool:
        """Whether no report is missing."""
        return not self._absent
