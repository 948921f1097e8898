"""The coordinator's side of collectives: numbered rounds, each complete when every worker of the group contributed."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from cnnstrategies.paramserver.coordinator.dispatch import Dispatcher
from cnnstrategies.paramserver.coordinator.roster import WRITER, Member, Roster
from cnnstrategies.paramserver.coordinator.settings import WORKER
from cnnstrategies.paramserver.core.node import Buffer, Message, Peer
from cnnstrategies.paramserver.core.requests import DONE

# What all do after a boundary that has let somebody in: that one begins, and with it they go on.
ADMITTED = "admitted"
MIDWAY = "midway"  # in the answer to a worker that is let in after a boundary: number of that collective
UNEVEN = (
    "one has ended an epoch, or training, that another goes on with; give all workers the same number of batches, and "
    "stop all at the same step (trainer.should_stop)"
)
MOST_NAMED = 4


class CollectiveWait(NamedTuple):
    """What some members wait for, and for which others."""

    what: str
    who: tuple[str, ...]
    others: tuple[str, ...]

    def __str__(self) -> str:
        return f"{named(self.who)} in `{self.what}` for {named(self.others)}"


def named(names: Sequence[str]) -> str:
    """Some names, and how many more there are."""
    rest = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


class _Contribution(NamedTuple):
    peer: Peer
    request: int
    asked: int
    operation: str
    frames: Sequence[Buffer]
    midway: bool  # whether it may be let in after a boundary


@dataclass
class _Result:
    sequence: int
    ids: list[int]
    sizes: list[int]
    view: int = 0
    frames: list[Buffer] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)
    midway: int | None = None  # the boundary after which somebody is let in: its contents, at a later moment

    def message(self, request: int, joined: bool) -> Message:
        fields = {"sequence": self.sequence, "ids": self.ids, "sizes": self.sizes, "joined": joined}
        if self.midway is not None:
            fields[MIDWAY] = self.midway
        return Message(DONE, {**fields, "view": self.view, "admitted": self.admitted}, self.frames, request)


class Rounds:
    """The collectives of a run, one after the other.

    One that seals is the last of the set-up: from then on views name the workers. At a boundary those that have come
    since are let into the group, and worker 0 is waited for if it is lost: else the others could be through before it
    is back. The results of both wait until all servers have seen the view that they lead to.

    A worker that joins the run, and is none of its own, takes no part in its set-up nor in what the others do at the
    end of an epoch. It may be let in after a boundary, too, as long as the others have not met since: it is told then
    what they were told there. So may one of the run's own that says so, after a boundary that has let nobody in.

    Attributes:
        sequence: How many are complete.
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
        self._boundary: _Result | None = None  # the last one
        self._operation = ""  # the last one
        self._held: list[tuple[_Result, list[tuple[_Contribution, bool]]]] = []
        # What each worker was told last; it is told the same if it asks again.
        self._told: dict[int, tuple[_Contribution, _Result, bool]] = {}

    def collect(self, member: Member, message: Message) -> str | None:
        """Take a worker's contribution; why the run cannot go on, if it cannot."""
        sequence, operation = message.integer("sequence"), message.string("operation")
        seal, boundary = message.flag("seal"), message.flag("boundary")
        peer, identity = member.peer, member.peer.id
        midway = message.fields.get(MIDWAY) is True
        contribution = _Contribution(peer, message.request, sequence, operation, message.frames, midway)
        if sequence < member.asked:
            return None  # It came late: its sender knows that result.
        member.asked = sequence
        if identity in self._told:
            last, result, joined = self._told[identity]
            if (last.peer, last.asked) == (peer, sequence):
                self._hold(result, [(contribution, joined)])
                return None
        if seal and (self._roster.sealed or self._roster.is_elastic(WORKER, identity)):
            self._joiners[identity] = contribution
            return self.over
        if sequence in self._log:
            self._tell(contribution, self._log[sequence], joined=False)
            return None
        if sequence != self.sequence or identity not in self._roster.group:
            return f"{member} is at collective {sequence}, {operation}, and the others are at {self.sequence}"
        other = next(iter(self._pending.items()), None)
        if other is not None and other[1].operation != operation:
            return (
                f"worker {other[0]} is at `{other[1].operation}` and worker {identity} at `{operation}`: every "
                f"worker must call the same collectives in the same order; maybe {UNEVEN}"
            )
        self._pending[identity] = contribution
        self._flags = (seal, boundary)
        self._complete()
        return None

    def go_on(self) -> None:
        """Go on with what has waited for something that has changed."""
        self._complete()
        self._let_in()
        held, self._held = self._held, []
        for result, replies in held:
            self._hold(result, replies)

    @property
    def over(self) -> str | None:
        """Why nobody can be let in any more, if somebody waits for it."""
        if self._joiners and not self._roster.group:
            names = ", ".join(_workers(self._joiners))
            return f"training is over: no worker is left that could let in {names}, which was started again"
        return None

    def forget(self, worker: int) -> None:
        """Take out what a worker that is gone has contributed to the present round."""
        self._joiners.pop(worker, None)
        self._pending.pop(worker, None)
        self._told.pop(worker, None)

    def _complete(self) -> None:
        """End the present round if nobody is waited for."""
        roster = self._roster
        if len(self._pending) < max(1, len(roster.group)) or not roster.group <= self._pending.keys():
            return
        seal, boundary = self._flags
        if boundary and self._awaited:
            return
        self._operation = next(iter(self._pending.values())).operation
        pending, self._pending = dict(sorted(self._pending.items())), {}
        result = _Result(self.sequence, list(pending), [len(one.frames) for one in pending.values()])
        result.frames = [frame for one in pending.values() for frame in one.frames]
        self.sequence += 1
        replies = [(one, False) for one in pending.values()]
        if not roster.sealed:
            self._log[result.sequence] = result
        if seal:
            roster.sealed = True
        elif boundary and self._joiners:
            roster.group |= self._joiners.keys()
            result.admitted = sorted(self._joiners)
            replies += [(one, True) for one in self._joiners.values()]
            self._joiners = {}
        if seal or result.admitted:
            roster.publish()
        if seal or boundary:
            result.view = roster.number
        if boundary:
            self._boundary = result
            self._dispatcher.meet()
        self._hold(result, replies)

    def _let_in(self) -> None:
        """Let those in after a boundary since which the others have not met, if they find something to do."""
        boundary, roster = self._boundary, self._roster
        if not self._joiners or boundary is None or self._pending or self._held:
            return
        # Those who were let in at the boundary begin first: all meet once more for it.
        since = self.sequence - 1 - boundary.sequence
        if since != bool(boundary.admitted) or (since and self._operation != ADMITTED):
            return
        come = [one for one in self._joiners if roster.is_elastic(WORKER, one)]
        back = [one for one, it in self._joiners.items() if one not in come and it.midway and not since]
        back = [one for one in back if self._dispatcher.may_come(one)]
        admitted = sorted(come + back)
        if not admitted or not self._dispatcher.can_spare(roster.of_the_run.union(back), others=bool(come)):
            return
        joiners = {one: self._joiners.pop(one) for one in admitted}
        roster.group |= joiners.keys()
        roster.publish()
        result = replace(boundary, sequence=self.sequence - 1, view=roster.number)
        result.admitted, result.midway = admitted, boundary.sequence
        self._hold(result, [(one, True) for one in joiners.values()])

    def _hold(self, result: _Result, replies: list[tuple[_Contribution, bool]]) -> None:
        """Send a result, now or when the servers have seen the view that it leads to."""
        if result.view and self._roster.not_seen(result.view):
            self._held.append((result, replies))
            return
        for one, joined in replies:
            self._tell(one, result, joined)

    def _tell(self, one: _Contribution, result: _Result, joined: bool) -> None:
        last, *_ = self._told.get(one.peer.id, (one,))
        # A question that was held may be answered when the worker has been told and has gone on to the next.
        if last.peer != one.peer or last.asked <= one.asked:
            self._told[one.peer.id] = one, result, joined
        self._answer(one.peer, result.message(one.request, joined))

    # Who waits for whom

    @property
    def view(self) -> int:
        """The first that a result waits for: all servers are to see it; 0 if none does."""
        return self._held[0][0].view if self._held else 0

    @property
    def _awaited(self) -> list[int]:
        """Worker 0, if it is lost and not back yet."""
        present = self._roster.group | self._joiners.keys()
        return [] if WRITER in present or self._roster.has_left(WRITER) else [WRITER]

    @property
    def waits(self) -> list[CollectiveWait]:
        """Who waits, in which collective, and for whom."""
        group = _workers(self._roster.group)
        found = []
        if self._pending:
            operation = next(iter(self._pending.values())).operation
            here = _workers(self._pending)
            present = set(here)
            absent = [name for name in group if name not in present]
            absent += _workers(self._awaited) if self._flags[1] else ()
            found.append(CollectiveWait(operation, here, tuple(absent)))
        if self._joiners:
            found.append(CollectiveWait("join", _workers(self._joiners), group))
        for result, replies in self._held:
            who = tuple(str(one.peer) for one, _ in replies)
            found.append(CollectiveWait(replies[0][0].operation, who, tuple(self._roster.not_seen(result.view))))
        return found

    def circle(self) -> list[CollectiveWait]:
        """Who waits in a collective, and who needs a step of theirs before it comes there: that is not to last."""
        figures = {one.peer.id: one.figures for one in self._roster.members if one.peer.role == WORKER}
        pushed = {one: figures[one]["pushed"] for one in self._pending if "pushed" in figures.get(one, {})}
        least = min(pushed.values(), default=math.inf)
        absent = self._roster.group - self._pending.keys()
        ahead = _workers(one for one in absent if figures.get(one, {}).get("needs", 0) > least)
        last = _workers(one for one, count in pushed.items() if count == least)
        return [self.waits[0], CollectiveWait(f"step {least:.0f}", ahead, last)] if ahead else []


def _workers(numbers: Iterable[int]) -> tuple[str, ...]:
    return tuple(f"{WORKER} {one}" for one in sorted(numbers))
