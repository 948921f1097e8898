"""Who has registered with the coordinator: their signs of life, and the numbered views of them."""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cnnstrategies.paramserver.control import Message, encode_fields
from cnnstrategies.paramserver.view import ServerInfo, View, WorkerInfo

SERVER, WORKER, SUPERVISION = "server", "worker", "supervision"


@dataclass
class Member:
    """A process that has registered.

    Attributes:
        role: ``server`` or ``worker``.
        id: Its number among those of its role.
        incarnation: How many processes had this number before it.
        process: Its process id, for messages to the user.
        host: Where it runs, for the same.
        connection: Where it is reached; empty if it is not.
        seen: When its last sign of life came, by ``time.monotonic()``.
        endpoint: Where a server listens.
        public_key: Its CURVE key; empty without encryption.
        acknowledged: Number of the newest view that it has said to have seen.
        since: For a server, the number of the first view with it.
        token: Its secret: a message without it is not its own.
    """

    role: str
    id: int
    incarnation: int
    process: int
    host: str
    connection: bytes
    seen: float
    endpoint: str = ""
    public_key: str = ""
    acknowledged: int = -1
    since: int = 0
    token: str = field(default="", repr=False)

    def __str__(self) -> str:
        return f"{self.role} {self.id} (process {self.process} on {self.host})"


class Roster:
    """The members of a run, and what they are told of each other.

    Args:
        workers: How many workers the run has.
        servers: How many servers it has.
        send: Sends a message to the connection that it names.

    Attributes:
        number: Of the present view.
        group: The workers that take part in collectives; at first all that are expected.
        sealed: Whether training has begun. Before that views name no workers.
        lost_servers: The servers that have died and not come back.
    """

    def __init__(self, workers: int, servers: int, survivable: int, send: Callable[[Message], None]) -> None:
        self.number = 0
        self.group = set(range(workers))
        self.sealed = False
        self.lost_servers: set[int] = set()
        self._workers = workers
        self._servers = servers
        self._survivable = survivable
        self._send = send
        self._members: dict[tuple[str, int], Member] = {}
        self._published = _encoded(View(0, (), ()))
        self._running = time.monotonic()

    def expects(self, role: str, identity: int) -> bool:
        """Whether the run has such a member."""
        return identity < {SERVER: self._servers, WORKER: self._workers}.get(role, 0)

    def missing(self) -> list[str]:
        """The expected members that are not there."""
        expected = itertools.chain(
            ((WORKER, number) for number in range(self._workers)),
            ((SERVER, number) for number in range(self._servers)),
        )
        return [f"{role} {number}" for role, number in expected if (role, number) not in self._members]

    def find(self, role: str, identity: int) -> Member | None:
        """The member with a number, whatever its incarnation."""
        return self._members.get((role, identity))

    def add(self, member: Member) -> None:
        """A process has registered; it takes the place of another with its number."""
        self._members[member.role, member.id] = member

    def remove(self, member: Member) -> None:
        """A process is gone."""
        del self._members[member.role, member.id]

    def silent(self, seconds: float) -> list[Member]:
        """The members that have given no sign of life for some seconds; to be asked several times a second."""
        now = time.monotonic()
        if now - self._running > 1.0:
            # This process was stopped, not the others silent.
            for member in self._members.values():
                member.seen += now - self._running
        self._running = now
        return [member for member in self._members.values() if now - member.seen > seconds]

    # Views

    def view(self) -> View:
        """The members as they are now, under the present number."""
        servers = [m for (role, _), m in sorted(self._members.items()) if role == SERVER]
        workers = [m for (role, i), m in sorted(self._members.items()) if role == WORKER and i in self.group]
        workers = workers if self.sealed else []
        return View(
            self.number,
            tuple(ServerInfo(m.id, m.endpoint, m.public_key, m.since) for m in servers),
            tuple(WorkerInfo(m.id, m.incarnation, m.public_key) for m in workers),
            tuple(sorted(self.lost_servers)) if self.copies_are_left else (),
        )

    @property
    def copies_are_left(self) -> bool:
        """Whether each slice has a server in spite of those that were lost."""
        return len(self.lost_servers) <= self._survivable

    def publish(self) -> None:
        """Give the view, which has changed, the next number and send it to all; it is encoded once."""
        self.number += 1
        self._published = _encoded(self.view())
        for member in self._members.values():
            self.send_view(member)

    def send_view(self, member: Member) -> None:
        """Send the last published view to one member: a number has one content."""
        self.tell(member, self._published)

    def servers_have_seen(self, number: int) -> bool:
        """Whether all servers are there and have seen a view; those whose slices others hold may be lost."""
        servers = [member for (role, _), member in self._members.items() if role == SERVER]
        expected = self._servers - (len(self.lost_servers) if self.copies_are_left else 0)
        return all(server.acknowledged >= number for server in servers) and len(servers) == expected

    def servers_behind(self, number: int) -> list[str]:
        """The servers that have not seen a view."""
        return [str(m) for (role, _), m in self._members.items() if role == SERVER and m.acknowledged < number]

    # Messages

    def tell(self, member: Member, message: Message) -> None:
        """Send a message to a member, if it is reached."""
        if member.connection:
            self._send(message.to(member.connection))

    def tell_all(self, message: Message) -> None:
        """Send a message to all members."""
        for member in self._members.values():
            self.tell(member, message)


def _encoded(view: View) -> Message:
    return Message("view", encoded=encode_fields({"view": view.as_dict()}))
