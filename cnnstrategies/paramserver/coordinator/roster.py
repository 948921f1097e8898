"""Who has registered with the coordinator: their signs of life, and the numbered views of them."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cnnstrategies.paramserver.core.node import Message, Peer
from cnnstrategies.paramserver.core.view import ServerInfo, View, WorkerInfo

SERVER, WORKER = "server", "worker"
WRITER = 0  # the worker that writes checkpoints and logs: its loss for ever ends the run


@dataclass
class Member:
    """A process that has registered.

    Attributes:
        peer: Who it is.
        process: Its process id, for messages to the user.
        host: Where it runs, for the same.
        seen: When its last sign of life came.
        endpoint: Where a server listens.
        public_key: Its CURVE key; empty without encryption.
        acknowledged: Number of the newest view that it has said to have seen.
        came: When it has registered.
        since: For a server, the number of the first view with it, or of the first one of training if that has waited
            for it.
        asked: The last collective for which a worker has come.
        figures: What it has last said of itself; see :data:`.window.FIGURES`.
        measured: When it has.
    """

    peer: Peer
    process: int
    host: str
    seen: float
    endpoint: str = ""
    public_key: str = ""
    acknowledged: int = -1
    came: float = 0.0
    since: int = 0
    asked: int = 0
    figures: Mapping[str, float] = field(default_factory=dict)
    measured: float = 0.0

    @classmethod
    def of(cls, peer: Peer, hello: Message, now: float) -> "Member":
        """A process that says hello."""
        host, endpoint, key = (hello.string(name) for name in ("host", "endpoint", "public_key"))
        return cls(peer, hello.integer("process"), host[:255], now, endpoint, key, came=now)

    def __str__(self) -> str:
        return f"{self.peer} (process {self.process} on {self.host})"


class Roster:
    """The members of a run, and what they are told of each other.

    Args:
        workers: How many workers the run has.
        servers: How many servers it has.
        survivable: How many of these can be lost for ever.
        send: Sends a message.
        elastic: How many workers may join beside those of the run, with the numbers after theirs.

    Attributes:
        group: The workers that take part in collectives; at first all that are expected.
        sealed_at: The collective with which training has begun; -1 before. Before that views name no workers.
        lost_servers: The servers that have died and not come back.
        view_message: The view as a message: one for all, so that it is encoded once.
        gone: Those that were members and are no longer, with whether they left; of one place for who joins the last.
    """

    def __init__(
        self,
        workers: int,
        servers: int,
        survivable: int,
        send: Callable[[Peer, Message], None],
        elastic: int = 0,
    ) -> None:
        self.group = set(range(workers))
        self.sealed_at = -1
        self.lost_servers: set[int] = set()
        self.gone: dict[Peer, bool] = {}
        self._workers = workers
        self._servers = servers
        self._survivable = survivable
        self._elastic = elastic
        self._send = send
        self._members: dict[tuple[str, int], Member] = {}
        self._appeared: set[tuple[str, int]] = set()
        self._first_life: dict[tuple[str, int], int] = {}
        self._view = View(0, (), ())
        self.view_message = self._message()

    @property
    def sealed(self) -> bool:
        """Whether training has begun."""
        return self.sealed_at >= 0

    # Members

    @property
    def members(self) -> list[Member]:
        """All of them, workers after servers."""
        return [member for _, member in sorted(self._members.items())]

    def expects(self, role: str, identity: int) -> bool:
        """Whether the run has such a member, or a place for it."""
        return identity < {SERVER: self._servers, WORKER: self._workers + self._elastic}.get(role, 0)

    def is_elastic(self, role: str, identity: int) -> bool:
        """Whether a place is for workers that join and leave: nobody waits for one in it."""
        return role == WORKER and identity >= self._workers

    @property
    def of_the_run(self) -> set[int]:
        """The group without those that have joined: without these the others have nobody to train for."""
        return {worker for worker in self.group if worker < self._workers}

    def free_place(self) -> tuple[int, int] | None:
        """The lowest number that nobody has of those for workers that join, and a life that was never there."""
        for identity in range(self._workers, self._workers + self._elastic):
            if self.at(WORKER, identity) is None:
                return identity, self._first_life.get((WORKER, identity), 0)
        return None

    def has_appeared(self, role: str, identity: int) -> bool:
        """Whether nobody waits any more for the first process of a place."""
        return (role, identity) in self._appeared

    def missing(self) -> list[str]:
        """The expected members that have never been there."""
        expected = itertools.chain(
            ((WORKER, number) for number in range(self._workers)),
            ((SERVER, number) for number in range(self._servers)),
        )
        return [f"{role} {number}" for role, number in expected if (role, number) not in self._appeared]

    def find(self, peer: Peer) -> Member | None:
        """A member, if it is this very process."""
        member = self.at(peer.role, peer.id)
        return member if member is not None and member.peer == peer else None

    def at(self, role: str, identity: int) -> Member | None:
        """The member with a number, whatever its life."""
        return self._members.get((role, identity))

    def is_over(self, peer: Peer) -> bool:
        """Whether a process was a member and is none any more, or its life is known to have ended before it came."""
        return peer in self.gone or peer.life < self._first_life.get((peer.role, peer.id), 0)

    def has_begun_again(self, peer: Peer) -> bool:
        """Whether a later life is known to have begun in a process's place."""
        return peer.life + 1 < self._first_life.get((peer.role, peer.id), 0)

    def has_left(self, worker: int) -> bool:
        """Whether a worker has gone on purpose."""
        return any(left and peer[:2] == (WORKER, worker) for peer, left in self.gone.items())

    def add(self, member: Member) -> None:
        """A process has registered; it takes the place of another with its number."""
        self._members[member.peer.role, member.peer.id] = member
        self.account_for(*member.peer[:2])
        self.bury(member.peer.role, member.peer.id, member.peer.life - 1)

    def account_for(self, role: str, identity: int) -> None:
        """Nobody waits any more for the first process of a place."""
        if self.expects(role, identity):
            self._appeared.add((role, identity))

    def bury(self, role: str, identity: int, life: int) -> None:
        """A life is over, and those before it: no message of it can register it any more."""
        self._first_life[role, identity] = max(self._first_life.get((role, identity), 0), life + 1)

    def remove(self, member: Member, left: bool = False) -> None:
        """A process is gone."""
        place = member.peer.role, member.peer.id
        del self._members[place]
        if self.is_elastic(*place):
            # A new life comes in each epoch: those before the last are known by its number.
            self.bury(*place, member.peer.life)
            self.gone = {peer: how for peer, how in self.gone.items() if peer[:2] != place}
        self.gone[member.peer] = left

    # Views

    @property
    def number(self) -> int:
        """Of the present view."""
        return self._view.number

    @property
    def begun(self) -> int:
        """Number of the first view of training; 0 before."""
        return self._view.begun

    @property
    def copies_are_left(self) -> bool:
        """Whether each slice has a server in spite of those that were lost."""
        return len(self.lost_servers) <= self._survivable

    def publish(self) -> None:
        """Give the view, which has changed, the next number and send it to all."""
        self._view = self._next_view()
        self.view_message = self._message()
        for member in self._members.values():
            self._send(member.peer, self.view_message)

    def _next_view(self) -> View:
        servers = [member for member in self.members if member.peer.role == SERVER]
        workers = [m for m in self.members if m.peer.role == WORKER and m.peer.id in self.group] if self.sealed else []
        return View(
            self.number + 1,
            tuple(ServerInfo(m.peer.id, m.endpoint, m.public_key, m.since) for m in servers),
            tuple(WorkerInfo(m.peer.id, m.peer.life, m.public_key) for m in workers),
            tuple(sorted(self.lost_servers)) if self.copies_are_left else (),
            self._view.begun or (self.number + 1 if self.sealed else 0),
        )

    def not_seen(self, number: int) -> list[str]:
        """The servers that a view has not reached; those whose slices others hold may be lost."""
        expected = range(self._servers) if not self.copies_are_left else set(range(self._servers)) - self.lost_servers
        return [
            f"{SERVER} {one}"
            for one in expected
            if (member := self.at(SERVER, one)) is None or member.acknowledged < number
        ]

    # Messages

    def tell_all(self, message: Message) -> None:
        """Send a message to all members."""
        for member in self._members.values():
            self._send(member.peer, message)

    def _message(self) -> Message:
        return Message("view", {"view": self._view.as_dict()})
