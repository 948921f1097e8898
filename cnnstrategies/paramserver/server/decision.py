"""Agreement of the servers on a common step: the clock, the servers' reports to the leader, and the leader's decision.

The clock knows how many workers to expect at the start of the run. No worker may go on until all these workers have
joined or died. A server that starts late begins a roll call, because it does not know the workers' steps.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cnnstrategies.paramserver.core.node import Message, StateTable
from cnnstrategies.paramserver.core.view import View
from cnnstrategies.paramserver.messages import InvalidMessageError
from cnnstrategies.paramserver.optimizers import check_options
from cnnstrategies.paramserver.server.store import MemberKey
from cnnstrategies.paramserver.specification import STEP_CLIP_NORM, STEP_CLIP_VALUE, Options, Specification

# Longest time, in seconds, that a roll call waits for the workers to report their steps. Without this limit, a roll
# call would wait forever for a worker that has left.
PATIENCE_SECONDS = 2.0


@dataclass(frozen=True)
class Decision:
    """The leader's decision about a step, which the leader sends to all servers.

    Attributes:
        step: Number of the step.
        members: Ids and incarnations of the workers whose gradients make up the step. A process that replaces a dead
            member has a different incarnation, so the pushes of the new process do not count for this step.
        options: Hyperparameters of the step.
        scale: Clipping factor. The mean gradient is multiplied by it, so that the global norm is at most `clip_norm`.
            None as long as the norm is not known; 1 in a step without clipping by norm.
    """

    step: int
    members: tuple[MemberKey, ...]
    options: Options
    scale: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return this decision as a dictionary that JSON can represent."""
        return {"step": self.step, "who": self.members, "options": self.options, "scale": self.scale}

    @classmethod
    def from_message(cls, message: Message, specification: Specification) -> "Decision":
        """Return the decision in a message from another server.

        Raises:
            InvalidMessageError: The decision has no clipping factor, although the step is not clipped by norm and the
                factor must therefore be 1.
            ControlError: A field is missing or has the wrong type.
        """
        members = tuple((worker, incarnation) for worker, incarnation in message.table("who", int, int))
        scale = None if message.fields.get("scale") is None else message.real("scale")
        options = check_options(message.fields.get("options"), specification.groups)
        if scale is None and clipping(specification, options)[0] is None:
            raise InvalidMessageError(
                "the decision has no clipping factor; in a step that is not clipped by norm, the factor must be 1"
            )
        return cls(message.integer("step"), members, options, scale)


def clipping(specification: Specification, options: Options) -> tuple[float | None, float | None]:
    """Return the largest norm, and the largest absolute value of an element, of a step's mean gradient.

    Args:
        specification: The run's specification.
        options: Hyperparameters of the step.
    """
    if not specification.clips_each_step:
        return specification.clip_norm, specification.clip_value
    return options[0][STEP_CLIP_NORM] or None, options[0][STEP_CLIP_VALUE] or None


class StepState(StrEnum):
    """States of the last decided common step on a server.

    Attributes:
        UNDECIDED: This server does not know any decision yet.
        MEASURED: The members are decided. The servers measure the norm of the mean gradient, and this server has not
            sent its part.
        REPORTED: This server has sent its part of the norm to the leader, which has not decided the clipping factor.
        SCALED: The members and the clipping factor are decided, so slices are updated.
    """

    UNDECIDED = "undecided"
    MEASURED = "measured"
    REPORTED = "reported"
    SCALED = "scaled"


class StepEvent(StrEnum):
    """Events that change the state of a common step.

    Attributes:
        HAS_MEMBERS: A decision about a later step has arrived, without a clipping factor.
        HAS_FACTOR: A decision with a clipping factor has arrived. Without clipping by norm every decision has one.
        SENDS_NORM: This server sends its part of the norm.
        BEGINS_AGAIN: The leader may lack this server's part of the norm, or the primaries of slices have changed.
    """

    HAS_MEMBERS = "has members"
    HAS_FACTOR = "has factor"
    SENDS_NORM = "sends norm"
    BEGINS_AGAIN = "begins again"


UNDECIDED, MEASURED, REPORTED, SCALED = StepState
HAS_MEMBERS, HAS_FACTOR, SENDS_NORM, BEGINS_AGAIN = StepEvent
COMMON_STEP = StateTable(
    "common step",
    UNDECIDED,
    {
        UNDECIDED: {HAS_MEMBERS: MEASURED, HAS_FACTOR: SCALED, BEGINS_AGAIN: UNDECIDED},
        MEASURED: {HAS_MEMBERS: MEASURED, HAS_FACTOR: SCALED, SENDS_NORM: REPORTED, BEGINS_AGAIN: MEASURED},
        REPORTED: {HAS_MEMBERS: MEASURED, HAS_FACTOR: SCALED, BEGINS_AGAIN: MEASURED},
        SCALED: {HAS_MEMBERS: MEASURED, HAS_FACTOR: SCALED, BEGINS_AGAIN: SCALED},
    },
)


