"""The coordinator's side of the workers' collectives.

Here a collective is an operation of the workers through the coordinator: each worker contributes a value, and receives
the values of all workers. The workers that must take part are called the group. A collective is complete once every
worker of the group has contributed. Collectives are numbered. A boundary is a collective between two steps, at which
the workers that wait for admission enter the group.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from cnnstrategies.paramserver.coordinator.contributions import pack
from cnnstrategies.paramserver.coordinator.dispatch import Dispatcher
from cnnstrategies.paramserver.coordinator.places import Member
from cnnstrategies.paramserver.coordinator.roster import WRITER, Roster
from cnnstrategies.paramserver.coordinator.settings import WORKER
from cnnstrategies.paramserver.core.node import Buffer, Message, Peer
from cnnstrategies.paramserver.core.requests import DONE

# Name of the collective that all workers call directly after a boundary that has admitted workers. It is the first
# collective of the admitted workers.
ADMITTED = "admitted"
# Name of a message field. In a request, the field says whether the worker may be admitted between two boundaries. If a
# worker was admitted in this way, the field in the reply is the number of the last boundary.
MIDWAY = "midway"
UNEVEN = (
    "one worker has finished an epoch or its training while another worker continues; give all workers the same number "
    "of batches, and stop all workers at the same step (trainer.should_stop)"
)
MOST_NAMED = 4  # largest number of members that an error message names one by one


class CollectiveWait(NamedTuple):
    """Members that wait for other members in a collective or a step.

    Attributes:
        operation: Name of the collective, or number of the step.
        waiting: Names of the waiting members, for example ``worker 3``.
        others: Names of the members for which the waiting members wait.
    """

    operation: str
    waiting: tuple[str, ...]
    others: tuple[str, ...]

    def __str__(self) -> str:
        return f"{abbreviated(self.waiting)} in `{self.operation}` for {abbreviated(self.others)}"


def abbreviated(names: Sequence[str]) -> str:
    """Return a text with the first `MOST_NAMED` names and the number of other names: "a, b, c, d and 3 more"."""
    remaining = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {remaining} more" if remaining > 0 else "")


class _Contribution(NamedTuple):
    peer: Peer
    request: int
    sequence: int
    operation: str
    frames: Sequence[Buffer]
    midway: bool  # whether the worker may be admitted between two boundaries


class _Flags(NamedTuple):
    """Flags of the requests in a collective; see :class:`Rounds`."""

    seal: bool = False
    boundary: bool = False
    leader_only: bool = False  # whether only the worker with the lowest id receives the contributions


@dataclass
class _Result:
    sequence: int
    leader: int  # lowest id among the workers that took part
    frames: list[Buffer]  # contributions of all workers, packed once for all replies
    others_frames: list[Buffer]  # frames for all workers except the leader; with `leader_only`, no contributions
    view: int = 0
    admitted: list[int] = field(default_factory=list)
    midway: int | None = None  # number of the last boundary, if workers are admitted between boundaries; else None

    def message(self, worker: int, request: int, joined: bool) -> Message:
        fields: dict[str, object] = {"sequence": self.sequence, "joined": joined}
        if self.midway is not None:
            fields[MIDWAY] = self.midway
        frames = self.frames if worker == self.leader else self.others_frames
        return Message(DONE, {**fields, "view": self.view, "admitted": self.admitted}, frames, request)


class Rounds:
    """The collectives of a run. There is one current collective at a time.

    Two kinds of collectives change the membership:

    - The collective with the flag ``seal`` ends the set-up. From then on views contain the workers.
    - A collective with the flag ``boundary`` admits the workers that wait for admission. If worker 0 is lost, the
      boundary is complete only after another process has replaced worker 0. Otherwise the other workers could finish
      the training without worker 0, which writes the checkpoints.

    A third flag, ``leader_only``, is for contributions that only one worker needs: the reply to the worker with the
    lowest id contains all contributions, and the replies to the other workers contain only the ids of the workers.

    The result of a collective that changes the membership is sent only after all servers have seen the new view.

    A worker may also be admitted between two boundaries, and then receives the result of the last boundary. All these
    conditions must hold:

    - Since the last boundary, the group has not begun any collective except `ADMITTED`.
    - Samples are left for the worker.
    - This condition applies only to an original worker that was started again: its request must contain the flag
      ``midway``, and the last boundary must not have admitted any workers.

    Joiners take part neither in the set-up nor in the collectives at the end of an epoch.

    Args:
        roster: The members of the run.
        dispatcher: The assignment of chunks of samples to workers.
        answer: Function that sends a reply to a worker.

    Attributes:
        sequence: Number of complete collectives, which is also the number of the current collective.
    """

    def __init__(self, roster: Roster, dispatcher: Dispatcher, answer: Callable[[Peer, Message], None]) -> None:
        self._roster = roster
        self._dispatcher = dispatcher
        self._answer = answer
        self.sequence = 0
        # By number of a collective during the set-up: its result. Workers that are started again need these results.
        self._log: dict[int, _Result] = {}
        # By worker id: the worker's contribution to the current collective.
        self._pending: dict[int, _Contribution] = {}
        self._flags = _Flags()  # flags of the current collective
        # By worker id: the contribution of each worker that waits for admission.
        self._joiners: dict[int, _Contribution] = {}
        self._boundary: _Result | None = None  # result of the last boundary; None before the first boundary
        self._operation = ""  # name of the last complete collective
        # Results that must not be sent before all servers have seen the view with the result's new membership. Each
        # result has a list of pairs: a contribution that waits for the reply, and whether its worker is newly admitted.
        self._held_results: list[tuple[_Result, list[tuple[_Contribution, bool]]]] = []
        # By worker id: the worker's last contribution, the result that was sent to the worker, and whether the worker
        # was newly admitted. If the worker repeats its request, it gets the same result again.
        self._sent: dict[int, tuple[_Contribution, _Result, bool]] = {}

    def collect(self, member: Member, message: Message) -> str | None:
        """Act on a worker's contribution to a collective.

        Args:
            member: The worker.
            message: The worker's request.

        Returns an error message if the run cannot go on; otherwise None.

        Raises:
            ControlError: A field of the request is missing or invalid.
        """
        sequence, operation = message.integer("sequence"), message.string("operation")
        flags = _Flags(*map(message.flag, _Flags._fields))
        peer, identity = member.peer, member.peer.id
        midway = message.fields.get(MIDWAY) is True
        contribution = _Contribution(peer, message.request, sequence, operation, message.frames, midway)
        if sequence < member.last_collective:
            return None  # This is a late copy of an old request. The worker already has the result, so nothing is sent.
        member.last_collective = sequence
        if identity in self._sent:
            last, result, joined = self._sent[identity]
            if (last.peer, last.sequence) == (peer, sequence):
                self._send_when_seen(result, [(contribution, joined)])
                return None
        if flags.seal and (self._roster.sealed or self._roster.is_joiners_place(WORKER, identity)):
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
        self._flags = flags
        self._complete()
        return None

    def go_on(self) -> None:
        """Complete the current collective, admit waiting workers and send held results, if this is possible now.

        The coordinator calls this after each event, because the membership may have changed, or servers may have seen
        a new view.
        """
        self._complete()
        self._admit_midway()
        held, self._held_results = self._held_results, []
        for result, replies in held:
            self._send_when_seen(result, replies)

    @property
    def over(self) -> str | None:
        """Error message with which the run must end; None as long as the run can go on.

        The run must end if workers wait for admission, but no worker is left in the group.
        """
        if self._joiners and not self._roster.group:
            names = ", ".join(_workers(self._joiners))
            return f"training is over: no worker is left that could admit {names}"
        return None

    def forget(self, worker: int) -> None:
        """Remove the contributions of a worker that is no longer a member."""
        self._joiners.pop(worker, None)
        self._pending.pop(worker, None)
        self._sent.pop(worker, None)

    def _complete(self) -> None:
        """Complete the current collective if all workers of the group have contributed to it.

        A boundary is not completed while worker 0 is lost.
        """
        roster = self._roster
        if len(self._pending) < max(1, len(roster.group)) or not roster.group <= self._pending.keys():
            return
        seal, boundary, leader_only = self._flags
        if boundary and self._awaited_writer:
            return
        self._operation = next(iter(self._pending.values())).operation
        pending, self._pending = dict(sorted(self._pending.items())), {}
        frames = pack({worker: contribution.frames for worker, contribution in pending.items()})
        others_frames = pack(dict.fromkeys(pending, ())) if leader_only else frames
        result = _Result(self.sequence, min(pending), frames, others_frames)
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
        """Admit workers between two boundaries, if the conditions in the docstring of :class:`Rounds` are met."""
        boundary, roster = self._boundary, self._roster
        if not self._joiners or boundary is None or self._pending or self._held_results:
            return
        # `since` is the number of complete collectives since the boundary. If the boundary has admitted workers, the
        # collective `ADMITTED` follows, and must be complete before other workers are admitted.
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
        """Send a result, or keep it until all servers have seen the view that contains the workers which it admits."""
        if result.view and self._roster.not_seen(result.view):
            self._held_results.append((result, replies))
            return
        for contribution, joined in replies:
            self._send(contribution, result, joined)

    def _send(self, contribution: _Contribution, result: _Result, joined: bool) -> None:
        peer = contribution.peer
        last, *_ = self._sent.get(peer.id, (contribution,))
        # If the worker has repeated its request, it may have received this result earlier, and may have contributed to
        # a later collective since then. The entry of the later collective must not be replaced.
        if last.peer != peer or last.sequence <= contribution.sequence:
            self._sent[peer.id] = contribution, result, joined
        self._answer(peer, result.message(peer.id, contribution.request, joined))

    @property
    def view(self) -> int:
        """Number of the view that all servers must see before the first held result is sent; 0 if no result is held."""
        return self._held_results[0][0].view if self._held_results else 0

    @property
    def _awaited_writer(self) -> list[int]:
        """A list that contains the id of worker 0 as long as this worker is lost and not replaced; otherwise empty."""
        present = self._roster.group | self._joiners.keys()
        return [] if WRITER in present or self._roster.has_left(WRITER) else [WRITER]

    @property
    def waits(self) -> list[CollectiveWait]:
        """Operations that workers wait for now, each with the members that must act before the operation can end.

        Workers may wait for the current collective, for admission, or for a result that is held back.
        """
        group = _workers(self._roster.group)
        waits = []
        if self._pending:
            operation = next(iter(self._pending.values())).operation
            waiting = _workers(self._pending)
            present = set(waiting)
            absent = [name for name in group if name not in present]
            absent += _workers(self._awaited_writer) if self._flags.boundary else ()
            waits.append(CollectiveWait(operation, waiting, tuple(absent)))
        if self._joiners:
            waits.append(CollectiveWait("join", _workers(self._joiners), group))
        for result, replies in self._held_results:
            waiting = tuple(str(contribution.peer) for contribution, _ in replies)
            waits.append(CollectiveWait(replies[0][0].operation, waiting, tuple(self._roster.not_seen(result.view))))
        return waits

    def deadlock(self) -> list[CollectiveWait]:
        """Return the two waits of a deadlock. Return an empty list if there is no deadlock.

        In a deadlock some workers wait in a collective for the other workers. The other workers cannot reach the
        collective, because they cannot finish their step without pushes of the waiting workers.
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
