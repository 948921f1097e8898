"""Requests between two processes whose messages may be lost, doubled, late or in another order.

The asking end numbers its requests and keeps each until it is answered. A timer sends a ``probe`` with the numbers of
the open ones and no payload; the answering end asks anew for those whose requests never came, or whose answers may not
have come. It keeps no answer: handlers must give the same again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cnnstrategies.paramserver.core.node import Buffer, Effects, Message, Peer, Send, Timer

DONE, REFUSED, UNKNOWN, PROBE = "done", "refused", "unknown", "probe"
REPLIES = frozenset((DONE, REFUSED, UNKNOWN))
TIMER = "requests"
LEAST, MOST = 0.05, 1.0  # seconds between two probes
ROUND_TRIPS = 4
SMALL = 1 << 16  # bytes
PATIENCE = 4  # probes in which a large answer may be on its way; then twice as many, and so on


@dataclass(frozen=True)
class Request:
    """One that is not answered."""

    message: Message
    call: int
    asked: float


class Asking:
    """The asking end of the requests to one peer; all messages have some `common` fields.

    Args:
        most: Seconds between two probes, once there were some.
    """

    def __init__(self, peer: Peer, common: Mapping[str, Any], most: float = MOST) -> None:
        self.peer = peer
        self.open: dict[int, Request] = {}
        self._common = common
        self._most = most
        self._last = 0
        self._interval = LEAST
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
        self._interval = min(max(LEAST, ROUND_TRIPS * self._round_trip), self._most)
        self._probed = False
        return [Send(self.peer, message), Timer(TIMER, now + self._interval)]

    def on_reply(self, now: float, message: Message) -> tuple[Request | None, Effects]:
        """Take a reply: the request that it ends, if it ends one, and what is to be done."""
        if message.kind == UNKNOWN:
            again = [self.open[number].message for number in message.integers("ids") if number in self.open]
            return None, [Send(self.peer, one) for one in again]
        request = self.open.pop(message.request, None)
        if request is not None and not self._probed:
            self._round_trip = now - request.asked
        return request, [] if self.open else [Timer(TIMER, None)]

    def on_timer(self, now: float) -> Effects:
        """Ask about the open requests."""
        if not self.open:
            return []
        self._probed = True
        self._interval = min(2 * self._interval, self._most)
        numbers = sorted(self.open)
        probe = Message(PROBE, {**self._common, "ids": numbers, "floor": numbers[0]})
        return [Send(self.peer, probe), Timer(TIMER, now + self._interval)]

    def again(self) -> Effects:
        """Send all that is open once more, in order."""
        return [Send(self.peer, request.message) for _, request in sorted(self.open.items())]

    def drop(self, kind: str) -> None:
        """Wait no longer for the answers to requests of a kind."""
        self.open = {number: one for number, one in self.open.items() if one.message.kind != kind}


@dataclass
class Large:
    """A large answer, for how many probes it may be on its way, and how many of these are to come.

    On a link that it takes longer to cross than from one probe to the next, it would be sent again for each of them.
    """

    patience: int
    left: int


@dataclass
class _Side:
    floor: int = 0
    held: set[int] = field(default_factory=set)
    large: dict[int, Large] = field(default_factory=dict)

    def rise(self, floor: int) -> None:
        if floor > self.floor:
            self.floor = floor
            self.held = {number for number in self.held if number >= floor}
            self.large = {number: one for number, one in self.large.items() if number >= floor}

    def is_on_its_way(self, number: int) -> bool:
        """Whether a large answer may not have come yet; to be asked once for each probe."""
        answer = self.large.get(number)
        if answer is None or answer.left == 0:
            return False
        answer.left -= 1
        return True


class Answering:
    """The answering end, for any number of peers; what is kept of one ends with its life."""

    def __init__(self) -> None:
        self._sides: dict[Peer, _Side] = {}

    def take(self, sender: Peer, message: Message) -> bool:
        """Whether a request is to be handled, and is neither over nor handled already."""
        floor = message.integer("floor")
        side = self._sides.setdefault(sender, _Side())
        side.rise(floor)
        number = message.request
        if number < side.floor or number in side.held:
            return False
        side.held.add(number)
        return True

    def answer(self, peer: Peer, reply: Message) -> Effects:
        """Send the answer to a request that was held."""
        side = self._sides.get(peer)
        if side is not None:
            side.held.discard(reply.request)
            if sum(len(frame) for frame in reply.frames) > SMALL and reply.request >= side.floor:
                before = side.large.get(reply.request)
                patience = PATIENCE if before is None else 2 * before.patience
                side.large[reply.request] = Large(patience, patience)
        return [Send(peer, reply)]

    def probe(self, sender: Peer, message: Message) -> Effects:
        """Say of each request that a peer has open what became of it."""
        numbers, floor = message.integers("ids"), message.integer("floor")
        side = self._sides.get(sender, _Side())
        side.rise(floor)
        held = [number for number in numbers if number in side.held or side.is_on_its_way(number)]
        unknown = [one for one in numbers if one >= side.floor and one not in held]
        return [Send(sender, Message(UNKNOWN, {"ids": unknown}))] if unknown else []

    def forget(self, peer: Peer) -> None:
        """Drop what is kept of a peer."""
        self._sides.pop(peer, None)

    @property
    def entries(self) -> int:
        """How much is kept."""
        return sum(1 + len(side.held) + len(side.large) for side in self._sides.values())
