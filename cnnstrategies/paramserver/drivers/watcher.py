"""Asks a run's coordinator how the run goes, without taking part in it."""

import contextlib
import secrets
import time
from collections.abc import Mapping
from typing import Self

import zmq

from cnnstrategies.paramserver.coordinator.settings import SECRET_BITS, Address
from cnnstrategies.paramserver.coordinator.window import PLACE, WATCH, WATCHER
from cnnstrategies.paramserver.core.node import ControlError, Message, Peer
from cnnstrategies.paramserver.core.requests import DONE
from cnnstrategies.paramserver.drivers.control import connect, parse, receive, send
from cnnstrategies.paramserver.security import KeyPair


class Watcher:
    """A connection to a coordinator, for questions.

    Args:
        coordinator: The coordinator's endpoint.
        keys: The run's; None for no encryption.
    """

    def __init__(self, coordinator: str, keys: KeyPair | None = None) -> None:
        self._address = Address(coordinator, WATCHER, 0)
        self._keys = keys
        self._peer = Peer(WATCHER, 0, 0, secrets.randbits(SECRET_BITS))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._asked = 0

    def ask(self, seconds: float, events: bool = False) -> Message | None:
        """How the run goes; see :class:`~cnnstrategies.paramserver.coordinator.window.Window`.

        Args:
            seconds: To wait for an answer.
            events: Ask for all that has happened to members, too.

        Returns:
            The answer; None if none came.
        """
        return self._ask(WATCH, {"events": events}, seconds)

    def place(self, seconds: float) -> Message | None:
        """A place in the run for a worker that joins it; see :meth:`ask`."""
        return self._ask(PLACE, {}, seconds)

    def _ask(self, kind: str, fields: Mapping[str, object], seconds: float) -> Message | None:
        if self._socket is None:
            self._socket = connect(self._address, self._context, self._keys, self._keys)
        self._asked += 1
        send(self._socket, self._peer, Message(kind, fields, request=self._asked))
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if not self._socket.poll(int(1000 * left) + 1):
                continue
            with contextlib.suppress(ControlError):
                _, answer = parse(receive(self._socket).frame)
                if answer.kind == DONE and answer.request == self._asked:
                    return answer
        self._socket.close(0)  # What was not delivered must not reach a coordinator that comes later.
        self._socket = None
        return None

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close(0)
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
