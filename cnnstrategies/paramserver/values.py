"""Buffers that members publish under a name, for whoever asks."""

from collections.abc import Callable, Sequence

from cnnstrategies.paramserver.control import Buffer, ControlError, Message

MOST_VALUES = 16


class Values:
    """What was published; who asks before that gets it then.

    Args:
        send: Sends a message to the connection that it names.
    """

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._values: dict[str, Sequence[Buffer]] = {}
        self._waiting: dict[str, set[bytes]] = {}

    def put(self, message: Message) -> None:
        """Keep the first value of a name, and say that there is one.

        Raises:
            ControlError: There are too many names.
        """
        name = message.string("name")
        if name not in self._values and len(self._values) >= MOST_VALUES:
            raise ControlError("too many values")
        self._values.setdefault(name, message.frames)
        self._send(Message("kept", {"name": name}, (), message.sender))
        for connection in self._waiting.pop(name, ()):
            self._answer(connection, name)

    def get(self, message: Message) -> None:
        """Answer with the value of a name, as soon as it has one; until then that it is waited for."""
        name = message.string("name")
        if name in self._values:
            self._answer(message.sender, name)
        elif name in self._waiting or len(self._waiting) < MOST_VALUES:
            self._waiting.setdefault(name, set()).add(message.sender)
            self._send(Message("waiting", {"name": name, "for": [f"whoever tells `{name[:40]}`"]}, (), message.sender))

    def _answer(self, connection: bytes, name: str) -> None:
        self._send(Message("value", {"name": name}, self._values[name], connection))
