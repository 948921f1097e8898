"""Clocks that determine which workers may begin their next step, and the roll call of a server that starts late.

:class:`SyncClock` is for steps that all workers make together: modes sync and local, and ssp with staleness 0.
:class:`StaleClock` is for steps that workers make independently: mode async, and ssp with a staleness above 0. At the
start of the run, a clock knows how many workers to expect. No worker may go on until all these workers have joined or
died.
"""

from collections import Counter
from collections.abc import Collection, Mapping

# Longest time, in seconds, that a roll call waits for the workers to report their steps. Without this limit, a roll
# call would wait forever for a worker that has left.
PATIENCE_SECONDS = 2.0


class SyncClock:
    """Clock of steps that all workers make together.

    Args:
        expected: Number of nodes at the start of the run. If each worker pushes its own gradients, every worker counts
            as a node.
        per_node: Number of workers of each node. If this number is above 1, one worker of a node pushes for the whole
            node. The node has joined once any of its workers has joined, and is gone once all its workers are gone.

    Attributes:
        step: The current step: the first step about which the leader has not made a decision.
        members: Ids of the workers that take part in the current step.
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
        """Ids of all workers that have joined, and have neither left nor died."""
        return frozenset(self._first)

    def _count(self) -> None:
        self.members = frozenset(worker for worker, first in self._first.items() if first <= self.step)

    def join(self, worker: int, first: int | None = None) -> int:
        """Add a worker. A second call with the same arguments has no effect.

        Args:
            worker: Id of the worker.
            first: The first step in which the worker takes part; None for the current step.

        Returns the step with which the worker begins.
        """
        if worker not in self._first or (first is not None and first > self._first[worker]):
            self._first[worker] = self.step if first is None else first
            self._count()
        return max(self._first[worker], self.step)

    def all_after(self, step: int) -> bool:
        """Return whether all workers begin with steps after `step`, so that no worker takes part in `step`."""
        return all(first > step for first in self._first.values())

    def any_after(self, step: int) -> bool:
        """Return whether at least one worker begins with a step after `step`."""
        return any(first > step for first in self._first.values())

    def leave(self, worker: int) -> None:
        """Remove a worker that has left or died. The decision about the first step no longer waits for this worker."""
        self._gone.add(worker)
        self._first.pop(worker, None)
        self._count()

    def ready(self, complete: Collection[int]) -> frozenset[int] | None:
        """Return the ids of the current step's members, if the step can be decided. Return None otherwise.

        The step can be decided once the pushes of all its members are complete. The first step also waits until all
        expected nodes have joined or died.

        Args:
            complete: Ids of the workers whose pushes of the current step are complete.
        """
        members = self.members
        # This method is called for each vote. Most calls return after this cheap check, so it comes first.
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
        """Record the leader's decision about a step. The step after it becomes the current step.

        If the current step is already later, nothing changes.
        """
        if step >= self.step:
            self.step = step + 1
            self._count()


class StaleClock:
    """Clock of workers that make steps independently, in mode async or ssp.

    The clock of a worker is the number of steps that the worker has finished. Mode ssp is the "stale synchronous
    parallel" method (Ho et al., NeurIPS 2013).

    Args:
        staleness: Number of steps that a worker may be ahead of the slowest worker; None for no limit.
        expected: Number of workers at the start of the run.
    """

    def __init__(self, staleness: int | None, expected: int = 0) -> None:
        self._staleness = staleness
        self._expected = expected
        self._seen: set[int] = set()
        self._last = 0
        self._clocks: dict[int, int] = {}

    @property
    def known(self) -> frozenset[int]:
        """Ids of all workers that have joined, and have neither left nor died."""
        return frozenset(self._clocks)

    @property
    def expects(self) -> bool:
        """Whether this clock still expects a worker that has not joined yet.

        A worker that has left or died is no longer expected.
        """
        return len(self._seen) < self._expected

    @property
    def slowest(self) -> int:
        """Number of steps that the slowest worker has finished; 0 until all expected workers have joined or died.

        If all workers are gone, this is the largest number of steps that a worker had finished.
        """
        if self.expects:
            return 0
        return min(self._clocks.values(), default=self._last)

    def join(self, worker: int, clock: int | None = None) -> int:
        """Add a worker. If the worker has already joined and its clock is below `clock`, set its clock to `clock`.

        Args:
            worker: Id of the worker.
            clock: Number of steps that the worker has finished; None to give a new worker the slowest worker's clock.

        Returns the worker's clock.
        """
        if clock:
            # The worker has finished steps, so the run has begun. This server may replace another server. It then never
            # receives messages from workers that left before it started, so it stops waiting for expected workers.
            self._expected = 0
        if worker not in self._clocks:
            self._clocks[worker] = self.slowest if clock is None else clock
            self._note(worker)
        elif clock is not None:
            self.finished(worker, clock)
        return self._clocks[worker]

    def finished(self, worker: int, clock: int) -> None:
        """Record that a worker has finished `clock` steps. A lower number than the recorded one has no effect."""
        if worker in self._clocks:
            self._clocks[worker] = max(clock, self._clocks[worker])

    def leave(self, worker: int) -> None:
        """Remove a worker that has left or died. If it has not joined yet, it is no longer expected."""
        self._note(worker)
        clock = self._clocks.pop(worker, None)
        if clock is not None:
            self._last = max(self._last, clock)

    def _note(self, worker: int) -> None:
        if worker < self._expected:  # Joiners have higher ids, and must not count as expected workers.
            self._seen.add(worker)

    def may_start(self, clock: int) -> bool:
        """Return whether a worker that has finished `clock` steps may begin its next step."""
        return self._staleness is None or clock - self.slowest <= self._staleness


class RollCall:
    """A server's wait until every worker has reported its step.

    A server that starts late does not know the workers' steps, so it cannot tell which workers may go on.

    Args:
        expected: Number of workers at the start of the run.

    Attributes:
        incarnations: By worker id: incarnation of the worker in the current view.
    """

    def __init__(self, expected: int = 0) -> None:
        self.incarnations: Mapping[int, int] = {}
        self._expected = expected
        self._absent: set[int] = set()
        self._until: float | None = None

    def call(self, workers: Collection[int]) -> None:
        """Begin a roll call: wait until each of these workers has reported its step. An earlier roll call is dropped.

        Args:
            workers: Ids of the workers.
        """
        self._absent = set(workers)
        self._until = None

    def follow(self, incarnations: Mapping[int, int]) -> list[int]:
        """Act on a new view. Return the ids of the workers that have left or died, or were replaced by a new process.

        Args:
            incarnations: By worker id: incarnation of the worker in the new view.
        """
        gone = [worker for worker, incarnation in self.incarnations.items() if incarnations.get(worker) != incarnation]
        # An expected worker that is missing in the first view with workers died before training began. The id of such a
        # worker is also returned, so that the clock does not wait for the worker.
        if incarnations:
            gone += set(range(self._expected)) - incarnations.keys()
            self._expected = 0
        self.incarnations = incarnations
        self._absent &= incarnations.keys()
        return gone

    def note_position(self, worker: int) -> None:
        """Record a worker's reply: its step, or the report that the worker does not take part in steps."""
        self._absent.discard(worker)

    def expire(self, now: float) -> bool:
        """End the roll call if a worker has not reported within `PATIENCE_SECONDS`.

        The waiting time begins with the first call of this method after :meth:`call`.

        Args:
            now: The current time, in seconds.

        Returns whether this call has ended the roll call.
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
        """Give the workers more time to report, because they may have been stopped together with this process.

        This happens, for example, if the machine was suspended.

        Args:
            seconds: Time for which this process was stopped.
        """
        if self._until is not None:
            self._until += seconds

    @property
    def complete(self) -> bool:
        """Whether all workers have reported their steps, or the time for their reports is over."""
        return not self._absent
