"""Which messages a server acts on (those of the view's members, in their order, with their keys), and what it sends.

A connection that breaks loses what was on its way, and a server drops what belongs to a view that it does not have yet.
Messages between two servers are numbered without gaps, and every server says a few times a second how often it has
found one: the other then sends the state that its lost messages have led to.
"""

from collections import Counter
from functools import partial
from typing import Any

from cnnstrategies.paramserver.core.view import ServerInfo, View
from cnnstrategies.paramserver.messages import (
    SERVER,
    SMALL_BYTES,
    Effects,
    Header,
    InvalidMessageError,
    Kind,
    Parcel,
    compose,
)

PING_SECONDS = 0.2
# Between two pings: what is told again may be lost, too, and that told again, which would be ever more.
MOST = 8
_FROM_WORKERS = frozenset({Kind.HELLO, Kind.VALUE, Kind.BEGIN, Kind.PUSH, Kind.PULL})
_FROM_SERVERS = frozenset(
    {
        Kind.STATUS, Kind.VOTE, Kind.DECIDE, Kind.NORM, Kind.RELAY, Kind.ACKNOWLEDGE,
        Kind.COPY, Kind.PING,
    }
)  # fmt: skip


class Senders:
    """The members that may send to a server, how far each has come, and what was lost of other servers' messages."""

    def __init__(self, encrypted: bool) -> None:
        self._encrypted = encrypted
        self._view = View(-1, (), ())
        self._members: dict[int, tuple[int, str]] = {}  # life and key, by sender
        self._last: dict[int, tuple[int, int]] = {}  # life and number of the last message
        self._found: Counter[int] = Counter()  # gaps in the numbers of each other server
        self._answered: dict[int, int] = {}  # how many of the gaps that they have found were made good
        self._times: Counter[int] = Counter()  # how often since the last pings

    def follow(self, view: View) -> None:
        """Go on with another view's members."""
        self._view = view
        self._members = {worker.id: (worker.incarnation, worker.public_key) for worker in view.workers}
        self._members |= {SERVER + server.id: (server.since, server.public_key) for server in view.servers}
        for peer, (incarnation, _) in list(self._last.items()):
            if self._incarnation(peer) != incarnation:  # It is gone, or another now.
                for numbers in (self._last, self._found, self._answered):
                    numbers.pop(peer, None)

    def _incarnation(self, peer: int) -> int | None:
        return self._members[peer][0] if peer in self._members else None

    def have(self, key: str) -> bool:
        """Whether a key belongs to a member."""
        return any(key == member for _, member in self._members.values())

    def are_joined(self, header: Header, user: str) -> bool:
        """Whether a message shows that the connection with another server holds, whether or not it is acted on."""
        incarnation, key = self._members.get(header.sender, (None, ""))
        return incarnation is not None and incarnation <= header.incarnation and (user == key or not self._encrypted)

    def check(self, header: Header, user: str) -> bool:
        """Check who has sent a message, and count it; whether another server's messages before it have not come."""
        is_server = header.sender >= SERVER
        incarnation, key = self._members.get(header.sender, (None, ""))
        if incarnation is None or (not is_server and incarnation != header.incarnation):
            raise InvalidMessageError("from no member of the view")
        if is_server and not incarnation <= header.incarnation <= self._view.number:
            raise InvalidMessageError("of a view that is not known here, or of a server that was replaced")
        if self._encrypted and user != key:
            raise InvalidMessageError("a key that is not its sender's")
        if header.kind not in (_FROM_SERVERS if is_server else _FROM_WORKERS):
            raise InvalidMessageError("a kind that its sender does not send")
        _, last = self._last.get(header.sender, (incarnation, 0))
        if header.sequence <= last:
            raise InvalidMessageError("a replay")
        self._last[header.sender] = incarnation, header.sequence
        missed = is_server and header.sequence > last + 1
        if missed:
            self._found[header.sender] += 1
        return missed

    # Gaps

    def gaps(self, server: int) -> int:
        """How many have been found in the numbers of another server's messages."""
        return self._found[SERVER + server]

    def asked(self, server: int, gaps: int) -> bool:
        """Whether a server has found more gaps in this one's messages than have been made good, and may be told now."""
        if gaps <= self._answered.get(SERVER + server, 0) or self._times[server] >= MOST:
            return False
        self._times[server] += 1
        self._answered[SERVER + server] = gaps
        return True

    def pinged(self) -> None:
        """Servers are told about their gaps; whoever finds more may be told as often as before."""
        self._times.clear()


class Outbox:
    """Numbers a server's messages, and keeps them until its driver takes them.

    Messages to another server are numbered without gaps, so that it notices when a connection has lost some.

    Attributes:
        routes: The route to each worker, learned from its last message.
        effects: What is to be done.
    """

    def __init__(self, server: int, session: int) -> None:
        self.routes: dict[int, bytes] = {}
        self.effects: Effects = []
        self._server = server
        self._compose = partial(compose, SERVER + server, session)
        self._sequence = 0
        self._view = -1
        self._sent: dict[int, int] = {}
        self._servers: dict[int, ServerInfo] = {}

    def take(self) -> Effects:
        """What is to be done now; it is not kept."""
        if not self.effects:
            return []
        effects, self.effects = self.effects, []
        return effects

    def follow(self, view: View) -> None:
        """Send to the servers of a view from now on, and forget the routes of dead workers."""
        now = {server.id: server for server in view.servers if server.id != self._server}
        before, self._servers = self._servers, now
        gone = {one for one, info in before.items() if now.get(one) != info}
        self.effects = [one for one in self.effects if not (isinstance(one, Parcel) and one.to in gone)]
        # Numbered anew with a new life only: where a connection is made anew, what the old one lost leaves a gap.
        self._sent = {
            one: self._sent[one] if one in before and before[one].since == info.since else 0
            for one, info in now.items()
        }
        self._view = view.number
        alive = {worker.id for worker in view.workers}
        self.routes = {worker: route for worker, route in self.routes.items() if worker in alive}

    def to_worker(self, worker: int, kind: Kind, payload: Any = b"", **fields: Any) -> None:
        """Send to a worker; nothing happens if none of its messages has come yet.

        Small answers to pulls may wait for each other.
        """
        route = self.routes.get(worker)
        if route is not None:
            self._sequence += 1
            header, body = self._compose(kind, self._sequence, payload, **fields)
            wait = kind == Kind.PULLED and len(body) <= SMALL_BYTES
            # The values may change before they leave.
            self.effects.append(Parcel(route, header, bytes(body) if wait else body, wait))

    def ask_again(self, worker: int) -> None:
        """Have a worker send again what was not answered."""
        self.to_worker(worker, Kind.WELCOME, json={"again": True})

    def to_server(self, server: int, kind: Kind, payload: Any = b"", **fields: Any) -> None:
        """Send to another server; nothing happens if it is not in the view."""
        if server in self._servers:
            self._sent[server] += 1
            header, body = self._compose(kind, self._sent[server], payload, incarnation=self._view, **fields)
            self.effects.append(Parcel(server, header, body, False))
