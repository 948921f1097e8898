"""Checks of the messages that a server receives, times of messages, and the numbering of the messages that it sends.

A server acts on a message only under these conditions: a member of the current view has sent the message; the message
is not a replay; and in an encrypted run, the connection uses that member's key.

Messages between servers may be lost: a broken connection loses the messages that are on their way, and a server drops
messages from senders that have a newer view. The messages from one server to another are therefore numbered without
gaps. Several times a second, server 0, for example, tells server 1 how many gaps it has found in server 1's messages.
If the number has grown, server 1 sends its current state to server 0.

The coordinator decides which processes are dead.
"""

from collections import Counter
from functools import partial
from typing import Any

from cnnstrategies.paramserver.core.node import Liveness
from cnnstrategies.paramserver.core.view import ServerInfo, View
from cnnstrategies.paramserver.messages import (
    SERVER,
    SMALL_BYTES,
    Effects,
    Header,
    InvalidMessageError,
    Kind,
    OutdatedMessageError,
    Parcel,
    compose,
)

PING_SECONDS = 0.2  # seconds between two pings to the other servers
# If more seconds than this pass between two calls of a server's methods, the server's process was stopped meanwhile.
STOPPED_SECONDS = 1.0
# Largest number of times that a server sends its state again to another server between two pings. A repeated message
# can be lost as well, which leaves a new gap. Without a limit, the number of messages could grow without bound.
MOST_REPEATS = 8
_FROM_WORKERS = frozenset({Kind.HELLO, Kind.VALUE, Kind.BEGIN, Kind.PUSH, Kind.PULL})
_FROM_SERVERS = frozenset(
    {
        Kind.STATUS, Kind.VOTE, Kind.DECIDE, Kind.NORM, Kind.RELAY, Kind.ACKNOWLEDGE,
        Kind.COPY, Kind.PING,
    }
)  # fmt: skip


class Senders:
    """The members that may send messages to a server, the numbers of the messages that have arrived, and their times.

    Args:
        server: Id of this server.
        encrypted: Whether the connections are encrypted.
        timeout: The specification's `timeout`, in seconds.

    Attributes:
        liveness: The book of liveness of the other servers.
    """

    def __init__(self, server: int, encrypted: bool, timeout: float) -> None:
        # The driver calls a server several times a second, so a long time between two calls is a pause.
        self.liveness: Liveness[int] = Liveness(min(STOPPED_SECONDS, timeout / 2))
        self._server = server
        self._encrypted = encrypted
        self._heartbeat_seconds = min(1.0, timeout / 4)
        self._pinged = self._sent_heartbeats = 0.0
        self._heard_workers: set[int] = set()  # ids of the workers that have sent a message since the last heartbeats
        self._view = View(-1, (), ())
        # The senders in these dictionaries are numbered as in `Header.sender`: a server's number is its id plus
        # `SERVER`. The number of the first view with a server's process serves as the server's incarnation.
        self._members: dict[int, tuple[int, str]] = {}  # By sender: incarnation and public key.
        self._last: dict[int, tuple[int, int]] = {}  # By sender: incarnation, and number of the last accepted message.
        self._gaps: Counter[int] = Counter()  # By sending server: number of gaps in the numbers of its messages.
        # By receiving server: number of gaps that the receiver had reported when this server last repeated its state to
        # the receiver.
        self._repaired: dict[int, int] = {}
        # By id of the receiving server: how often this server has repeated its state to the receiver since the last
        # pings.
        self._repeats: Counter[int] = Counter()

    def follow(self, view: View) -> None:
        """Replace the list of members by the members of a new view. A new process of a server counts as heard now."""
        before, since = (
            {server.id: server.since for server in servers if server.id != self._server}
            for servers in (self._view.servers, view.servers)
        )
        now, heard = self.liveness.now, self.liveness.heard
        self.liveness.heard = {
            server: heard[server] if before.get(server) == first_view else now for server, first_view in since.items()
        }
        self._view = view
        self._members = {worker.id: (worker.incarnation, worker.public_key) for worker in view.workers}
        self._members |= {SERVER + server.id: (server.since, server.public_key) for server in view.servers}
        for peer, (incarnation, _) in list(self._last.items()):
            if self._incarnation(peer) != incarnation:  # The member is gone, or a new process has replaced it.
                for numbers in (self._last, self._gaps, self._repaired):
                    numbers.pop(peer, None)

    def heartbeats_due(self) -> list[int]:
        """Return the ids of the workers to which heartbeats must be sent now, and count them as sent.

        They are the workers that have sent messages since the last heartbeats.
        """
        if self.liveness.now - self._sent_heartbeats <= self._heartbeat_seconds:
            return []
        self._sent_heartbeats = self.liveness.now
        workers, self._heard_workers = self._heard_workers, set()
        return list(workers)

    def pings_due(self) -> list[int]:
        """Return the ids of the servers to which pings must be sent now, and count them as sent."""
        if self.liveness.now - self._pinged <= PING_SECONDS:
            return []
        self._pinged = self.liveness.now
        self._repeats.clear()
        return list(self.liveness.heard)

    def _incarnation(self, peer: int) -> int | None:
        return self._members[peer][0] if peer in self._members else None

    def has_key(self, key: str) -> bool:
        """Return whether a public key belongs to a server or worker of the current view."""
        return any(key == public_key for _, public_key in self._members.values())

    def check(self, header: Header, user: str) -> bool:
        """Check that a member may send a message, and record the message's number and time.

        Args:
            header: Header of the message.
            user: Public key of the connection, if it is encrypted.

        Returns True if the sender is a server, and messages that it sent directly before this message were lost.

        Raises:
            InvalidMessageError: The sender is not a member or may not send this message, or the message is a replay.
        """
        is_server = header.sender >= SERVER
        incarnation, key = self._members.get(header.sender, (None, ""))
        has_key = user == key or not self._encrypted
        if is_server and has_key and incarnation is not None and incarnation <= header.incarnation:
            # The message shows that the connection works, even if it is refused below because its sender has a newer
            # view.
            self.liveness.hear(header.sender - SERVER)
        if incarnation is None or (not is_server and incarnation != header.incarnation):
            raise OutdatedMessageError("the sender is not a member of the view")
        if is_server and not incarnation <= header.incarnation <= self._view.number:
            raise OutdatedMessageError("the sending server has a newer view, or was replaced")
        if not has_key:
            raise InvalidMessageError("the connection's key is not the sender's key")
        if header.kind not in (_FROM_SERVERS if is_server else _FROM_WORKERS):
            role = "server" if is_server else "worker"
            raise InvalidMessageError(f"a {role} must not send {header.kind.name} messages to a server")
        _, last = self._last.get(header.sender, (incarnation, 0))
        if header.sequence <= last:
            raise OutdatedMessageError("the message is a replay of an earlier message")
        self._last[header.sender] = incarnation, header.sequence
        if not is_server:
            self._heard_workers.add(header.sender)
        has_gap = is_server and header.sequence > last + 1
        if has_gap:
            self._gaps[header.sender] += 1
        return has_gap

    def gaps(self, server: int) -> int:
        """Return the number of gaps that this server has found in the messages from another server."""
        return self._gaps[SERVER + server]

    def must_repeat(self, server: int, gaps: int) -> bool:
        """Return whether this server must now send its state again to another server.

        This is the case if the other server has found new gaps in this server's messages, and this server has repeated
        its state fewer than `MOST_REPEATS` times since its last pings. If the result is True, the method also counts
        the repetition, so the caller must send the state.

        Args:
            server: Id of the other server.
            gaps: Number of gaps that the other server has found in this server's messages.
        """
        if gaps <= self._repaired.get(SERVER + server, 0) or self._repeats[server] >= MOST_REPEATS:
            return False
        self._repeats[server] += 1
        self._repaired[SERVER + server] = gaps
        return True


