"""What the coordinator answers at once: chunks of an epoch, the run's specification, and that all are to stop."""

from collections.abc import Callable, Sequence

from cnnstrategies.paramserver.coordinator.dispatch import Dispatcher
from cnnstrategies.paramserver.coordinator.members import Member
from cnnstrategies.paramserver.coordinator.roster import Roster
from cnnstrategies.paramserver.core.node import Buffer, Message, Peer
from cnnstrategies.paramserver.core.requests import DONE


class Handouts:
    """Handles the requests of members that wait for no other member.

    Where workers may join (`elastic`), these may have been told another size of their batches.

    Attributes:
        signal: That a member has received, and after which all are to stop; 0 if none has.
        specification: As a worker has told it.
        waiting: Who waits for it, with the request.
    """

    def __init__(
        self, elastic: bool, roster: Roster, dispatcher: Dispatcher, answer: Callable[[Peer, Message], None]
    ) -> None:
        self.signal = 0
        self.specification: Sequence[Buffer] | None = None
        self.waiting: dict[Peer, int] = {}
        self._elastic = elastic
        self._roster = roster
        self._dispatcher = dispatcher
        self._answer = answer

    def epoch(self, now: float, member: Member, message: Message) -> None:
        """An epoch begins for a worker."""
        number = message.integer("epoch")
        done = message.string("done") if "done" in message.fields else ""
        self._dispatcher.begin(number, message.integer("samples"), message.integer("chunk"), done)
        samples = {"samples": self._dispatcher.samples(number)} if self._elastic else {}
        self._done(member, message, epoch=number, **samples)

    def take(self, now: float, member: Member, message: Message) -> None:
        """A worker wants a chunk."""
        number, processed, ordinal = (message.integer(name) for name in ("epoch", "processed", "ordinal"))
        chunk = self._dispatcher.take(member.peer.id, number, processed, self._roster.of_the_run, ordinal)
        self._done(member, message, epoch=chunk.epoch, start=chunk.start, stop=chunk.stop)

    def progress(self, now: float, member: Member, message: Message) -> None:
        """A worker says how far it is in an epoch, and may ask what all have worked on."""
        number = message.integer("epoch")
        self._dispatcher.processed(member.peer.id, number, message.integer("processed"))
        self._done(member, message, **({"done": self._dispatcher.progress(number)} if message.flag("tell") else {}))

    def give_back(self, now: float, member: Member, message: Message) -> None:
        """A worker that begins with an epoch does not work on what it has taken of earlier ones."""
        self._dispatcher.give_back(member.peer.id, message.integer("epoch"))
        self._done(member, message)

    def stop(self, now: float, member: Member, message: Message) -> None:
        """A member has received a signal to end."""
        signal = message.integer("signal")
        self._done(member, message)
        self.stop_all(signal)

    def stop_all(self, signal: int) -> None:
        """Tell all to stop; the first signal counts."""
        self.signal = self.signal or signal
        self._roster.tell_all(self.news())

    def news(self) -> Message:
        """That all are to stop."""
        return Message("stopping", {"signal": self.signal})

    def put(self, now: float, member: Member, message: Message) -> None:
        """Keep the first specification that is told, and tell those that wait for it."""
        if self.specification is None:
            self.specification = message.frames
        for peer, request in self.waiting.items():
            self._tell(peer, request)
        self.waiting.clear()
        self._done(member, message)

    def get(self, now: float, member: Member, message: Message) -> None:
        """Answer with the specification, as soon as there is one."""
        if self.specification is not None:
            self._tell(member.peer, message.request)
        else:
            self.waiting[member.peer] = message.request

    def _tell(self, peer: Peer, request: int) -> None:
        assert self.specification is not None
        self._answer(peer, Message(DONE, {}, self.specification, request))

    def _done(self, member: Member, message: Message, **fields: object) -> None:
        self._answer(member.peer, Message(DONE, fields, request=message.request))
