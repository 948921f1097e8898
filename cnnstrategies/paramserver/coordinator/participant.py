"""A process's side of the coordinator's protocol: registration, heartbeats, the newest view, and requests."""

from collections.abc import Callable, Mapping
from typing import Any

from cnnstrategies.paramserver.coordinator.settings import Address
from cnnstrategies.paramserver.core.node import Call, Effects, End, Message, Peer, Return, Send, Timer
from cnnstrategies.paramserver.core.requests import MOST_SECONDS, REFUSED, REPLIES, TIMER, Asking, Request
from cnnstrategies.paramserver.core.view import View

COORDINATOR = Peer("coordinator", 0)
BEAT = "beat"
VIEW = 0  # call number of the effect that announces a new view; no call has this number
STOPPED_SHARE = 0.25  # share of the time-out; if the timer is late by more, this process was stopped
LEAVING_SHARE = 0.5  # share of the time-out for which a process that leaves waits for the coordinator's answer
LEFT_UNHEARD = "this process has left; the coordinator did not confirm it, and may have ended before"


class Participant:
    """A member of a run: a role.

    Its calls are the coordinator's kinds of requests, and ``seen``, which says that this process follows the view with
    the field ``number``.

    Args:
        address: This process's place, and the coordinator's.
        process: Number that distinguishes this process from another one that claims the same place.
        hello: Fields of the registration.

    Attributes:
        peer: This process.
        view: The newest view; None before the coordinator has answered.
        ended: Why the run is over; None before its end.
        signal: The signal that a process of the run has received, after which all are to stop; 0 if there is none.
        seen: Number of the newest view that this process follows.
        figures: Function that returns this process's figures; see :data:`.status.FIGURES`.
        losses: Number of processes that the run has lost, as far as is known here.
        heard: Time of the coordinator's last message.
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
        self.heard = self._next_beat = 0.0
        self._sequence = 0
        self._taken_chunks: dict[int, int] = {}

    def start(self, now: float) -> Effects:
        """Register."""
        self.heard = now
        return [*self._asking.ask(now, "hello", self._hello), *self._schedule_beat(now)]

    def on_message(self, now: float, sender: Peer, message: Message) -> Effects:
        """Act on a message of the coordinator."""
        self.heard = now
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
        """Send a heartbeat, or a probe of the open requests."""
        if self.ended is not None:
            return []
        if name == TIMER:
            return self._asking.on_timer(now)
        late = now - self._next_beat
        if late > STOPPED_SHARE * self._address.timeout:
            # This process was stopped; the coordinator was not silent. Its messages from that time may have been read
            # just now.
            self.heard = min(now, self.heard + late)
        leaving = any(request.message.kind == "leave" for request in self._asking.open.values())
        if leaving and now - self.heard > LEAVING_SHARE * self._address.timeout:
            return self._end(LEFT_UNHEARD, clean=True)
        patience = self._address.timeout if self.view is not None else self._address.appear
        if now - self.heard > patience:
            cause = "it died, or the connection to it is cut"
            if self.view is None:
                cause = (
                    "start the run on rank 0's machine, open its port there, and give all processes the same key_file"
                )
            return self._end(
                f"the coordinator at {self._address.coordinator} was silent for {patience:g} s: {cause}", clean=False
            )
        return [*self._beat(), *self._schedule_beat(now)]

    def on_call(self, now: float, call: Call) -> Effects:
        """Send a request to the coordinator, or report which view this process follows."""
        if self.ended is not None:
            return [Return(call.number, self.ended.reason)]
        if call.kind == "leave" and self.view is None:
            return self._end("this process has not taken part", clean=True)
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
        """Whether this process may end: the coordinator has confirmed its last messages."""
        kinds = ("leave", "end", "signal")
        requests = tuple(self._asking.open.values())
        return self.ended is not None or all(request.message.kind not in kinds for request in requests)

    def _answered(self, now: float, request: Request, message: Message) -> Effects:
        kind = request.message.kind
        if message.kind == REFUSED and kind == "hello":
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

    def _schedule_beat(self, now: float) -> Effects:
        self._next_beat = now + self._address.heartbeat
        return [Timer(BEAT, self._next_beat)]

    def _accept_end(self, message: Message) -> Effects:
        over = Send(COORDINATOR, Message("over", {"session": self._address.session}))
        return [over, *self._end(message.string("message"), message.flag("clean"))]

    def _end(self, reason: str, clean: bool) -> Effects:
        if self.ended is not None:
            return []
        self.ended = End(reason, clean)
        calls = [Return(request.call, reason) for request in self._asking.open.values()]
        self._asking.open.clear()
        return [*calls, self.ended, Timer(BEAT, None), Timer(TIMER, None)]


class Reporter:
    """A supervision: a role. Its calls are the coordinator's kinds of requests."""

    def __init__(self, session: int) -> None:
        self._asking = Asking(COORDINATOR, {"session": session})

    def start(self, now: float) -> Effects:
        """Send the open requests again, over a new connection."""
        return self._asking.resend()

    def on_message(self, now: float, sender: Peer, message: Message) -> Effects:
        """Act on a reply."""
        if message.kind not in REPLIES:
            return []
        request, effects = self._asking.on_reply(now, message)
        return effects if request is None else [*effects, Return(request.call, message)]

    def on_timer(self, now: float, name: str) -> Effects:
        """Send a probe of the open requests."""
        return self._asking.on_timer(now)

    def on_call(self, now: float, call: Call) -> Effects:
        """Send a request to the coordinator; a request for the present status replaces an older one."""
        if call.kind == "status":
            self._asking.drop("status")
        return self._asking.ask(now, call.kind, call.fields, call.frames, call.number)
