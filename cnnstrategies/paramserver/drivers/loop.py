"""Runs a role in a process: calls it when messages, timers and calls come, and carries out what it says."""

import time
from collections.abc import Callable

from cnnstrategies.paramserver.core.node import (
    Call,
    Effects,
    End,
    Message,
    Peer,
    Return,
    Role,
    Send,
    Timer,
)


class Loop:
    """A role with its timers. Used by one thread.

    Args:
        role: What is run.
        send: Sends a message to a peer; must not wait.
        on_return: Takes the result of a call.
        on_end: Hears of the role's end.

    Attributes:
        role: What is run.
        send: Sends a message to a peer.
    """

    def __init__(
        self,
        role: Role,
        send: Callable[[Peer, Message], None],
        on_return: Callable[[Return], None] = lambda result: None,
        on_end: Callable[[End], None] = lambda end: None,
    ) -> None:
        self.role = role
        self.send = send
        self._on_return = on_return
        self._on_end = on_end
        self._timers: dict[str, float] = {}

    def start(self) -> None:
        """Begin."""
        self._act(self.role.start(time.monotonic()))

    def message(self, sender: Peer, message: Message) -> None:
        """A message has come.

        Raises:
            ControlError: It is none. Whatever else is raised is a mistake of the role's own.
        """
        self._act(self.role.on_message(time.monotonic(), sender, message))

    def call(self, call: Call) -> None:
        """This process asks for something."""
        self._act(self.role.on_call(time.monotonic(), call))

    def fire(self) -> None:
        """Call the role for the timers whose time has come."""
        now = time.monotonic()
        for name in [name for name, at in self._timers.items() if at <= now]:
            del self._timers[name]
            self._act(self.role.on_timer(now, name))

    def until_next(self, most: float) -> float:
        """Seconds until the next timer, at most some."""
        return max(0.0, min(min(self._timers.values(), default=float("inf")) - time.monotonic(), most))

    def _act(self, effects: Effects) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self.send(effect.to, effect.message)
                case Timer(name, None):
                    self._timers.pop(name, None)
                case Timer(name, float(at)):
                    self._timers[name] = at
                case Return():
                    self._on_return(effect)
                case End():
                    self._on_end(effect)