class Outbox:
    """A server's effects that the driver has not taken yet, and the numbering of the server's messages.

    The messages to each other server are numbered without gaps, so that the receiver notices lost messages.

    Args:
        server: Id of the server.
        session: Random number that identifies the run.

    Attributes:
        routes: By worker id: ZeroMQ routing id of the connection on which the worker's last message arrived.
        effects: Effects that the driver has not taken yet.
    """

    def __init__(self, server: int, session: int) -> None:
        self.routes: dict[int, bytes] = {}
        self.effects: Effects = []
        self._server = server
        self._compose = partial(compose, SERVER + server, session)
        self._sequence = 0
        self._view = -1
        self._sent: dict[int, int] = {}  # By server id: number of the last message to the server.
        self._servers: dict[int, ServerInfo] = {}  # By server id: the other servers of the current view.

    def take(self) -> Effects:
        """Return the effects that the driver must carry out, and remove them from :attr:`effects`."""
        if not self.effects:
            return []
        effects, self.effects = self.effects, []
        return effects

    def follow(self, view: View) -> None:
        """Act on a new view: drop unsent messages to servers that are gone, and the routes of workers that are gone."""
        now = {server.id: server for server in view.servers if server.id != self._server}
        before, self._servers = self._servers, now
        gone = {server for server, info in before.items() if now.get(server) != info}
        self.effects = [effect for effect in self.effects if not (isinstance(effect, Parcel) and effect.to in gone)]
        # The numbering starts again only for a new process of the receiver. If the same process reconnects, the
        # numbering continues, so that messages that were lost on the old connection leave a gap.
        self._sent = {
            server: self._sent[server] if server in before and before[server].since == info.since else 0
            for server, info in now.items()
        }
        self._view = view.number
        alive = {worker.id for worker in view.workers}
        self.routes = {worker: route for worker, route in self.routes.items() if worker in alive}

    def to_worker(self, worker: int, kind: Kind, payload: Any = b"", **fields: Any) -> None:
        """Send a message to a worker, unless the worker's route is unknown.

        The driver may delay a small PULLED message, to send it together with later messages.
        """
        route = self.routes.get(worker)
        if route is not None:
            self._sequence += 1
            header, body = self._compose(kind, self._sequence, payload, **fields)
            wait = kind == Kind.PULLED and len(body) <= SMALL_BYTES
            # `bytes` copies the values in a delayed message. Without a copy, an update could change the values before
            # the message is sent.
            self.effects.append(Parcel(route, header, bytes(body) if wait else body, wait))

    def ask_again(self, worker: int) -> None:
        """Ask a worker to repeat all messages to which the worker has received no reply."""
        self.to_worker(worker, Kind.WELCOME, json={"again": True})

    def to_server(self, server: int, kind: Kind, payload: Any = b"", **fields: Any) -> None:
        """Send a message to another server, unless the server is not in the view."""
        if server in self._servers:
            self._sent[server] += 1
            header, body = self._compose(kind, self._sent[server], payload, incarnation=self._view, **fields)
            self.effects.append(Parcel(server, header, body, False))
