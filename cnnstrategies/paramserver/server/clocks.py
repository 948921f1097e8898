"""Who may go on when: the state machines of the modes, without sockets.

Each clock counts on some workers of the run's start (`expected`): until they have come, or have died, nobody goes on.
"""

from collections import Counter
from collections.abc import Collection, Mapping

PATIENCE_SECONDS = 2.0  # for workers that do not say where they are: those that have left do not


class SyncClock:
    """Steps that all members make together.

    The present one, `step`, is not decided yet.

    Args:
        per_node: Workers of a node, of which one speaks for all: it has come with the first, and is gone with the last.
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
        """All workers that have joined."""
        return frozenset(self._first)

    def _count(self) -> None:
        self.members = frozenset(worker for worker, first in self._first.items() if first <= self.step)

    def join(self, worker: int, first: int | None = None) -> int:
        """Count a worker from a step on; by default from the present one. The same again changes nothing."""
        if worker not in self._first or (first is not None and first > self._first[worker]):
            self._first[worker] = self.step if first is None else first
            self._count()
        return max(self._first[worker], self.step)

    def all_after(self, step: int) -> bool:
        """Whether all workers are past a step, or begin after it."""
        return all(first > step for first in self._first.values())

    def any_after(self, step: int) -> bool:
        """Whether a worker begins after a step."""
        return any(first > step for first in self._first.values())

    def leave(self, worker: int) -> None:
        """Count a worker no longer."""
        self._gone.add(worker)
        self._first.pop(worker, None)
        self._count()

    def ready(self, complete: Collection[int]) -> frozenset[int] | None:
        """The workers that make up the present step, if all their pushes have come; else None."""
        members = self.members
        if not members or len(complete) < len(members):  # Asked for each vote: the common answer costs nothing.
            return None
        return members if (self.step > 0 or self._all_have_come) and members.issubset(complete) else None

    @property
    def _all_have_come(self) -> bool:
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
    """Clocks of workers that run on their own: async, or stale synchronous parallel (Ho et al., NeurIPS 2013).

    Nobody may be ahead of the slowest by more steps than the staleness, if there is one.
    """

    def __init__(self, staleness: int | None, expected: int = 0) -> None:
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
    def expects(self) -> bool:
        """Whether some of the run's start have not come."""
        return len(self._seen) < self._expected

    @property
    def slowest(self) -> int:
        """The smallest clock; without workers that of the last one to leave."""
        if self.expects:
            return 0
        return min(self._clocks.values(), default=self._last)

    def join(self, worker: int, clock: int | None = None) -> int:
        """Count a worker, by default from where the slowest is; a clock only ever moves forward."""
        if clock:
            self._expected = 0  # The run has begun: a server that replaces another need not meet all who began it.
        if worker not in self._clocks:
            self._clocks[worker] = self.slowest if clock is None else clock
            self._note(worker)
        elif clock is not None:
            self.finished(worker, clock)
        return self._clocks[worker]

    def finished(self, worker: int, clock: int) -> None:
        """A worker has finished `clock` steps."""
        if worker in self._clocks:
            self._clocks[worker] = max(clock, self._clocks[worker])

    def leave(self, worker: int) -> None:
        """Wait for a worker no longer, even if it has not come yet."""
        self._note(worker)
        clock = self._clocks.pop(worker, None)
        if clock is not None:
            self._last = max(self._last, clock)

    def _note(self, worker: int) -> None:
        if worker < self._expected:  # Others join the run, and stand for none of its own.
            self._seen.add(worker)

    def may_start(self, clock: int) -> bool:
        """Whether a worker that has finished `clock` steps may begin the next."""
        return self._staleness is None or clock - self.slowest <= self._staleness


class RollCall:
    """Held by a server that does not know who is at which step: nobody may go on before all have said it.

    Attributes:
        lives: The incarnation of each worker of the view.
    """

    def __init__(self, expected: int = 0) -> None:
        self.incarnations: Mapping[int, int] = {}
        self._expected = expected
        self._absent: set[int] = set()
        self._until: float | None = None

    def call(self, workers: Collection[int]) -> None:
        """Wait for some workers, and for nobody else."""
        self._absent = set(workers)
        self._until = None

    def follow(self, incarnations: Mapping[int, int]) -> list[int]:
        """Go on with another view's workers: those that are waited for no longer."""
        gone = [worker for worker, incarnation in self.incarnations.items() if incarnations.get(worker) != incarnation]
        if incarnations:  # Those of the start that are not in the first of these views have died before.
            gone += set(range(self._expected)) - incarnations.keys()
            self._expected = 0
        self.incarnations = incarnations
        self._absent &= incarnations.keys()
        return gone

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
