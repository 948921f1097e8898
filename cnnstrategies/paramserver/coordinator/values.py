"""Buffers that members publish under a name, for whoever asks."""

from collections.abc import Callable, Sequence

from cnnstrategies.paramserver.coordinator.roster import Member
from cnnstrategies.paramserver.core.node import Buffer, ControlError, Message, Peer
from cnnstrategies.paramserver.core.requests import DONE

MOST_VALUES = 16


class Values:
    """What was published; who asks before that gets it then.

    Args:
        answer: Answers a request.
    """

    def __init__(self, answer: Callable[[Peer, Message], None]) -> None:
        self._answer = answer
        self._values: dict[str, Sequence[Buffer]] = {}
        self._waiting: dict[str, dict[Peer, int]] = {}

    def put(self, now: float, member: Member, message: Message) -> None:
        """Keep the first value of a name, and tell those that wait for it.

        Raises:
            ControlError: There are too many names.
        """
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
