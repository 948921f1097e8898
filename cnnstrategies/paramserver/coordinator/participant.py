"""The members' side of the protocol with the coordinator: registration, heartbeats, views and requests."""

from collections.abc import Callable, Mapping
from typing import Any

from cnnstrategies.paramserver.coordinator.settings import Address
from cnnstrategies.paramserver.core.node import Call, Effects, End, Liveness, Message, Peer, Return, Send, Timer
from cnnstrategies.paramserver.core.requests import MOST_SECONDS, REFUSED, REPLIES, TIMER, Asking, Request
from cnnstrategies.paramserver.core.view import View

COORDINATOR = Peer("coordinator", 0)
BEAT = "beat"
VIEW = 0  # Number of the call in a `Return` effect with a new view. Calls whose result nobody needs also have number 0.
# If the timer for a heartbeat is late by more than this fraction of the time-out, this process was stopped meanwhile.
STOPPED_FRACTION = 0.25
# When a process leaves the run, it waits at most this fraction of the time-out for the coordinator's reply.
LEAVING_FRACTION = 0.5
LEFT_UNHEARD = "this process has left without a reply from the coordinator, which may have ended before"


class Participant:
    """The role of a worker or server in the protocol with the coordinator.

    A :class:`Call` of the process becomes a request of the same kind to the coordinator. The call ``seen`` is an
    exception: with it, the process reports that it now acts on the view with the number in the field ``number``.

    Args:
        address: Identity of this process, and the coordinator's endpoint.
        process: Random number that distinguishes this process from other processes with the same identity.
        hello: Fields of the registration.

    Attributes:
        peer: Identity of this process in messages.
        view: The newest view; None before the coordinator has accepted the registration.
        ended: The effect with which this role has ended; None before the end.
        signal: Number of the signal after which all members must stop; 0 if no member has received a signal.
        seen: Number of the newest view on which this process acts.
        figures: Function that returns this process's figures; see :func:`.status.figures_of`.
        losses: Number of processes that the run has lost, according to the coordinator's last message.
        unheard: Whether this role has ended because the coordinator was silent for too long.
    """

    def __init__(self, address: Address, process: int, hello: Mapping[str, Any]) -> None:
        self.peer = Peer(address.role, address.id, address.incarnation, process)
        self.view: View | None = None
        self.ended: End | None = None
        self.signal = 0
        self._asking = Asking(COORDINATOR, {"session": address.session}, min(MOST_SECONDS, 2 * address.heartbeat))
        self._address = address
        self._hello = hello
        self.seen = 0
        self.figures: Callable[[], Mapping[str, float]] = dict
        self.losses = 0
        self.unheard = False
        heartbeat = address.heartbeat
        self._liveness: Liveness[Peer] = Liveness(heartbeat + STOPPED_FRACTION * address.timeout, heartbeat)
        self._sequence = 0
        self._taken_chunks: dict[int, int] = {}

    def start(self, now: float) -> Effects:
        """Send the registration and set the timer for heartbeats."""
        self._hear(now)
        return [*self._asking.ask(now, "hello", self._hello), Timer(BEAT, now + self._address.heartbeat)]

    def on_message(self, now: float, sender: Peer, message: Message) -> Effects:
        """Act on a message from the coordinator."""
        self._hear(now)
        if message.kind in REPLIES:
            request, effects = self._asking.on_reply(now, message)
            return effects + (self._answered(now, request, message) if request is not None else [])
        if message.kind == "pong" and "losses" in message.fields:
            self.losses = max(self.losses, message.integer("losses"))
        if message.kind == "view":
            return self._take_view(message)
        if message.kind == "ended":
            return self._accept_end(message)
        if message.kind == "stopping":
            self.signal = message.integer("signal")
        return []

    def on_timer(self, now: float, name: str) -> Effects:
        """Send a heartbeat or a probe, depending on the timer. End the role if the coordinator was silent for too long.

        Until the coordinator has accepted the registration, the limit is `Address.appear` seconds. After that, the
        limit is the time-out.
        """
        if self.ended is not None:
            return []
        self._liveness.pass_to(now)
        if name == TIMER:
            return self._asking.on_timer(now)
        leaving = any(request.message.kind == "leave" for request in self._asking.open.values())
        if leaving and self._liveness.silent(LEAVING_FRACTION * self._address.timeout):
            return self._end(LEFT_UNHEARD, clean=True)
        patience = self._address.timeout if self.view is not None else self._address.appear
        if self._liveness.silent(patience):
            self.unheard = True
            cause = "it died, or the connection to it is cut"
            if self.view is None:
                cause = (
                    "start the run on rank 0's machine, open its port there, and give all processes the same key_file"
                )
            return self._end(
                f"the coordinator at {self._address.coordinator} was silent for {patience:g} s: {cause}", clean=False
            )
        return [*self._beat(), Timer(BEAT, now + self._address.heartbeat)]

    def on_call(self, now: float, call: Call) -> Effects:
        """Send a request to the coordinator, or report the view on which this process acts."""
        if self.ended is not None:
            return [Return(call.number, self.ended.reason)]
        if call.kind == "leave" and self.view is None:
            return self._end("this process has left before the coordinator accepted its registration", clean=True)
        if call.kind == "seen":
            self.seen = max(self.seen, call.fields["number"])
            return self._beat()
        fields = {**call.fields}
        if call.kind == "collect":
            fields["sequence"] = self._sequence
        elif call.kind == "take":
            fields["ordinal"] = self._taken_chunks.get(fields["epoch"], 0)
        return self._asking.ask(now, call.kind, fields, call.frames, call.number)

    @property
    def idle(self) -> bool:
        """Whether this process may end: the coordinator has replied to all requests that must not be lost at the end.

        These requests report that this process leaves, that the run must end, or that a signal has arrived.
        """
        kinds = ("leave", "end", "signal")
        requests = tuple(self._asking.open.values())
        return self.ended is not None or all(request.message.kind not in kinds for request in requests)

    def _answered(self, now: float, request: Request, message: Message) -> Effects:
        kind = request.message.kind
        if message.kind == REFUSED and kind == "hello":
            if message.flag("stranger"):
                # The run continues with its own processes, so it must not record that this process has ended.
                return self._end(message.string("message"), clean=False, stranger=True)
            return self._accept_end(message)
        if kind == "hello":
            return [*self._take_view(message), *self._beat(), *self._asking.resend()]
        if kind == "leave":
            return [Return(request.call, message), *self._end("this process has left", clean=True)]
        if message.kind == REFUSED:
            return [Return(request.call, message.string("message"))]
        if kind == "collect":
            self._sequence = message.integer("sequence") + 1
        elif kind == "take":
            epoch = request.message.integer("epoch")
            self._taken_chunks = {epoch: self._taken_chunks.get(epoch, 0) + 1}
        return [Return(request.call, message)]

    def _take_view(self, message: Message) -> Effects:
        view = View.from_dict(message.object("view"))
        if self.view is not None and view.number <= self.view.number:
            return []
        self.view = view
        return [Return(VIEW, message)]

    def _beat(self) -> Effects:
        if self.view is None:
            return []
        fields: dict[str, object] = {"here": self.view.number, "seen": self.seen, "signal": self.signal}
        if figures := self.figures():
            fields["figures"] = figures
        return [Send(COORDINATOR, Message("beat", {"session": self._address.session, **fields}))]

    def _hear(self, now: float) -> None:
        self._liveness.pass_to(now)
        self._liveness.hear(COORDINATOR)

    def _accept_end(self, message: Message) -> Effects:
        over = Send(COORDINATOR, Message("over", {"session": self._address.session}))
        return [over, *self._end(message.string("message"), message.flag("clean"))]

    def _end(self, reason: str, clean: bool, stranger: bool = False) -> Effects:
        if self.ended is not None:
            return []
        self.ended = End(reason, clean, stranger)
        calls = [Return(request.call, reason) for request in self._asking.open.values()]
        self._asking.open.clear()
        return [*calls, self.ended, Timer(BEAT, None), Timer(TIMER, None)]


class Reporter:
    """The role of a supervision process in the protocol with the coordinator.

    A :class:`Call` of the process becomes a request of the same kind to the coordinator.
    """

    def __init__(self, session: int) -> None:
        self._asking = Asking(COORDINATOR, {"session": session})

    def start(self, now: float) -> Effects:
        """Send again all requests that have no reply yet. Call this after every new connection to the coordinator."""
        return self._asking.resend()

    def on_message(self, now: float, sender: Peer, message: Message) -> Effects:
        """Act on a reply from the coordinator."""
        if message.kind not in REPLIES:
            return []
        request, effects = self._asking.on_reply(now, message)
        return effects if request is None else [*effects, Return(request.call, message)]

    def on_timer(self, now: float, name: str) -> Effects:
        """Ask the coordinator about the requests that have no reply yet. If there are none, nothing is sent."""
        return self._asking.on_timer(now)

    def on_call(self, now: float, call: Call) -> Effects:
        """Send a request to the coordinator.

        A new request for the run's status replaces an earlier status request that has no reply yet.
        """
        if call.kind == "status":
            self._asking.drop("status")
        return self._asking.ask(now, call.kind, call.fields, call.frames, call.number)
