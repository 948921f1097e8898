"""The coordinator's side of collectives: numbered rounds, each complete when every worker of the group contributed."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cnnstrategies.paramserver.control import Buffer, Message
from cnnstrategies.paramserver.roster import Member, Roster

MOST_NAMED = 4  # of the workers that are waited for


@dataclass
class _Contribution:
    sequence: int
    operation: str
    frames: Sequence[Buffer]


@dataclass
class _Result:
    ids: list[int]
    sizes: list[int]
    frames: list[Buffer] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)


@dataclass
class _Answer:
    """The last one to a worker: kept, for it may be lost on its way.

    Attributes:
        request: The worker's life, its sequence, and whether it sealed.
        message: The answer.
        view: The servers must have seen it before.
    """

    request: tuple[int, int, bool]
    message: Message
    view: int


class Rounds:
    """The collectives of a run, one after the other.

    One that seals is the last of the set-up: from then on views name the workers. At a boundary those that have come
    since are let into the group. The results of both wait until all servers have seen the view that they lead to.

    Args:
        roster: The members; its group and its seal change here.
        send: Sends a message to the connection that it names.
    """

    def __init__(self, roster: Roster, send: Callable[[Message], None]) -> None:
        self._roster = roster
        self._send = send
        self._sequence = 0
        self._log: list[_Result] = []
        self._pending: dict[int, _Contribution] = {}
        self._flags: tuple[bool, bool] = (False, False)
        self._joiners: dict[int, tuple[int, int, bool]] = {}
        self._requests: dict[int, tuple[int, int, bool]] = {}
        self._connections: dict[int, bytes] = {}  # by which each worker has asked last
        self._answers: dict[int, _Answer] = {}
        self._held: dict[int, float] = {}  # workers whose answers wait for the servers, since when

    def collect(self, member: Member, message: Message) -> str | None:
        """Take a worker's contribution, or its question what has become of it; both may come any number of times.

        Returns:
            Why the run cannot go on, if it cannot.

        Raises:
            ControlError: The message has other fields.
        """
        sequence, operation = message.integer("sequence"), message.string("operation")
        seal, boundary = message.flag("seal"), message.flag("boundary")
        request = (member.incarnation, sequence, seal)
        self._connections[member.id] = message.sender
        answer = self._answers.get(member.id)
        if answer is not None and answer.request == request:
            self._answer(member.id)
            return None
        if self._roster.sealed and seal:
            self._joiners[member.id] = request
            self._tell(member.id, Message("waiting", {"sequence": sequence, "for": ["the others' next boundary"]}))
            return self.over
        if sequence < len(self._log):
            self._send(self._message(self._log[sequence], sequence, joined=False).to(message.sender))
            return None
        if message.flag("asks"):
            self._tell(member.id, self._progress(member.id, sequence))
            return None
        if sequence != self._sequence or member.id not in self._roster.group:
            return f"{member} is at collective {sequence}, {operation}, and the others are at {self._sequence}"
        other = next(iter(self._pending.items()), None)
        if other is not None and other[1].operation != operation:
            return (
                f"worker {other[0]} is at `{other[1].operation}` and worker {member.id} at `{operation}`: every "
                "worker must call the same collectives in the same order"
            )
        self._pending[member.id] = _Contribution(sequence, operation, message.frames)
        self._requests[member.id] = request
        self._flags = (seal, boundary)
        self.complete()
        return None

    def _progress(self, worker: int, sequence: int) -> Message:
        """What has become of a contribution that is not answered: it has not come, or others are waited for."""
        if sequence != self._sequence or worker not in self._pending:
            return Message("again", {"sequence": sequence})
        absent = itertools.islice(
            (f"worker {one}" for one in self._roster.group if one not in self._pending), MOST_NAMED
        )
        return Message("waiting", {"sequence": sequence, "for": list(absent)})

    @property
    def over(self) -> str | None:
        """Why nobody can be let in any more, if somebody waits for it."""
        if self._joiners and not self._roster.group:
            return "training is over: no worker is left that could let in one that was started again"
        return None

    def forget(self, worker: int) -> None:
        """Take out what a worker that is gone has contributed to the present round."""
        for entries in (self._joiners, self._pending, self._requests, self._connections, self._answers, self._held):
            entries.pop(worker, None)

    def complete(self) -> None:
        """End the present round if nobody is waited for."""
        roster = self._roster
        if not self._pending or not roster.group <= self._pending.keys():
            return
        seal, boundary = self._flags
        pending, self._pending = dict(sorted(self._pending.items())), {}
        result = _Result(list(pending), [len(one.frames) for one in pending.values()])
        result.frames = [frame for one in pending.values() for frame in one.frames]
        sequence = self._sequence
        self._sequence += 1
        replies = dict.fromkeys(pending, False)
        requests = {worker: self._requests.pop(worker) for worker in pending}
        if not roster.sealed:
            self._log.append(result)
        if seal:
            roster.sealed = True
        elif boundary and self._joiners:
            roster.group |= self._joiners.keys()
            result.admitted = sorted(self._joiners)
            replies |= dict.fromkeys(self._joiners, True)
            requests |= self._joiners
            self._joiners = {}
        if seal or any(replies.values()):
            roster.publish()
        view = roster.number if seal or boundary else -1
        self._answers = {
            worker: _Answer(requests[worker], self._message(result, sequence, joined), view)
            for worker, joined in replies.items()
        }
        self._held = dict.fromkeys(replies, time.monotonic())
        self.release()

    def release(self) -> None:
        """Send the results that wait for the servers to have seen a view."""
        if self._held and self._is_seen(next(iter(self._held))):  # They all wait for the same one.
            for worker in list(self._held):
                self._answer(worker)

    def _is_seen(self, worker: int) -> bool:
        view = self._answers[worker].view
        return view < 0 or self._roster.servers_have_seen(view)

    def held_too_long(self, seconds: float, appear: float) -> str | None:
        """Why workers wait in vain, if they do: servers that are there do not take up a view, or some do not appear.

        Args:
            seconds: For those that are there.
            appear: For those that are not.
        """
        since = min(self._held.values(), default=None)
        if since is None or time.monotonic() - since < min(seconds, appear):
            return None
        view = max(self._answers[worker].view for worker in self._held)
        blind = self._roster.servers_behind(view)
        if not blind and time.monotonic() - since < appear:
            return None
        who = ", ".join(blind) or "a server that is to come"
        return f"{who} did not take up view {view} for {time.monotonic() - since:.0f} s, and the workers wait for that"

    def _answer(self, worker: int) -> None:
        """Send a worker its answer, or have it know that the servers are waited for."""
        answer = self._answers[worker]
        if self._is_seen(worker):
            self._held.pop(worker, None)
            self._tell(worker, answer.message)
        else:
            sequence = answer.message.fields["sequence"]
            self._tell(
                worker, Message("waiting", {"sequence": sequence, "for": [f"the servers to see view {answer.view}"]})
            )

    def _tell(self, worker: int, message: Message) -> None:
        self._send(message.to(self._connections[worker]))

    def _message(self, result: _Result, sequence: int, joined: bool) -> Message:
        fields: dict[str, object] = {"sequence": sequence, "ids": result.ids, "sizes": result.sizes, "joined": joined}
        fields |= {"view": self._roster.number, "admitted": result.admitted}
        return Message("result", fields, result.frames)
