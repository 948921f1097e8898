"""The coordinator's side of collectives.

Collectives are numbered rounds; each is complete when every worker of the group has contributed.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from cnnstrategies.paramserver.coordinator.dispatch import Dispatcher
from cnnstrategies.paramserver.coordinator.roster import WRITER, Member, Roster
from cnnstrategies.paramserver.coordinator.settings import WORKER
from cnnstrategies.paramserver.core.node import Buffer, Message, Peer
from cnnstrategies.paramserver.core.requests import DONE

# collective of all workers after a boundary that admitted workers: with it the admitted workers begin
ADMITTED = "admitted"
# field of the answer to a worker that is admitted after a boundary: number of the boundary's collective
MIDWAY = "midway"
UNEVEN = (
    "one worker has ended an epoch, or training, that another worker continues; give all workers the same number of "
    "batches, and stop all workers at the same step (trainer.should_stop)"
)
MOST_NAMED = 4


class CollectiveWait(NamedTuple):
    """Members that wait, and the members for which they wait.

    Attributes:
        operation: Name of the collective, or of the step, in which the members wait.
        waiting: Names of the members that wait.
        others: Names of the members that have not come yet.
    """

    operation: str
    waiting: tuple[str, ...]
    others: tuple[str, ...]

    def __str__(self) -> str:
        return f"{abbreviated(self.waiting)} in `{self.operation}` for {abbreviated(self.others)}"


def abbreviated(names: Sequence[str]) -> str:
    """Return the first names as text, with the number of the remaining names."""
    remaining = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {remaining} more" if remaining > 0 else "")


class _Contribution(NamedTuple):
    peer: Peer
    request: int
    sequence: int
    operation: str
    frames: Sequence[Buffer]
    midway: bool  # whether the worker may be admitted after a boundary


@dataclass
class _Result:
    sequence: int
    ids: list[int]
    sizes: list[int]
    view: int = 0
    frames: list[Buffer] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)
    midway: int | None = None  # the boundary after which workers are admitted; they receive its contents later

    def message(self, request: int, joined: bool) -> Message:
        fields = {"sequence": self.sequence, "ids": self.ids, "sizes": self.sizes, "joined": joined}
        if self.midway is not None:
            fields[MIDWAY] = self.midway
        return Message(DONE, {**fields, "view": self.view, "admitted": self.admitted}, self.frames, request)


class Rounds:
    """The collectives of a run, one after the other.

    A collective that seals ends the set-up: from then on views name the workers. At a boundary the workers that have
    arrived since the last boundary are admitted to the group. If worker 0 is lost, the boundary waits for it, because
    otherwise the other workers could finish before worker 0 is back. The results of sealing collectives and of
    boundaries wait until all servers have seen the view that they lead to.

    A joiner is not one of the run's original workers. It takes part neither in the run's set-up nor in the collectives
    at the end of an epoch. A joiner may also be admitted after a boundary, as long as the others have not met since
    then; it receives the results of that boundary. An original worker may be admitted in the same way if it says so,
    after a boundary that admitted no workers.

    Attributes:
        sequence: Number of complete collectives.
    """

    def __init__(self, roster: Roster, dispatcher: Dispatcher, answer: Callable[[Peer, Message], None]) -> None:
        self._roster = roster
        self._dispatcher = dispatcher
        self._answer = answer
        self.sequence = 0
        self._log: dict[int, _Result] = {}
        self._pending: dict[int, _Contribution] = {}
        self._flags: tuple[bool, bool] = (False, False)
        self._joiners: dict[int, _Contribution] = {}
        self._boundary: _Result | None = None  # the last boundary
        self._operation = ""  # the last operation
        self._held_results: list[tuple[_Result, list[tuple[_Contribution, bool]]]] = []
        # The last result sent to each worker; a worker that asks again receives it again.
        self._sent: dict[int, tuple[_Contribution, _Result, bool]] = {}

    def collect(self, member: Member, message: Message) -> str | None:
        """Take a worker's contribution. Return the reason why the run cannot go on, if it cannot."""
        sequence, operation = message.integer("sequence"), message.string("operation")
        seal, boundary = message.flag("seal"), message.flag("boundary")
        peer, identity = member.peer, member.peer.id
        midway = message.fields.get(MIDWAY) is True
        contribution = _Contribution(peer, message.request, sequence, operation, message.frames, midway)
        if sequence < member.last_collective:
            return None  # The message is late: its sender has that result.
        member.last_collective = sequence
        if identity in self._sent:
            last, result, joined = self._sent[identity]
            if (last.peer, last.sequence) == (peer, sequence):
                self._send_when_seen(result, [(contribution, joined)])
                return None
        if seal and (self._roster.sealed or self._roster.is_joiners_place(WORKER, identity)):
            self._joiners[identity] = contribution
            return self.over
        if sequence in self._log:
            self._send(contribution, self._log[sequence], joined=False)
            return None
        if sequence != self.sequence or identity not in self._roster.group:
            return (
                f"{member} is at collective {sequence}, `{operation}`, but the others are at collective {self.sequence}"
            )
        other = next(iter(self._pending.items()), None)
        if other is not None and other[1].operation != operation:
            return (
                f"worker {other[0]} is at `{other[1].operation}` and worker {identity} at `{operation}`: every "
                f"worker must call the same collectives in the same order; perhaps {UNEVEN}"
            )
        self._pending[identity] = contribution
        self._flags = (seal, boundary)
        self._complete()
        return None

    def go_on(self) -> None:
        """Continue with everything that may have become possible after a change."""
        self._complete()
        self._admit_midway()
        held, self._held_results = self._held_results, []
        for result, replies in held:
            self._send_when_seen(result, replies)

    @property
    def over(self) -> str | None:
        """The reason why no worker can be admitted any more, if workers wait for admission."""
        if self._joiners and not self._roster.group:
            names = ", ".join(_workers(self._joiners))
            return f"training is over: no worker is left that could admit {names}"
        return None

    def forget(self, worker: int) -> None:
        """Remove the contribution of a worker that is gone from the present round."""
        self._joiners.pop(worker, None)
        self._pending.pop(worker, None)
        self._sent.pop(worker, None)

    def _complete(self) -> None:
        """End the present round if no contribution is missing."""
        roster = self._roster
        if len(self._pending) < max(1, len(roster.group)) or not roster.group <= self._pending.keys():
            return
        seal, boundary = self._flags
        if boundary and self._awaited_writer:
            return
        self._operation = next(iter(self._pending.values())).operation
        pending, self._pending = dict(sorted(self._pending.items())), {}
        result = _Result(self.sequence, list(pending), [len(contribution.frames) for contribution in pending.values()])
        result.frames = [frame for contribution in pending.values() for frame in contribution.frames]
        self.sequence += 1
        replies = [(contribution, False) for contribution in pending.values()]
        if not roster.sealed:
            self._log[result.sequence] = result
        if seal:
            roster.sealed = True
        elif boundary and self._joiners:
            roster.group |= self._joiners.keys()
            result.admitted = sorted(self._joiners)
            replies += [(contribution, True) for contribution in self._joiners.values()]
            self._joiners = {}
        if seal or result.admitted:
            roster.publish()
        if seal or boundary:
            result.view = roster.number
        if boundary:
            self._boundary = result
            self._dispatcher.mark_boundary()
        self._send_when_seen(result, replies)

    def _admit_midway(self) -> None:
        """Admit workers after the last boundary, if the others have not met since and the workers get samples."""
        boundary, roster = self._boundary, self._roster
        if not self._joiners or boundary is None or self._pending or self._held_results:
            return
        # Workers that were admitted at the boundary begin first, with one more collective of all workers.
        since = self.sequence - 1 - boundary.sequence
        if since != bool(boundary.admitted) or (since and self._operation != ADMITTED):
            return
        newcomers = [worker for worker in self._joiners if roster.is_joiners_place(WORKER, worker)]
        returned = [
            worker
            for worker, contribution in self._joiners.items()
            if worker not in newcomers and contribution.midway and not since
        ]
        returned = [worker for worker in returned if self._dispatcher.may_join(worker)]
        admitted = sorted(newcomers + returned)
        if not admitted or not self._dispatcher.can_spare(roster.original_workers.union(returned), bool(newcomers)):
            return
        joiners = {worker: self._joiners.pop(worker) for worker in admitted}
        roster.group |= joiners.keys()
        roster.publish()
        result = replace(boundary, sequence=self.sequence - 1, view=roster.number)
        result.admitted, result.midway = admitted, boundary.sequence
        self._send_when_seen(result, [(contribution, True) for contribution in joiners.values()])

    def _send_when_seen(self, result: _Result, replies: list[tuple[_Contribution, bool]]) -> None:
        """Send a result now, or keep it until the servers have seen the view that it leads to."""
        if result.view and self._roster.not_seen(result.view):
            self._held_results.append((result, replies))
            return
        for contribution, joined in replies:
            self._send(contribution, result, joined)

    def _send(self, contribution: _Contribution, result: _Result, joined: bool) -> None:
        peer = contribution.peer
        last, *_ = self._sent.get(peer.id, (contribution,))
        # A held result may be sent after the worker has received it by another way and has gone on to the next
        # collective.
        if last.peer != peer or last.sequence <= contribution.sequence:
            self._sent[peer.id] = contribution, result, joined
        self._answer(peer, result.message(contribution.request, joined))

    # Waits

    @property
    def view(self) -> int:
        """The first view that all servers must see before a held result is sent; 0 if no result is held."""
        return self._held_results[0][0].view if self._held_results else 0

    @property
    def _awaited_writer(self) -> list[int]:
        """Worker 0, if it is lost and not back yet."""
        present = self._roster.group | self._joiners.keys()
        return [] if WRITER in present or self._roster.has_left(WRITER) else [WRITER]

    @property
    def waits(self) -> list[CollectiveWait]:
        """The present waits: which members wait in which collective, and for which other members."""
        group = _workers(self._roster.group)
        waits = []
        if self._pending:
            operation = next(iter(self._pending.values())).operation
            waiting = _workers(self._pending)
            present = set(waiting)
            absent = [name for name in group if name not in present]
            absent += _workers(self._awaited_writer) if self._flags[1] else ()
            waits.append(CollectiveWait(operation, waiting, tuple(absent)))
        if self._joiners:
            waits.append(CollectiveWait("join", _workers(self._joiners), group))
        for result, replies in self._held_results:
            waiting = tuple(str(contribution.peer) for contribution, _ in replies)
            waits.append(CollectiveWait(replies[0][0].operation, waiting, tuple(self._roster.not_seen(result.view))))
        return waits

    def deadlock(self) -> list[CollectiveWait]:
        """Return the waits that keep each other from ending, if there are any.

        Some workers wait in a collective while others, before they come to it, need a step from the waiting workers.
        """
        figures = {member.peer.id: member.figures for member in self._roster.members if member.peer.role == WORKER}
        pushed = {worker: figures[worker]["pushed"] for worker in self._pending if "pushed" in figures.get(worker, {})}
        least = min(pushed.values(), default=math.inf)
        absent = self._roster.group - self._pending.keys()
        ahead = _workers(worker for worker in absent if figures.get(worker, {}).get("needs", 0) > least)
        last = _workers(worker for worker, count in pushed.items() if count == least)
        return [self.waits[0], CollectiveWait(f"step {least:.0f}", ahead, last)] if ahead else []


def _workers(numbers: Iterable[int]) -> tuple[str, ...]:
    return tuple(f"{WORKER} {number}" for number in sorted(numbers))
