"""The coordinator's side of collectives: numbered rounds, each complete when every worker of the group contributed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cnnstrategies.paramserver.control import Buffer, Message
from cnnstrategies.paramserver.roster import Member, Roster


@dataclass
class _Contribution:
    connection: bytes
    sequence: int
    operation: str
    frames: Sequence[Buffer]


@dataclass
class _Result:
    ids: list[int]
    sizes: list[int]
    frames: list[Buffer] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)


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
        self._joiners: dict[int, bytes] = {}
        self._held: list[tuple[int, list[Message]]] = []

    def collect(self, member: Member, message: Message) -> str | None:
        """Take a worker's contribution.

        Returns:
            Why the run cannot go on, if it cannot.

        Raises:
            ControlError: The message has other fields.
        """
        sequence, operation = message.integer("sequence"), message.string("operation")
        seal, boundary = message.flag("seal"), message.flag("boundary")
        if self._roster.sealed and seal:
            self._joiners[member.id] = message.sender
            return self.over
        if sequence < len(self._log):
            self._send(self._message(message.sender, self._log[sequence], sequence, joined=False))
            return None
        if sequence != self._sequence or member.id not in self._roster.group:
            return f"{member} is at collective {sequence}, {operation}, and the others are at {self._sequence}"
        other = next(iter(self._pending.items()), None)
        if other is not None and other[1].operation != operation:
            return (
                f"worker {other[0]} is at `{other[1].operation}` and worker {member.id} at `{operation}`: every "
                "worker must call the same collectives in the same order"
            )
        self._pending[member.id] = _Contribution(message.sender, sequence, operation, message.frames)
        self._flags = (seal, boundary)
        self.complete()
        return None

    @property
    def over(self) -> str | None:
        """Why nobody can be let in any more, if somebody waits for it."""
        if self._joiners and not self._roster.group:
            return "training is over: no worker is left that could let in one that was started again"
        return None

    def forget(self, worker: int) -> None:
        """Take out what a worker that is gone has contributed to the present round."""
        self._joiners.pop(worker, None)
        self._pending.pop(worker, None)

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
        replies = [(one.connection, False) for one in pending.values()]
        if not roster.sealed:
            self._log.append(result)
        if seal:
            roster.sealed = True
        elif boundary and self._joiners:
            roster.group |= self._joiners.keys()
            result.admitted = sorted(self._joiners)
            replies += [(connection, True) for connection in self._joiners.values()]
            self._joiners = {}
        elif not boundary:
            for connection, joined in replies:
                self._send(self._message(connection, result, sequence, joined))
            return
        if seal or any(joined for _, joined in replies):
            roster.publish()
        self._held.append(
            (roster.number, [self._message(connection, result, sequence, joined) for connection, joined in replies])
        )
        self.release()

    def release(self) -> None:
        """Send the results that wait for the servers to have seen a view."""
        for number, replies in list(self._held):
            if self._roster.servers_have_seen(number):
                self._held.remove((number, replies))
                for reply in replies:
                    self._send(reply)

    def _message(self, connection: bytes, result: _Result, sequence: int, joined: bool) -> Message:
        fields: dict[str, object] = {"sequence": sequence, "ids": result.ids, "sizes": result.sizes, "joined": joined}
        fields |= {"view": self._roster.number, "admitted": result.admitted}
        return Message("result", fields, result.frames, connection)
