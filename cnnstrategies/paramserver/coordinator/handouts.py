"""What the coordinator answers at once: chunks of an epoch, what members publish, and what one tells all."""

from collections.abc import Callable, Sequence

from cnnstrategies.paramserver.coordinator.dispatch import Dispatcher
from cnnstrategies.paramserver.coordinator.roster import Member, Roster
from cnnstrategies.paramserver.core.node import Buffer, ControlError, Message, Peer
from cnnstrategies.paramserver.core.requests import DONE

NOTICES = 64  # names


class Handouts:
    """Gives out chunks, and passes notices on.

    Attributes:
        notices: What members have told all, by name.
    """

    def __init__(
        self,
        elastic: bool,
        roster: Roster,
        dispatcher: Dispatcher,
        answer: Callable[[Peer, Message], None],
    ) -> None:
        self._elastic = elastic
        self._roster = roster
        self._dispatcher = dispatcher
        self._answer = answer
        self.notices: dict[str, int] = {}

    def epoch(self, now: float, member: Member, message: Message) -> None:
        """An epoch begins for a worker."""
        number = message.integer("epoch")
        done = message.string("done") if "done" in message.fields else ""
        self._dispatcher.begin(number, message.integer("samples"), message.integer("chunk"), done)
        fields = {"epoch": number}
        if self._elastic:  # Who joins may have been told another size of its batches.
            fields["samples"] = self._dispatcher.samples(number)
        self._answer(member.peer, Message(DONE, fields, request=message.request))

    def take(self, now: float, member: Member, message: Message) -> None:
        """A worker wants a chunk."""
        chunk = self._dispatcher.take(
            member.peer.id,
            message.integer("epoch"),
            message.integer("processed"),
            self._roster.of_the_run,
            message.integer("ordinal"),
            now,
        )
        fields = {"epoch": chunk.epoch, "start": chunk.start, "stop": chunk.stop}
        self._answer(member.peer, Message(DONE, fields, request=message.request))

    def progress(self, now: float, member: Member, message: Message) -> None:
        """A worker says how far it is in an epoch, and may ask what all have worked on."""
        number = message.integer("epoch")
        self._dispatcher.processed(member.peer.id, number, message.integer("processed"))
        fields = {"done": self._dispatcher.progress(number)} if message.flag("tell") else {}
        self._answer(member.peer, Message(DONE, fields, request=message.request))

    def give_back(self, now: float, member: Member, message: Message) -> None:
        """A worker that begins with an epoch does not work on what it has taken of earlier ones."""
        self._dispatcher.give_back(member.peer.id, message.integer("epoch"))
        self._answer(member.peer, Message(DONE, request=message.request))

    def notice(self, now: float, member: Member, message: Message) -> None:
        """A member has something to tell all."""
        name, value = message.string("name"), message.integer("value")
        self._answer(member.peer, Message(DONE, request=message.request))
        self.tell_all(name, value)

    def tell_all(self, name: str, value: int) -> None:
        """Tell all a number; the first under a name counts."""
        if len(self.notices) < NOTICES:
            self.notices.setdefault(name, value)
        self._roster.tell_all(self.news())

    def news(self) -> Message:
        """All that was told."""
        return Message("notices", {"notices": dict(self.notices)})


MOST_VALUES = 16


class Values:
    """What was published; who asks before that gets it then."""

    def __init__(self, answer: Callable[[Peer, Message], None]) -> None:
        self._answer = answer
        self._values: dict[str, Sequence[Buffer]] = {}
        self._waiting: dict[str, dict[Peer, int]] = {}

    def put(self, now: float, member: Member, message: Message) -> None:
        """Keep the first value of a name, and tell those that wait for it."""
        name = message.string("name")
        if name not in self._values and len(self._values) >= MOST_VALUES:
            raise ControlError("too many values")
        self._values.setdefault(name, message.frames)
        for peer, request in self._waiting.pop(name, {}).items():
            self._reply(peer, request, name)
        self._answer(member.peer, Message(DONE, request=message.request))

    def get(self, now: float, member: Member, message: Message) -> None:
        """Answer with the value of a name, as soon as it has one."""
        name = message.string("name")
        if name in self._values:
            self._reply(member.peer, message.request, name)
        else:
            self._waiting.setdefault(name, {})[member.peer] = message.request

    def forget(self, peer: Peer) -> None:
        """Answer a peer no more."""
        for waiting in self._waiting.values():
            waiting.pop(peer, None)

    @property
    def names(self) -> list[str]:
        """Those that have a value."""
        return list(self._values)

    @property
    def waiting(self) -> dict[str, tuple[str, ...]]:
        """Who waits for each name."""
        return {name: tuple(map(str, waiting)) for name, waiting in self._waiting.items() if waiting}

    def _reply(self, peer: Peer, request: int, name: str) -> None:
        self._answer(peer, Message(DONE, {"name": name}, self._values[name], request))
