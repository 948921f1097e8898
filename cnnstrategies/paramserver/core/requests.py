"""Requests between two processes whose messages may be lost, doubled, delayed or reordered.

The asking side numbers its requests and keeps each one until it is answered. A timer sends a ``probe`` with the numbers
of the open requests and without payload. The answering side then requests again those that never arrived, or whose
answers may be lost. It does not keep answers: handlers must give the same answer to a repeated request.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cnnstrategies.paramserver.core.node import Buffer, Effects, Message, Peer, Send, Timer

DONE, REFUSED, UNKNOWN, PROBE = "done", "refused", "unknown", "probe"
REPLIES = frozenset((DONE, REFUSED, UNKNOWN))
TIMER = "requests"
LEAST_SECONDS, MOST_SECONDS = 0.05, 1.0  # limits of the seconds between two probes
ROUND_TRIPS = 4
SMALL_ANSWER = 1 << 16  # bytes
PATIENCE = 4  # Number of probes for which a large answer may be in flight; it doubles with each repetition.


@dataclass(frozen=True)
class Request:
    """A request without an answer.

    Attributes:
        message: The request's message.
        call: Number of the call that it belongs to; 0 for none.
        asked: When it was sent.
    """

    message: Message
    call: int
    asked: float


class Asking:
    """The asking side of the requests to one peer.

    Args:
        peer: The peer.
        common: Fields of every message.
        most: Largest number of seconds between two probes.

    Attributes:
        open: The requests without an answer, by number.
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
        """Send a request."""
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
        """Act on a reply. Return the request that it answers, if any, and the effects."""
        if message.kind == UNKNOWN:
            requested = [self.open[number].message for number in message.integers("ids") if number in self.open]
            return None, [Send(self.peer, request_message) for request_message in requested]
        request = self.open.pop(message.request, None)
        if request is not None and not self._probed:
            self._round_trip = now - request.asked
        return request, [] if self.open else [Timer(TIMER, None)]

    def on_timer(self, now: float) -> Effects:
        """Send a probe of the open requests."""
        if not self.open:
            return []
        self._probed = True
        self._interval = min(2 * self._interval, self._most)
        numbers = sorted(self.open)
        probe = Message(PROBE, {**self._common, "ids": numbers, "floor": numbers[0]})
        return [Send(self.peer, probe), Timer(TIMER, now + self._interval)]

    def resend(self) -> Effects:
        """Send all open requests again, in order."""
        return [Send(self.peer, request.message) for _, request in sorted(self.open.items())]

    def drop(self, kind: str) -> None:
        """Stop waiting for the answers to requests of a kind."""
        self.open = {number: request for number, request in self.open.items() if request.message.kind != kind}


@dataclass
class LargeAnswer:
    """A large answer that may be in flight, so that a probe need not request it again.

    Without this, a link that needs longer for the answer than the time between two probes would carry it once for each
    probe.

    Attributes:
        patience: Number of probes for which the answer counts as in flight.
        left: How many of these probes are still to come.
    """

    patience: int
    left: int


@dataclass
class _Side:
    """State of the requests from one peer.

    Attributes:
        floor: The peer's lowest open request.
        held: Numbers of the requests that were handled, but not answered yet.
        large: Large answers that may be in flight, by the request's number.
    """

    floor: int = 0
    held: set[int] = field(default_factory=set)
    large: dict[int, LargeAnswer] = field(default_factory=dict)

    def raise_floor(self, floor: int) -> None:
        """Drop everything about requests below a new floor."""
        if floor > self.floor:
            self.floor = floor
            self.held = {number for number in self.held if number >= floor}
            self.large = {number: answer for number, answer in self.large.items() if number >= floor}

    def may_be_in_flight(self, number: int) -> bool:
        """Whether a large answer may still be in flight; to be called once for each probe."""
        answer = self.large.get(number)
        if answer is None or answer.left == 0:
            return False
        answer.left -= 1
        return True


class Answering:
    """The answering side, for any number of peers; it keeps a peer's state until the peer is forgotten."""

    def __init__(self) -> None:
        self._sides: dict[Peer, _Side] = {}

    def accept(self, sender: Peer, message: Message) -> bool:
        """Whether a request is to be handled: it is neither over nor handled already."""
        floor = message.integer("floor")
        side = self._sides.setdefault(sender, _Side())
        side.raise_floor(floor)
        number = message.request
        if number < side.floor or number in side.held:
            return False
        side.held.add(number)
        return True

    def answer(self, peer: Peer, reply: Message) -> Effects:
        """Send the answer to an accepted request."""
        side = self._sides.get(peer)
        if side is not None:
            side.held.discard(reply.request)
            if sum(len(frame) for frame in reply.frames) > SMALL_ANSWER and reply.request >= side.floor:
                before = side.large.get(reply.request)
                patience = PATIENCE if before is None else 2 * before.patience
                side.large[reply.request] = LargeAnswer(patience, patience)
        return [Send(peer, reply)]

    def probe(self, sender: Peer, message: Message) -> Effects:
        """Answer a probe: request again those of the peer's open requests that are unknown here."""
        numbers, floor = message.integers("ids"), message.integer("floor")
        side = self._sides.get(sender, _Side())
        side.raise_floor(floor)
        held = [number for number in numbers if number in side.held or side.may_be_in_flight(number)]
        unknown = [number for number in numbers if number >= side.floor and number not in held]
        return [Send(sender, Message(UNKNOWN, {"ids": unknown}))] if unknown else []

    def forget(self, peer: Peer) -> None:
        """Drop the state of a peer."""
        self._sides.pop(peer, None)

    @property
    def entries(self) -> int:
        """The number of entries that this side keeps."""
        return sum(1 + len(side.held) + len(side.large) for side in self._sides.values())
