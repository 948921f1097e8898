"""Buffers that members publish under a name, for whoever asks."""

from collections.abc import Callable, Sequence

from cnnstrategies.paramserver.control import Buffer, Message


class Values:
    """What was published; who asks before that gets it then.

    Args:
        send: Sends a message to the connection that it names.
    """

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._values: dict[str, Sequence[Buffer]] = {}
        self._waiting: dict[str, list[bytes]] = {}

    def put(self, message: Message) -> None:
        """Keep the first value of a name."""
        name = message.string("name")
        if name not in self._values:
            self._values[name] = message.frames
        for connection in self._waiting.pop(name, []):
            self._answer(connection, name)

    def get(self, message: Message) -> None:
        """Answer with the value of a name, as soon as it has one."""
        name = message.string("name")
        if name in self._values:
            self._answer(message.sender, name)
        else:
            self._waiting.setdefault(name, []).append(message.sender)

    def _answer(self, connection: bytes, name: str) -> None:
        self._send(Message("value", {"name": name}, self._values[name], connection))
