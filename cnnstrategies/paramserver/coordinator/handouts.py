"""What the coordinator answers at once: chunks of an epoch, what members publish, and what one tells all."""

from collections.abc import Callable, Sequence

from cnnstrategies.paramserver.coordinator.dispatch import Dispatcher
from cnnstrategies.paramserver.coordinator.members import Member
from cnnstrategies.paramserver.coordinator.roster import Roster
from cnnstrategies.paramserver.core.node import Buffer, ControlError, Message, Peer
from cnnstrategies.paramserver.core.requests import DONE

MOST_NOTICES = 64  # names
MOST_VALUES = 16


class Handouts:
    """Handles the requests of members that wait for no other member.

    Args:
        elastic: Whether workers may join, which may have been told another size of their batches.
        roster: The members.
        dispatcher: Has the chunks.
        answer: Answers a request.

    Attributes:
        notices: The numbers that members have told all, by name.
        values: The buffers that members have published, by name.
        waiting: Who waits for a value, with the request, by name.
    """

    def __init__(
        self, elastic: bool, roster: Roster, dispatcher: Dispatcher, answer: Callable[[Peer, Message], None]
    ) -> None:
        self.notices: dict[str, int] = {}
        self.values: dict[str, Sequence[Buffer]] = {}
        self.waiting: dict[str, dict[Peer, int]] = {}
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

    def notice(self, now: float, member: Member, message: Message) -> None:
        """A member has something to tell all."""
        name, value = message.string("name"), message.integer("value")
        self._done(member, message)
        self.tell_all(name, value)

    def tell_all(self, name: str, value: int) -> None:
        """Tell all a number; the first under a name counts."""
        if len(self.notices) < MOST_NOTICES:
            self.notices.setdefault(name, value)
        self._roster.tell_all(self.news())

    def news(self) -> Message:
        """All that was told."""
        return Message("notices", {"notices": dict(self.notices)})

    def put(self, now: float, member: Member, message: Message) -> None:
        """Keep the first value of a name, and tell those that wait for it."""
        name = message.string("name")
        if name not in self.values and len(self.values) >= MOST_VALUES:
            raise ControlError("too many values")
        self.values.setdefault(name, message.frames)
        for peer, request in self.waiting.pop(name, {}).items():
            self._tell(peer, request, name)
        self._done(member, message)

    def get(self, now: float, member: Member, message: Message) -> None:
        """Answer with the value of a name, as soon as it has one."""
        name = message.string("name")
        if name in self.values:
            self._tell(member.peer, message.request, name)
        else:
            self.waiting.setdefault(name, {})[member.peer] = message.request

    def forget(self, peer: Peer) -> None:
        """Answer a peer no more."""
        for waiting in self.waiting.values():
            waiting.pop(peer, None)

    def _tell(self, peer: Peer, request: int, name: str) -> None:
        self._answer(peer, Message(DONE, {"name": name}, self.values[name], request))

    def _done(self, member: Member, message: Message, **fields: object) -> None:
        self._answer(member.peer, Message(DONE, fields, request=message.request))