class CommonStep:
    """The last decided common step, as a server knows it.

    Attributes:
        state: State of the step; see `COMMON_STEP`.
        decision: The last decision; None before the first decision.
        squares: Leader only. By server id: squared norm of the server's mean gradient.
    """

    def __init__(self) -> None:
        self.state = COMMON_STEP.start
        self.decision: Decision | None = None
        self.squares: dict[int, float] = {}

    def accept(self, decision: Decision) -> bool:
        """Replace the decision by a newer decision. Return whether it is newer.

        A decision about a later step is newer. A decision about the same step is newer if it contains the clipping
        factor, and the known decision does not.
        """
        known = self.decision
        if known is not None and (decision.step, decision.scale is not None) <= (known.step, known.scale is not None):
            return False
        if known is None or decision.step > known.step:
            self.squares.clear()
        self.happen(StepEvent.HAS_MEMBERS if decision.scale is None else StepEvent.HAS_FACTOR)
        self.decision = decision
        return True

    def happen(self, event: StepEvent) -> None:
        """Change the state after an event."""
        self.state = COMMON_STEP.after(self.state, event)


class Leadership:
    """The servers of the current view, and their leader, which is the oldest server.

    Args:
        server: Id of this server.
        holders: For each slice: ids of the servers that hold it, alive or dead.

    Attributes:
        server: Id of this server.
        leader: Id of the leader.
        servers: Ids of the servers of the view.
        view: Number of the view; -1 before the first view.
        lacks_a_holder: Whether there is a slice that no live server holds.
    """

    def __init__(self, server: int, holders: Iterable[Collection[int]]) -> None:
        self.server = self.leader = server
        self.servers: frozenset[int] = frozenset()
        self.view = -1
        self.lacks_a_holder = False  # The value is stored because it is needed for every vote.
        self._holders = set(map(frozenset, holders))

    @property
    def leads(self) -> bool:
        """Whether this server is the leader."""
        return self.leader == self.server

    def follow(self, view: View) -> bool:
        """Act on a new view. Return whether this server has become the leader."""
        led = self.leads and self.view >= 0
        self.view = view.number
        self.servers = frozenset(server.id for server in view.servers)
        self.lacks_a_holder = not all(holders & self.servers for holders in self._holders)
        self.leader = min(((view.age(server), server.id) for server in view.servers), default=(0, self.server))[1]
        return self.leads and not led


Entry = tuple[int, int]
"""A step and the id of a worker whose pushes of this step are complete on the server that reports the entry."""


class Reports:
    """The servers' reports to the leader about the workers whose pushes are complete, under the current view.

    The time to add a report depends only on the length of the report, and not on the number of workers.

    Args:
        alone: Whether one server's report about a worker is enough. This is so for pipelined steps, in which only the
            leader reports workers. Otherwise every server must report the worker.

    Attributes:
        lowest: By server id: the server's first unfinished step, as it has reported.
    """

    def __init__(self, alone: bool = False) -> None:
        self.lowest: dict[int, int] = {}
        self._alone = alone
        self._servers = 0  # number of servers in the view
        self._silent: set[int] = set()  # ids of the servers that have not reported under this view
        # By step and worker: ids of the servers that have reported the worker's pushes of the step as complete.
        self._servers_by_entry: dict[Entry, set[int]] = {}
        # By step: ids of the workers whose pushes of the step have arrived at all servers.
        self._complete: dict[int, set[int]] = {}

    def follow(self, servers: Collection[int]) -> None:
        """Drop all reports because the view has changed. Every server must report again.

        Args:
            servers: Ids of the servers of the new view.
        """
        self._servers = len(servers)
        self._silent = set(servers)
        self.lowest.clear()
        self._servers_by_entry.clear()
        self._complete.clear()

    def add(self, server: int, complete: Collection[Entry]) -> None:
        """Add a server's report.

        Args:
            server: Id of the server, which must be in the view.
            complete: Pairs of a step and the id of a worker whose pushes of this step are now complete on the server.
        """
        self._silent.discard(server)
        for step, worker in complete:
            servers = self._servers_by_entry.setdefault((step, worker), set())
            servers.add(server)
            if self._alone or len(servers) == self._servers:
                self._complete.setdefault(step, set()).add(worker)

    def complete(self, step: int) -> Set[int] | None:
        """Return the ids of the workers whose pushes of a step have arrived at all servers.

        Return None as long as a server of the current view has not sent a report under this view.
        """
        return None if self._silent else self._complete.get(step, frozenset())

    def forget_before(self, step: int) -> None:
        """Drop the reports about all steps with a number below `step`."""
        self._servers_by_entry = {
            entry: servers for entry, servers in self._servers_by_entry.items() if entry[0] >= step
        }
        self._complete = {key: workers for key, workers in self._complete.items() if key >= step}


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
            now: The current time, in seconds. Pauses in which this process was stopped do not count, because workers
                may have been stopped together with this process, for example if the machine was suspended.

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

    @property
    def complete(self) -> bool:
        """Whether all workers have reported their steps, or the time for their reports is over."""
        return not self._absent
