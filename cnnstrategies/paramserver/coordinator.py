"""The coordinator: who takes part, and what all of them must agree on. ps-lite calls it the scheduler.

One small process. Servers and workers register here and send heartbeats; they receive numbered views of the
membership, and workers gather small values through it. Collectives are numbered, and each is complete when every
worker of the group has contributed, or has left or died: a death ends nobody's wait for ever.

A worker that is started again takes part in the set-up by replaying it: the results of all collectives up to the
start of training are kept, so what it is told is what the others were told. It is let into the group at the next
boundary, a collective at which nobody is in the middle of a step, once every server has seen the view with it.

A coordinator serves one session: when every worker has left, its servers end, and whoever comes later is told. A script
may have several sessions, one after the other, each with a coordinator of its own at the same place; a worker that is
ahead of the others knocks until the one of its session is there.
"""

import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Self

import zmq

from cnnstrategies.paramserver.control import LARGEST_MESSAGE, parse, receive, send
from cnnstrategies.paramserver.coordinator_handlers import CoordinatorHandlers
from cnnstrategies.paramserver.coordinator_settings import CoordinatorSettings
from cnnstrategies.paramserver.limits import allow_files, files_of_coordinator
from cnnstrategies.paramserver.security import Gatekeeper, KeyPair

BIND_SECONDS = 60.0  # for a coordinator of an earlier session to make room


class Coordinator:
    """Registration, views, collectives and chunks of data for one run; see the module's text.

    Args:
        settings: Numbers and the endpoint.
        keys: The run's CURVE keys: only processes that have them too are let in. None for no encryption.

    Raises:
        ConfigurationError: It may not open as many files as there are connections.
    """

    def __init__(self, settings: CoordinatorSettings, keys: KeyPair | None = None) -> None:
        allow_files(files_of_coordinator(settings.workers, settings.servers), "the coordinator")
        self._tick = max(0.02, settings.timeout / 20)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_MESSAGE)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._gatekeeper = None
        if keys is not None:
            public = keys.public
            self._gatekeeper = Gatekeeper(self._context, lambda key: key == public)
            self._socket.curve_server = True
            self._socket.curve_publickey = keys.public.encode()
            self._socket.curve_secretkey = keys.secret.encode()
            self._socket.zap_domain = b"cnnstrategies"
        self._bind(settings)
        self.endpoint = str(self._socket.get_string(zmq.LAST_ENDPOINT))
        self.dropped = 0
        self._handlers = CoordinatorHandlers(settings, partial(send, self._socket, copy=False))

    def _bind(self, settings: CoordinatorSettings) -> None:
        """Bind; the coordinator of the session before makes room when the first worker of this one knocks there."""
        deadline = time.monotonic() + (BIND_SECONDS if settings.session else 0)
        while True:
            try:
                if _is_listened_at(settings.endpoint):
                    raise zmq.ZMQError(zmq.EADDRINUSE)  # Two runs that meet at one place; libzmq would take it over.
                self._socket.bind(settings.endpoint)
                return
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE or time.monotonic() > deadline:
                    raise
            time.sleep(self._tick)

    def run(self, orphaned: Callable[[], bool] = lambda: False) -> None:
        """Serve until told to stop.

        Args:
            orphaned: Asked several times a second; True ends the service.
        """
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        if self._gatekeeper is not None:
            poller.register(self._gatekeeper.socket, zmq.POLLIN)
        while not (self._handlers.stopped or orphaned()):
            ready = dict(poller.poll(int(self._tick * 1000)))
            if self._gatekeeper is not None and self._gatekeeper.socket in ready:
                self._gatekeeper.answer()
            if self._socket in ready:
                for _ in range(200):
                    try:
                        parts = receive(self._socket)
                    except zmq.Again:
                        break
                    self.handle(parts)
            self._handlers.look_for_the_silent()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        if self._gatekeeper is not None:
            self._gatekeeper.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def handle(self, parts: Sequence[bytes]) -> None:
        """Act on one message; what is not one is counted and dropped."""
        try:
            self._handlers.handle(parse(parts, routed=True))
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            IndexError,
            OverflowError,
        ):  # ControlError is the first
            self.dropped += 1


def _is_listened_at(endpoint: str) -> bool:
    """Whether a process listens at an ipc endpoint; that of one that was killed is only a file."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(endpoint.removeprefix("ipc://"))
        except OSError:
            return False
        return endpoint.startswith("ipc://")
