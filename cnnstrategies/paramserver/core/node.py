"""Roles: state machines that receive messages, timers and calls, and return the effects to carry out.

A role does not use sockets, threads, clocks, files or random numbers. A driver runs a role over sockets, and the
simulator runs a role in virtual time. The driver or simulator passes the current time to every method of the role, and
carries out the effects that the method returns.

Each role has a book of liveness: when it last heard from other processes. The coordinator decides by its book which
members are lost. The others decide by their books whom to ask again, and when to give up.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

Buffer = bytes | bytearray | memoryview
INTEGER_LIMIT = 1 << 63  # Integers in messages are below this number.


class ControlError(ValueError):
    """Error for an invalid message: a field is missing or invalid, or the sender may not send this kind of message."""


State = TypeVar("State", bound=StrEnum)
Event = TypeVar("Event", bound=StrEnum)
Process = TypeVar("Process")
Value = TypeVar("Value")


class StateTable(Generic[State, Event]):
    """The states of one part of a role, and the events that may happen in each state.

    docs/development/draw_states.py draws the tables.

    Args:
        part: Name of the part, for error messages and drawings.
        start: The first state.
        rows: By state, then by event: the next state.

    Attributes:
        part: Name of the part.
        start: The first state.
        rows: By state, then by event: the next state.
    """

    def __init__(self, part: str, start: State, rows: Mapping[State, Mapping[Event, State]]) -> None:
        self.part = part
        self.start = start
        self.rows = rows

    def after(self, state: State, event: Event) -> State:
        """Return the state after an event.

        Raises:
            RuntimeError: The table has no entry for this event in this state, which is a mistake of this package.
        """
        following = self.rows[state].get(event)
        if following is None:
            allowed = ", ".join(self.rows[state])
            raise RuntimeError(f"{self.part}: the event {event!s} cannot happen in the state {state!s}, only {allowed}")
        return following


class Liveness(Generic[Process]):
    """Times of other processes' last messages, by a clock that stands still while this process is stopped.

    A process that is stopped, for example by SIGSTOP or because its machine is suspended, reads no messages. Such a
    pause therefore does not count as silence of the other processes. A role that is called at intervals recognises a
    pause by the time between two calls.

    Args:
        pause: If more seconds than this pass between two calls, this process was stopped meanwhile.
        usual: Number of seconds of a pause that count as silence nevertheless. With 0, a process whose calls are always
            late, as on an overloaded machine, would wait for a lost process without end.

    Attributes:
        now: The current time, in seconds, without the pauses.
        heard: By process: time of its last message, or a later time from which its silence is counted.
        runs: Whether the clock was started.
    """

    def __init__(self, pause: float, usual: float = 0.0) -> None:
        self.now = 0.0
        self.heard: dict[Process, float] = {}
        self.runs = False
        self._pause, self._usual = pause, usual
        self._last = self._stopped = 0.0

    def pass_to(self, now: float) -> None:
        """Record the current time, which includes the pauses."""
        if self.runs and now - self._last > self._pause:
            self._stopped += now - self._last - self._usual
        self._pass_to(now)

    def listen(self, now: float) -> None:
        """Record the current time, and count the silence of all processes from now on.

        A process that reads messages only at times calls this method when it begins to read.
        """
        self._pass_to(now)
        self.heard = dict.fromkeys(self.heard, self.now)

    def _pass_to(self, now: float) -> None:
        self.runs, self._last, self.now = True, now, self.awake(now)

    def awake(self, now: float) -> float:
        """Return a time without the recorded pauses."""
        return now - self._stopped

    def hear(self, process: Process) -> None:
        """Record a message from a process, or that its silence is counted from now on."""
        self.heard[process] = self.now

    def silent(self, seconds: float) -> list[Process]:
        """Return the processes from which no message has arrived for longer than this time."""
        return [process for process, time in self.heard.items() if self.now - time > seconds]


class Lasting(Generic[Value]):
    """The value of something, and the time since which it has had this value.

    Args:
        value: The first value.
    """

    def __init__(self, value: Value) -> None:
        self._value = value
        self._since = 0.0

    def seconds(self, now: float, value: Value) -> float:
        """Record the current value, and return the number of seconds for which it has been the same."""
        if value != self._value:
            self._value, self._since = value, now
        return now - self._since


class Peer(NamedTuple):
    """The identity of a process that takes part in a run.

    Attributes:
        role: ``worker``, ``server``, ``supervision`` or ``coordinator``.
        id: Number of the process among the processes with the same role.
        incarnation: Number of earlier processes with the same role and id.
        process: Number that distinguishes two processes with the same role, id and incarnation.
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
        fields: Contents of the message by name, as values that JSON can represent.
        frames: Binary contents of the message.
        request: Number of the request. The reply to a request has the request's number. All other messages have the
            number 0, and are not sent again if they are lost.
    """

    kind: str
    fields: Mapping[str, Any] = {}
    frames: Sequence[Buffer] = ()
    request: int = 0

    def integer(self, name: str, least: int = 0) -> int:
        """Return a field that must be an integer from `least` to 2^63 - 1.

        Raises:
            ControlError: The field is missing, or its type or value is wrong. The other methods that return a field
                also raise this error, except :meth:`flag`.
        """
        value = self.fields.get(name)
        if type(value) is not int or not least <= value < INTEGER_LIMIT:
            raise ControlError(f"{self.kind}: {name}={value!r} is not an integer from {least} to 2^63 - 1")
        return value

    def real(self, name: str) -> float:
        """Return a field as a float. The field must be a number of at least 0 (if an integer, below 2^63), or NaN.

        NaN is allowed, because norms and clipping factors can be NaN.
        """
        value = self.fields.get(name)
        if type(value) is int and 0 <= value < INTEGER_LIMIT:
            return float(value)
        if type(value) is not float or value < 0:
            raise ControlError(f"{self.kind}: {name} must be NaN or a number of at least 0")
        return value

    def string(self, name: str) -> str:
        """Return a field that must be a string."""
        value = self.fields.get(name)
        if not isinstance(value, str):
            raise ControlError(f"{self.kind}: {name}={value!r} is not a string")
        return value

    def flag(self, name: str) -> bool:
        """Return whether a field has the value true. A missing field counts as false."""
        return self.fields.get(name) is True

    def integers(self, name: str) -> list[int]:
        """Return a field that must be a list of at most 65,536 integers, each from 0 to 2^63 - 1."""
        value = self.fields.get(name)
        if not isinstance(value, list) or len(value) > 1 << 16 or not _is_row(value, (int,) * len(value)):
            raise ControlError(f"{self.kind}: {name} is not a list of at most 65,536 integers from 0 to 2^63 - 1")
        return value

    def object(self, name: str) -> Mapping[str, Any]:
        """Return a field that must be a JSON object."""
        value = self.fields.get(name)
        if not isinstance(value, dict):
            raise ControlError(f"{self.kind}: {name} is not a JSON object")
        return value

    def part(self, name: str) -> "Message | None":
        """Return a field that must be a JSON object, as a message whose fields are the object's entries.

        Return None if the field is missing or null.
        """
        return None if self.fields.get(name) is None else Message(self.kind, self.object(name))

    def table(self, name: str, *columns: type) -> list[tuple[Any, ...]]:
        """Return a field that must be a list of rows with one value for each column.

        Args:
            name: Name of the field.
            columns: Types of the columns. An integer must be from 0 to 2^63 - 1.
        """
        value = self.fields.get(name)
        if not isinstance(value, list) or not all(_is_row(row, columns) for row in value):
            types = ", ".join(column.__name__ for column in columns)
            raise ControlError(f"{self.kind}: {name} is not a list of rows with the types {types}")
        return [tuple(row) for row in value]


def _is_row(row: Any, columns: Sequence[type]) -> bool:
    if not isinstance(row, list | tuple) or tuple(map(type, row)) != columns:
        return False
    return all(type(value) is not int or 0 <= value < INTEGER_LIMIT for value in row)


class Send(NamedTuple):
    """Effect: send a message to a peer. The message is dropped if the peer cannot be reached."""

    to: Peer
    message: Message


class Timer(NamedTuple):
    """Effect: set a timer, which calls :meth:`Role.on_timer` once. An earlier timer with the same name is replaced.

    Attributes:
        name: Name of the timer.
        at: Time in seconds at which the timer expires; None to cancel the timer.
    """

    name: str
    at: float | None


class Return(NamedTuple):
    """Effect: pass the result of a call to the process that made the call.

    Attributes:
        call: Number of the call.
        value: The result; an error message (str) if the call failed.
    """

    call: int
    value: Message | str


class End(NamedTuple):
    """Effect: end the role. The role does not return any later effects.

    Attributes:
        reason: The reason why the role ends, as a text for the user.
        clean: Whether the role ends as planned.
        stranger: Whether the process does not belong to the run, which goes on without it.
    """

    reason: str
    clean: bool
    stranger: bool = False


Effect = Send | Timer | Return | End
Effects = list[Effect]


class Call(NamedTuple):
    """A request that a process makes to its own role. A :class:`Return` effect with the call's number ends the call."""

    number: int
    kind: str
    fields: Mapping[str, Any] = {}
    frames: Sequence[Buffer] = ()


class Role(Protocol):
    """A state machine whose methods return without waiting. Times are in seconds on a monotonic clock."""

    def start(self, now: float) -> Effects:
        """Start the role, and return its first effects.

        The driver calls this before it passes on any message or timer.
        """

    def on_message(self, now: float, sender: Peer, message: Message) -> Effects:
        """Act on a message, and return the effects.

        Raises:
            ControlError: The message is invalid. The role's state has not changed.
        """

    def on_timer(self, now: float, name: str) -> Effects:
        """Act on a timer that has expired, and return the effects.

        The driver may call this later than the time for which the timer was set, but never earlier.
        """


class CalledRole(Role, Protocol):
    """A role that also receives calls from its own process."""

    def on_call(self, now: float, call: Call) -> Effects:
        """Act on a call from the role's own process, and return the effects."""
