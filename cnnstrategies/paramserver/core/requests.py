"""Requests between two processes whose messages may be lost, duplicated, delayed or reordered.

The asking side numbers its requests, and keeps each request until the reply arrives. While requests are open (have no
reply), the asking side regularly sends a ``probe``: a message with the numbers of the open requests. The answering side
replies to the probe with the numbers of two kinds of requests: requests that never arrived, and requests whose replies
may be lost. The asking side then sends these requests again. The answering side does not keep replies, so its handlers
must give the same reply to a repeated request.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cnnstrategies.paramserver.core.node import Buffer, Effects, Message, Peer, Send, Timer

DONE, REFUSED, UNKNOWN, PROBE = "done", "refused", "unknown", "probe"
REPLIES = frozenset((DONE, REFUSED, UNKNOWN))
TIMER = "requests"
LEAST_SECONDS, MOST_SECONDS = 0.05, 1.0  # shortest and longest time between two probes
ROUND_TRIPS = 4  # time between a request and the first probe, as a multiple of the connection's round-trip time
SMALL_ANSWER = 1 << 16  # largest total size of the frames of a small reply, in bytes
# Number of probes during which a large reply counts as still on its way to the asking process. Each time the reply is
# sent again, the number doubles, because the link may be slower than expected.
PATIENCE = 4


@dataclass(frozen=True)
class Request:
    """A request whose reply has not arrived.

    Attributes:
        message: The request's message.
        call: Number of the call for which the request was sent; 0 if there is no call.
        asked: Time at which the request was first sent.
    """

    message: Message
    call: int
    asked: float


class Asking:
    """The asking side: this process's requests to one peer, with the probes and the repetition of lost requests.

    Args:
        peer: The process to which the requests are sent.
        common: Fields that every message to the peer contains.
        most: Longest time between two probes, in seconds.

    Attributes:
        open: By request number: the requests whose replies have not arrived.
    """

    def __init__(self, peer: Peer, common: Mapping[str, Any], most: float = MOST_SECONDS) -> None:
        self.peer = peer
        self.open: dict[int, Request] = {}
        self._common = common
        self._most = most
        self._last = 0
        self._interval = LEAST_SECONDS
        self._round_trip = 0.0
        self._probed = False

    def ask(
        self, now: float, kind: str, fields: Mapping[str, Any], frames: Sequence[Buffer] = (), call: int = 0
    ) -> Effects:
        """Send a new request.

        Args:
            now: The current time.
            kind: Kind of the request.
            fields: Contents of the request, without the common fields.
            frames: Binary contents of the request.
            call: Number of the call for which the request is sent; 0 if there is no call.
        """
        self._last += 1
        floor = min(self.open, default=self._last)
        message = Message(kind, {**self._common, **fields, "floor": floor}, frames, self._last)
        idle = not self.open
        self.open[self._last] = Request(message, call, now)
        if not idle:
            return [Send(self.peer, message)]
        self._interval = min(max(LEAST_SECONDS, ROUND_TRIPS * self._round_trip), self._most)
        self._probed = False
        return [Send(self.peer, message), Timer(TIMER, now + self._interval)]

    def on_reply(self, now: float, message: Message) -> tuple[Request | None, Effects]:
        """Act on a reply from the peer. Return the open request to which the message replies, and the effects.

        The first result is None if the request has already received a reply, or was dropped. It is also None for the
        reply to a probe. In this case, the effects send the lost requests again.
        """
        if message.kind == UNKNOWN:
            requested = [self.open[number].message for number in message.integers("ids") if number in self.open]
            return None, [Send(self.peer, request_message) for request_message in requested]
        request = self.open.pop(message.request, None)
        if request is not None and not self._probed:
            self._round_trip = now - request.asked
        return request, [] if self.open else [Timer(TIMER, None)]

    def on_timer(self, now: float) -> Effects:
        """Send a probe if requests are open, and set the timer for the next probe."""
        if not self.open:
            return []
        self._probed = True
        self._interval = min(2 * self._interval, self._most)
        numbers = sorted(self.open)
        probe = Message(PROBE, {**self._common, "ids": numbers, "floor": numbers[0]})
        return [Send(self.peer, probe), Timer(TIMER, now + self._interval)]

    def resend(self) -> Effects:
        """Send all open requests again, in the order of their numbers."""
        return [Send(self.peer, request.message) for _, request in sorted(self.open.items())]

    def drop(self, kind: str) -> None:
        """Forget the open requests of a kind. Replies to these requests are then ignored."""
        self.open = {number: request for number, request in self.open.items() if request.message.kind != kind}


@dataclass
class LargeReply:
    """A large reply that may still be on its way.

    On a slow link, a large reply may take longer than the time between two probes. So the reply counts as on its way
    during the next `patience` probes. Otherwise it would be sent again after every probe.

    Attributes:
        patience: Number of probes during which the reply counts as on its way.
        left: How many of these probes are left.
    """

    patience: int
    left: int


@dataclass
class _Side:
    """State of the requests from one peer.

    Attributes:
        floor: Lowest number of the peer's open requests. The peer has the replies to all requests below this number.
        held: Numbers of the requests that were accepted, and whose replies were not sent yet.
        large: By request number: the large replies that may still be on their way.
    """

    floor: int = 0
    held: set[int] = field(default_factory=set)
    large: dict[int, LargeReply] = field(default_factory=dict)

    def raise_floor(self, floor: int) -> None:
        """Forget the peer's requests with numbers below `floor`, because the peer has the replies to these requests.

        If `floor` is not above its value in an earlier call, nothing changes.
        """
        if floor > self.floor:
            self.floor = floor
            self.held = {number for number in self.held if number >= floor}
            self.large = {number: reply for number, reply in self.large.items() if number >= floor}

    def may_be_in_flight(self, number: int) -> bool:
        """Return whether the large reply to a request may still be on its way to the peer.

        Return False if the reply is small or was not sent. Each call counts as one probe, so call this exactly once for
        each probe that contains the request's number.
        """
        reply = self.large.get(number)
        if reply is None or reply.left == 0:
            return False
        reply.left -= 1
        return True


class Answering:
    """The answering side: the requests that this process has received from any number of peers, and their replies.

    The state of a peer is kept until :meth:`forget` is called for the peer.
    """

    def __init__(self) -> None:
        self._sides: dict[Peer, _Side] = {}

    def accept(self, sender: Peer, message: Message) -> bool:
        """Record that a request has arrived. Return whether the caller must handle the request.

        A request must not be handled if the peer already has the reply, or if an earlier copy of the request is still
        being handled.

        Raises:
            ControlError: The request does not contain a valid ``floor``.
        """
        floor = message.integer("floor")
        side = self._sides.setdefault(sender, _Side())
        side.raise_floor(floor)
        number = message.request
        if number < side.floor or number in side.held:
            return False
        side.held.add(number)
        return True

    def answer(self, peer: Peer, reply: Message) -> Effects:
        """Send the reply to a request for which :meth:`accept` has returned True."""
        side = self._sides.get(peer)
        if side is not None:
            side.held.discard(reply.request)
            if sum(len(frame) for frame in reply.frames) > SMALL_ANSWER and reply.request >= side.floor:
                before = side.large.get(reply.request)
                patience = PATIENCE if before is None else 2 * before.patience
                side.large[reply.request] = LargeReply(patience, patience)
        return [Send(peer, reply)]

    def probe(self, sender: Peer, message: Message) -> Effects:
        """Act on a probe: ask the peer to repeat the open requests that never arrived, or whose replies may be lost.

        If a reply was sent before the probe arrived, it counts as possibly lost, unless it is large and may still be on
        its way.
        """
        numbers, floor = message.integers("ids"), message.integer("floor")
        side = self._sides.get(sender, _Side())
        side.raise_floor(floor)
        held = [number for number in numbers if number in side.held or side.may_be_in_flight(number)]
        unknown = [number for number in numbers if number >= side.floor and number not in held]
        return [Send(sender, Message(UNKNOWN, {"ids": unknown}))] if unknown else []

    def forget(self, peer: Peer) -> None:
        """Drop the numbers of a peer's requests and replies, because the peer is no longer a member."""
        self._sides.pop(peer, None)

    @property
    def entries(self) -> int:
        """Number of objects that are kept in memory: peers, requests without a reply, and large replies."""
        return sum(1 + len(side.held) + len(side.large) for side in self._sides.values())
