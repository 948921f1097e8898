"""Roles: state machines that receive messages, timers and calls, and return the effects to carry out.

A role has no socket, thread, clock, file or random number. A driver runs it over sockets, and the simulator runs it in
virtual time. Both pass the present time to the role and carry out the effects that it returns.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

Buffer = bytes | bytearray | memoryview
INTEGER_LIMIT = 1 << 63  # Integers in messages are below this number.


class ControlError(ValueError):
    """A message that does not have the form of its kind."""


class Peer(NamedTuple):
    """A process that takes part in a run.

    Attributes:
        role: ``worker``, ``server``, ``supervision`` or ``coordinator``.
        id: Number among the processes of the same role.
        incarnation: Number of processes that had this place before.
        process: Number that distinguishes two processes with the same incarnation.
    """

    role: str
    id: int
    incarnation: int = 0
    process: int = 0

    def __str__(self) -> str:
        return f"{self.role} {self.id}"


class Message(NamedTuple):
    """A message between processes.

    Attributes:
        kind: What the message requests or reports.
        fields: Contents, as values that JSON can hold.
        frames: Buffers that belong to the message.
        request: Number of the request, which its answer repeats; 0 for a message that is neither and may be lost.
    """

    kind: str
    fields: Mapping[str, Any] = {}
    frames: Sequence[Buffer] = ()
    request: int = 0

    def integer(self, name: str, least: int = 0) -> int:
        """Return a field that must be an integer of at most 63 bits, and not below `least`.

        Raises:
            ControlError: It is not; the same holds for the other methods.
        """
        value = self.fields.get(name)
        if type(value) is not int or not least <= value < INTEGER_LIMIT:
            raise ControlError(f"{self.kind}: {name}={value!r} is not an integer from {least} to 2^63 - 1")
        return value

    def real(self, name: str) -> float:
        """Return a field that must be a number that is not negative, or NaN, as norms may be."""
        value = self.fields.get(name)
        if type(value) is int and 0 <= value < INTEGER_LIMIT:
            return float(value)
        if type(value) is not float or value < 0:
            raise ControlError(f"{self.kind}: {name} is not a norm or a factor")
        return value

    def string(self, name: str) -> str:
        """Return a field that must be a string."""
        value = self.fields.get(name)
        if not isinstance(value, str):
            raise ControlError(f"{self.kind}: {name}={value!r} is not a string")
        return value

    def flag(self, name: str) -> bool:
        """Whether a field is true; a missing field is false."""
        return self.fields.get(name) is True

    def integers(self, name: str) -> list[int]:
        """Return a field that must be a list of at most 65,536 integers, as in :meth:`integer`."""
        value = self.fields.get(name)
        if not isinstance(value, list) or len(value) > 1 << 16 or not _is_row(value, (int,) * len(value)):
            raise ControlError(f"{self.kind}: {name} is not a list of numbers")
        return value

    def object(self, name: str) -> Mapping[str, Any]:
        """Return a field that must be an object."""
        value = self.fields.get(name)
        if not isinstance(value, dict):
            raise ControlError(f"{self.kind}: {name} is not an object")
        return value

    def part(self, name: str) -> "Message | None":
        """Return a field that must be an object, or None, as a message with the object's fields."""
        return None if self.fields.get(name) is None else Message(self.kind, self.object(name))

    def table(self, name: str, *columns: type) -> list[tuple[Any, ...]]:
        """Return a field that must be a list of rows, with one value of the given type for each column.

        Integers must be as in :meth:`integer`.
        """
        value = self.fields.get(name)
        if not isinstance(value, list) or not all(_is_row(row, columns) for row in value):
            raise ControlError(f"{self.kind}: {name} is not a table of {len(columns)} columns")
        return [tuple(row) for row in value]


def _is_row(row: Any, columns: Sequence[type]) -> bool:
    if not isinstance(row, list | tuple) or tuple(map(type, row)) != columns:
        return False
    return all(type(value) is not int or 0 <= value < INTEGER_LIMIT for value in row)


class Send(NamedTuple):
    """Effect: send a message, if the peer can be reached."""

    to: Peer
    message: Message


class Timer(NamedTuple):
    """Effect: call :meth:`Role.on_timer` at a time. It replaces the timer of the same name; None cancels that timer."""

    name: str
    at: float | None


class Return(NamedTuple):
    """Effect: end a call with its result, a message, or with the reason why there is no result."""

    call: int
    value: Message | str


class End(NamedTuple):
    """Effect: end the role; it returns no further effects."""

    reason: str
    clean: bool


Effect = Send | Timer | Return | End
Effects = list[Effect]


class Call(NamedTuple):
    """A request of a process to its own role; the result repeats ``number``."""

    number: int
    kind: str
    fields: Mapping[str, Any] = {}
    frames: Sequence[Buffer] = ()


class Role(Protocol):
    """A state machine whose methods return at once. Times are seconds of any clock that does not go back."""

    def start(self, now: float) -> Effects:
        """Begin."""

    def on_message(self, now: float, sender: Peer, message: Message) -> Effects:
        """Act on a message.

        Raises:
            ControlError: The message does not have the fields of its kind; the role has not changed.
        """

    def on_timer(self, now: float, name: str) -> Effects:
        """Act on a timer that is due, perhaps late."""


class CalledRole(Role, Protocol):
    """A role that its process calls."""

    def on_call(self, now: float, call: Call) -> Effects:
        """Act on a call of this process."""
