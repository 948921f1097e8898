"""A process's side of the coordinator: it registers, sends heartbeats, keeps the newest view and asks."""

from collections.abc import Callable, Mapping
from typing import Any

from cnnstrategies.paramserver.coordinator.settings import Address
from cnnstrategies.paramserver.core.node import Call, Effects, End, Message, Peer, Return, Send, Timer
from cnnstrategies.paramserver.core.requests import MOST, REFUSED, REPLIES, TIMER, Asking, Request
from cnnstrategies.paramserver.core.view import View

COORDINATOR = Peer("coordinator", 0)
BEAT = "beat"
VIEW = 0  # the number of the call that a new view answers: nobody has asked
PAUSE = 0.25  # of the time-out
LEAVING = 0.5  # of the time-out: for the coordinator to be heard by one that leaves
LEFT_UNHEARD = "this process has left, and the coordinator may have gone before"


class Participant:
    """A member of a run: a role.

    Its calls are the coordinator's kinds of requests, and ``seen``: this process has taken up the view ``number``. Its
    number (`process`) tells it from another that claims to be the same.

    Attributes:
        view: The newest view; None before the coordinator has answered.
        ended: Why the run is over; None before.
        signal: After which all are to stop, and that some process has received; 0 if none has.
        seen: Number of the newest view that this process has taken up.
        figures: Gives what this process says of itself; see :data:`.status.FIGURES`.
        losses: How many processes the run has lost, as far as is known here.
    """

    def __init__(self, address: Address, process: int, hello: Mapping[str, Any]) -> None:
        self.peer = Peer(address.role, address.id, address.incarnation, process)
        self.view: View | None = None
        self.ended: End | None = None
        self.signal = 0
        self._asking = Asking(COORDINATOR, {"session": address.session}, min(MOST, 2 * address.heartbeat))
        self._address = address
        self._hello = hello
        self.seen = 0
        self.figures: Callable[[], Mapping[str, float]] = dict
        self.losses = 0
        self.heard = self._beat_at = 0.0
        self._sequence = 0
        self._taken: dict[int, int] = {}

    def start(self, now: float) -> Effects:
        """Register."""
        self.heard = now
        return [*self._asking.ask(now, "hello", self._hello), *self._beat_later(now)]

    def on_message(self, now: float, sender: Peer, message: Message) -> Effects:
        """Take what the coordinator says."""
        self.heard = now
        if message.kind in REPLIES:
            request, effects = self._asking.on_reply(now, message)
            return effects + (self._answered(now, request, message) if request is not None else [])
        if message.kind == "pong" and "losses" in message.fields:
            self.losses = max(self.losses, message.integer("losses"))
        if message.kind == "view":
            return self._take_view(message)
        if message.kind == "ended":
            return self._told_end(message)
        if message.kind == "stopping":
            self.signal = message.integer("signal")
        return []

    def on_timer(self, now: float, name: str) -> Effects:
        """Send a heartbeat, or ask what became of the requests."""
        if self.ended is not None:
            return []
        if name == TIMER:
            return self._asking.on_timer(now)
        late = now - self._beat_at
        if late > PAUSE * self._address.timeout:
            # This process was stopped, not the coordinator silent; what had come meanwhile it may have heard just now.
            self.heard = min(now, self.heard + late)
        leaving = any(one.message.kind == "leave" for one in self._asking.open.values())
        if leaving and now - self.heard > LEAVING * self._address.timeout:
            return self._end(LEFT_UNHEARD, clean=True)
        patience = self._address.timeout if self.view is not None else self._address.appear
        if now - self.heard > patience:
            why = "it died, or the connection to it is cut"
            if self.view is None:
                why = "start the run on rank 0's machine, open its port there, and give all processes the same key_file"
            return self._end(
                f"the coordinator at {self._address.coordinator} was silent for {patience:g} s: {why}", clean=False
            )
        return [*self._beat(), *self._beat_later(now)]

    def on_call(self, now: float, call: Call) -> Effects:
        """Ask the coordinator, or tell it what this process has done."""
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
            fields["ordinal"] = self._taken.get(fields["epoch"], 0)
        return self._asking.ask(now, call.kind, fields, call.frames, call.number)

    @property
    def idle(self) -> bool:
        """Whether this process may go: what it has told has been heard."""
        told = ("leave", "end", "signal")
        return self.ended is not None or all(one.message.kind not in told for one in tuple(self._asking.open.values()))

    def _answered(self, now: float, request: Request, message: Message) -> Effects:
        kind = request.message.kind
        if message.kind == REFUSED and kind == "hello":
            return self._told_end(message)
        if kind == "hello":
            return [*self._take_view(message), *self._beat(), *self._asking.again()]
        if kind == "leave":
            return [Return(request.call, message), *self._end("this process has left", clean=True)]
        if message.kind == REFUSED:
            return [Return(request.call, message.string("message"))]
        if kind == "collect":
            self._sequence = message.integer("sequence") + 1
        elif kind == "take":
            epoch = request.message.integer("epoch")
            self._taken = {epoch: self._taken.get(epoch, 0) + 1}
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

    def _beat_later(self, now: float) -> Effects:
        self._beat_at = now + self._address.heartbeat
        return [Timer(BEAT, self._beat_at)]

    def _told_end(self, message: Message) -> Effects:
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
        """Ask again, on a new connection, what was not answered on the last."""
        return self._asking.again()

    def on_message(self, now: float, sender: Peer, message: Message) -> Effects:
        """Take a reply."""
        if message.kind not in REPLIES:
            return []
        request, effects = self._asking.on_reply(now, message)
        return effects if request is None else [*effects, Return(request.call, message)]

    def on_timer(self, now: float, name: str) -> Effects:
        """Ask what became of the requests."""
        return self._asking.on_timer(now)

    def on_call(self, now: float, call: Call) -> Effects:
        """Tell or ask the coordinator; a question about the present takes the place of an older one."""
        if call.kind == "status":
            self._asking.drop("status")
        return self._asking.ask(now, call.kind, call.fields, call.frames, call.number)
