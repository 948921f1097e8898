"""Checks on the senders of a server's messages, and the numbering of the messages that the server sends.

A server acts on messages of the view's members, in their order, encrypted with the members' own keys.

A connection that breaks loses the messages on their way, and a server drops messages of a view that it does not have
yet. Messages between two servers are numbered without gaps, and every server reports a few times a second how many gaps
it has found. The sender of the lost messages then sends its present state.
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
# Repetitions for a server between two pings. A repeated message can be lost as well, and repeating it for every gap
# would grow without bound.
MOST_REPEATS = 8
_FROM_WORKERS = frozenset({Kind.HELLO, Kind.VALUE, Kind.BEGIN, Kind.PUSH, Kind.PULL})
_FROM_SERVERS = frozenset(
    {
        Kind.STATUS, Kind.VOTE, Kind.DECIDE, Kind.NORM, Kind.RELAY, Kind.ACKNOWLEDGE,
        Kind.COPY, Kind.PING,
    }
)  # fmt: skip


class Senders:
    """The members that may send to a server, their last message numbers, and the gaps in other servers' messages."""

    def __init__(self, encrypted: bool) -> None:
        self._encrypted = encrypted
        self._view = View(-1, (), ())
        self._members: dict[int, tuple[int, str]] = {}  # incarnation and key, by sender
        self._last: dict[int, tuple[int, int]] = {}  # incarnation and number of the last message, by sender
        self._gaps: Counter[int] = Counter()  # gaps in the message numbers of each other server
        self._repaired: dict[int, int] = {}  # by server: gaps in this server's messages that were repaired
        self._repeats: Counter[int] = Counter()  # by server: repetitions since the last pings

    def follow(self, view: View) -> None:
        """Follow another view's members."""
        self._view = view
        self._members = {worker.id: (worker.incarnation, worker.public_key) for worker in view.workers}
        self._members |= {SERVER + server.id: (server.since, server.public_key) for server in view.servers}
        for peer, (incarnation, _) in list(self._last.items()):
            if self._incarnation(peer) != incarnation:  # The member is gone, or another process has its place.
                for numbers in (self._last, self._gaps, self._repaired):
                    numbers.pop(peer, None)

    def _incarnation(self, peer: int) -> int | None:
        return self._members[peer][0] if peer in self._members else None

    def has_key(self, key: str) -> bool:
        """Whether a public key belongs to a member."""
        return any(key == public_key for _, public_key in self._members.values())

    def shows_connection(self, header: Header, user: str) -> bool:
        """Whether a message shows that the connection with another server works, even if the message is dropped."""
        incarnation, key = self._members.get(header.sender, (None, ""))
        return incarnation is not None and incarnation <= header.incarnation and (user == key or not self._encrypted)

    def check(self, header: Header, user: str) -> bool:
        """Check a message's sender, and count the message. Return whether earlier messages of another server were lost.

        Args:
            user: Public key of the connection, if it is encrypted.

        Raises:
            InvalidMessageError: The sender is not a member or may not send this message, or the message is a replay.
        """
        is_server = header.sender >= SERVER
        incarnation, key = self._members.get(header.sender, (None, ""))
        if incarnation is None or (not is_server and incarnation != header.incarnation):
            raise InvalidMessageError("the sender is not a member of the view")
        if is_server and not incarnation <= header.incarnation <= self._view.number:
            raise InvalidMessageError("the view is not known here, or the sending server was replaced")
        if self._encrypted and user != key:
            raise InvalidMessageError("the key is not the sender's")
        if header.kind not in (_FROM_SERVERS if is_server else _FROM_WORKERS):
            raise InvalidMessageError("a kind of message that its sender never sends")
        _, last = self._last.get(header.sender, (incarnation, 0))
        if header.sequence <= last:
            raise InvalidMessageError("a replay")
        self._last[header.sender] = incarnation, header.sequence
        has_gap = is_server and header.sequence > last + 1
        if has_gap:
            self._gaps[header.sender] += 1
        return has_gap

    # Gaps

    def gaps(self, server: int) -> int:
        """Return the number of gaps in another server's messages."""
        return self._gaps[SERVER + server]

    def must_repeat(self, server: int, gaps: int) -> bool:
        """Whether a server has found gaps that were not repaired yet, and may be answered now; then count the repair.

        Args:
            gaps: Number of gaps that the server has found in this server's messages.
        """
        if gaps <= self._repaired.get(SERVER + server, 0) or self._repeats[server] >= MOST_REPEATS:
            return False
        self._repeats[server] += 1
        self._repaired[SERVER + server] = gaps
        return True

    def reset_repeats(self) -> None:
        """Allow repetitions again: the servers have just received pings."""
        self._repeats.clear()


class Outbox:
    """Messages of a server, numbered and kept until the driver takes them.

    Messages to another server are numbered without gaps, so that the receiver notices lost messages.

    Attributes:
        routes: The route to each worker, from its last message.
        effects: Effects that the driver has not taken yet.
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
        """Return the effects and forget them."""
        if not self.effects:
            return []
        effects, self.effects = self.effects, []
        return effects

    def follow(self, view: View) -> None:
        """Send to the servers of a view from now on, and forget the routes of dead workers."""
        now = {server.id: server for server in view.servers if server.id != self._server}
        before, self._servers = self._servers, now
        gone = {server for server, info in before.items() if now.get(server) != info}
        self.effects = [effect for effect in self.effects if not (isinstance(effect, Parcel) and effect.to in gone)]
        # Numbers restart only for a new incarnation: after a reconnection, messages lost on the old connection leave a
        # gap.
        self._sent = {
            server: self._sent[server] if server in before and before[server].since == info.since else 0
            for server, info in now.items()
        }
        self._view = view.number
        alive = {worker.id for worker in view.workers}
        self.routes = {worker: route for worker, route in self.routes.items() if worker in alive}

    def to_worker(self, worker: int, kind: Kind, payload: Any = b"", **fields: Any) -> None:
        """Send a message to a worker, if its route is known.

        Small answers to pulls may wait, to leave together.
        """
        route = self.routes.get(worker)
        if route is not None:
            self._sequence += 1
            header, body = self._compose(kind, self._sequence, payload, **fields)
            wait = kind == Kind.PULLED and len(body) <= SMALL_BYTES
            # The values may change before the message leaves.
            self.effects.append(Parcel(route, header, bytes(body) if wait else body, wait))

    def ask_again(self, worker: int) -> None:
        """Ask a worker to send again what was not answered."""
        self.to_worker(worker, Kind.WELCOME, json={"again": True})

    def to_server(self, server: int, kind: Kind, payload: Any = b"", **fields: Any) -> None:
        """Send a message to another server, if it is in the view."""
        if server in self._servers:
            self._sent[server] += 1
            header, body = self._compose(kind, self._sent[server], payload, incarnation=self._view, **fields)
            self.effects.append(Parcel(server, header, body, False))
