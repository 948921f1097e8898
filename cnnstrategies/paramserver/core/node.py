"""What a role is: a state machine that is told of messages, timers and calls, and says what is to be done.

A role has no socket, thread, clock, file or random number. A driver runs it over sockets, and the simulator in virtual
time; both pass the time in and carry out the effects that come back.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

Buffer = bytes | bytearray | memoryview
LARGEST = 1 << 63  # is no number of a message any more


class ControlError(ValueError):
    """A message is not what it claims to be."""


class Peer(NamedTuple):
    """A process that takes part.

    Attributes:
        role: ``worker``, ``server``, ``supervision`` or ``coordinator``.
        id: Its number among those of its role.
        life: How many processes had its place before.
        process: Tells two processes apart that claim the same life.
    """

    role: str
    id: int
    incarnation: int = 0
    process: int = 0

    def __str__(self) -> str:
        return f"{self.role} {self.id}"


class Message(NamedTuple):
    """A message.

    Attributes:
        kind: What it asks or says.
        fields: Its contents, as JSON can hold them.
        frames: Buffers that belong to it.
        request: Number of the request that it is, or answers; 0 for one that is neither and may be lost.
    """

    kind: str
    fields: Mapping[str, Any] = {}
    frames: Sequence[Buffer] = ()
    request: int = 0

    def integer(self, name: str, least: int = 0) -> int:
        """A field that is an integer of at most 63 bits and not below the least."""
        value = self.fields.get(name)
        if type(value) is not int or not least <= value < LARGEST:
            raise ControlError(f"{self.kind}: {name}={value!r} is not a number")
        return value

    def real(self, name: str) -> float:
        """A field that is a number which is not negative, or none at all (NaN), as norms may be."""
        value = self.fields.get(name)
        if type(value) is int and 0 <= value < LARGEST:
            return float(value)
        if type(value) is not float or value < 0:
            raise ControlError(f"{self.kind}: {name} is no norm and no factor")
        return value

    def string(self, name: str) -> str:
        """A field that is a string."""
        value = self.fields.get(name)
        if not isinstance(value, str):
            raise ControlError(f"{self.kind}: {name}={value!r} is not a string")
        return value

    def flag(self, name: str) -> bool:
        """A field that is true or, like one that is not there, false."""
        return self.fields.get(name) is True

    def integers(self, name: str) -> list[int]:
        """A field that is a list of at most 65,536 integers, as in :meth:`integer`."""
        value = self.fields.get(name)
        if not isinstance(value, list) or len(value) > 1 << 16 or not _is_row(value, (int,) * len(value)):
            raise ControlError(f"{self.kind}: {name} is not a list of numbers")
        return value

    def object(self, name: str) -> Mapping[str, Any]:
        """A field that is an object."""
        value = self.fields.get(name)
        if not isinstance(value, dict):
            raise ControlError(f"{self.kind}: {name} is not an object")
        return value

    def part(self, name: str) -> "Message | None":
        """A field that is an object with fields of its own, or None."""
        return None if self.fields.get(name) is None else Message(self.kind, self.object(name))

    def table(self, name: str, *columns: type) -> list[tuple[Any, ...]]:
        """A field that is a list of lists, with a value of a type, as :meth:`integer` checks it, for each column."""
        value = self.fields.get(name)
        if not isinstance(value, list) or not all(_is_row(row, columns) for row in value):
            raise ControlError(f"{self.kind}: {name} is not a table of {len(columns)} columns")
        return [tuple(row) for row in value]


def _is_row(row: Any, columns: Sequence[type]) -> bool:
    if not isinstance(row, list | tuple) or tuple(map(type, row)) != columns:
        return False
    return all(type(one) is not int or 0 <= one < LARGEST for one in row)


class Send(NamedTuple):
    """Send a message, if the peer can be reached."""

    to: Peer
    message: Message


class Timer(NamedTuple):
    """Call :meth:`Role.on_timer` at a time, which replaces the one of this name; None cancels it."""

    name: str
    at: float | None


class Return(NamedTuple):
    """A call has its result: a message, or the text of why there is none."""

    call: int
    value: Message | str


class End(NamedTuple):
    """The role has ended; nothing more comes of it."""

    reason: str
    clean: bool


Effect = Send | Timer | Return | End
Effects = list[Effect]


class Call(NamedTuple):
    """What a process asks of its own role; ``number`` comes back with the result."""

    number: int
    kind: str
    fields: Mapping[str, Any] = {}
    frames: Sequence[Buffer] = ()


class Role(Protocol):
    """A state machine; all methods return at once. Times are seconds of any one clock that does not go back."""

    def start(self, now: float) -> Effects:
        """Begin."""

    def on_message(self, now: float, sender: Peer, message: Message) -> Effects:
        """Act on a message.

        Raises:
            ControlError: It has other fields than its kind; nothing has changed.
        """

    def on_timer(self, now: float, name: str) -> Effects:
        """Act on a timer whose time has come; it may come late."""


class CalledRole(Role, Protocol):
    """One of which its process asks something."""

    def on_call(self, now: float, call: Call) -> Effects:
        """Act on a call of this process."""
