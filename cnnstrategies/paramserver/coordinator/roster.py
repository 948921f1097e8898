"""Membership: which processes become members, which stop being members, and whether the run goes on without them.

Members learn of each other through numbered views. A member that is gone does not return; a later incarnation may take
its place.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cnnstrategies.paramserver.coordinator.settings import SERVER, WORKER, CoordinatorSettings
from cnnstrategies.paramserver.core.node import Message, Peer
from cnnstrategies.paramserver.core.view import ServerInfo, View, WorkerInfo

WRITER = 0  # the worker that writes checkpoints and logs; the run ends if it is lost and does not return
CONFIRM_SECONDS = 5.0  # how long a supervision may take to say whether a silent member is replaced
PATIENCE = 6  # time-outs in which a live server must follow a view
MOST_FAULTS = 50
LONGEST = 300  # characters of a fault


@dataclass
class Member:
    """A process that has registered.

    Attributes:
        peer: The process's role, number and incarnation.
        process: Its process id, for messages to the user.
        host: Name of its machine.
        seen: Time of its last heartbeat or message.
        endpoint: Where a server listens.
        public_key: Its CURVE key.
        acknowledged: Number of the newest view that it has reported to follow.
        since: For a server, the number of the first view with it, or of training's first view if training waited for
            it.
        last_collective: The newest collective to which a worker has contributed.
        figures: Its last report on itself; see :data:`.status.FIGURES`.
        measured: Time of that report.
    """

    peer: Peer
    process: int
    host: str
    seen: float
    endpoint: str = ""
    public_key: str = ""
    acknowledged: int = 0
    since: int = 0
    last_collective: int = 0
    figures: Mapping[str, float] = field(default_factory=dict)
    measured: float = 0.0

    @classmethod
    def from_hello(cls, peer: Peer, hello: Message, now: float) -> "Member":
        """Return the member that a registration describes."""
        host, endpoint, key = (hello.string(name) for name in ("host", "endpoint", "public_key"))
        return cls(peer, hello.integer("process"), host[:255], now, endpoint, key)

    def __str__(self) -> str:
        return f"{self.peer} (process {self.process} on {self.host})"


class History:
    """The last faults of the run: deaths, returns and restarts, each with its time.

    Attributes:
        faults: Times and descriptions, oldest first.
        losses: Number of lost processes.
        restarts: Number of times that the coordinator was started again.
    """

    def __init__(self) -> None:
        self.faults: deque[tuple[float, str]] = deque(maxlen=MOST_FAULTS)
        self.losses = 0
        self.restarts = 0

    def note(self, now: float, text: str) -> None:
        """Add a fault."""
        self.faults.append((now, text[:LONGEST]))

    def note_restart(self, now: float) -> None:
        """Note that this coordinator continues after another process of it was killed."""
        self.losses += 1
        self.restarts += 1
        self.note(now, "the coordinator was started again")


@dataclass
class _Place:
    """State of one place: a role and a number.

    Attributes:
        member: The present member.
        appeared: Whether nothing waits for the place's first process any more.
        incarnation: The lowest incarnation that may register; the ones before are over.
        lost: The incarnations below this one are counted as lost.
        promise: Time until which a process must take the place, and why the run ends otherwise.
    """

    member: Member | None = None
    appeared: bool = False
    incarnation: int = 0
    lost: int = 0
    promise: tuple[float, str] | None = None


class Roster:
    """The members of a run.

    Attributes:
        began: When the coordinator began to wait for members.
        group: Ids of the workers that take part in collectives; at first all expected workers.
        sealed: Whether training has begun. Before that views contain no workers.
        lost_servers: Ids of the servers that have died and not come back.
        silent: Role, id and incarnation of each member that was silent; the supervisions end these processes.
        history: The last faults.
        view_message: The view as a message, which all members share, so that it is encoded once.
        gone: Former members, with whether they left on purpose; for a joiner's place only the last one.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        send: Callable[[Peer, Message], None],
        forget: Callable[[Member], None],
        finish: Callable[[str], None],
    ) -> None:
        self.began = 0.0
        self.group = set(range(settings.workers))
        self.sealed = False
        self.lost_servers: set[int] = set()
        self.silent: list[list[str | int]] = []
        self.gone: dict[Peer, bool] = {}
        self.history = History()
        self._settings = settings
        self._send = send
        self._forget = forget
        self._finish = finish
        places = [(SERVER, server) for server in range(settings.servers)]
        places += [(WORKER, worker) for worker in range(settings.workers + settings.max_joiners)]
        self._places = {place: _Place() for place in places}
        # members that were silent when the run was over: they may still ask why it ended
        self._silent_at_end: set[Peer] = set()
        self._view = View(0, (), ())
        self.view_message = self._make_view_message()

    # Members

    @property
    def members(self) -> list[Member]:
        """All members: the servers, then the workers."""
        return [place.member for place in self._places.values() if place.member is not None]

    def member_at(self, role: str, identity: int) -> Member | None:
        """Return the member with a role and a number, whatever its incarnation."""
        place = self._places.get((role, identity))
        return None if place is None else place.member

    def find(self, peer: Peer) -> Member | None:
        """Return the member that is exactly this process."""
        member = self.member_at(peer.role, peer.id)
        return member if member is not None and member.peer == peer else None

    def is_joiners_place(self, role: str, identity: int) -> bool:
        """Whether a place is for joiners, which nothing waits for."""
        return role == WORKER and identity >= self._settings.workers

    @property
    def original_workers(self) -> set[int]:
        """The group without joiners: a run without original workers ends."""
        return {worker for worker in self.group if not self.is_joiners_place(WORKER, worker)}

    def free_place(self) -> tuple[int, int] | None:
        """Return the lowest free number among the places for joiners, and an incarnation that was never used there."""
        for (role, identity), place in self._places.items():
            if place.member is None and self.is_joiners_place(role, identity):
                return identity, place.incarnation
        return None

    def missing(self) -> list[str]:
        """Return the names of the expected members that have never appeared."""
        absent = [
            (role, identity)
            for (role, identity), place in self._places.items()
            if not place.appeared and not self.is_joiners_place(role, identity)
        ]
        return [f"{role} {identity}" for role, identity in sorted(absent, key=lambda place: place[0] == SERVER)]

    def has_left(self, worker: int) -> bool:
        """Whether a worker has left on purpose."""
        return any(left and peer[:2] == (WORKER, worker) for peer, left in self.gone.items())

    def stop_expecting(self, role: str, identity: int) -> None:
        """Wait no longer for the first process of a place."""
        if place := self._places.get((role, identity)):
            place.appeared = True

    def remove(self, member: Member, left: bool = False) -> None:
        """Remove a member, which has left on purpose or is lost."""
        peer = member.peer
        place = self._places[peer.role, peer.id]
        place.member = None
        if self.is_joiners_place(peer.role, peer.id):
            # Joiners come as a new incarnation in each epoch: the place's number suffices to know the earlier ones.
            place.incarnation = max(place.incarnation, peer.incarnation + 1)
            self.gone = {other: on_purpose for other, on_purpose in self.gone.items() if other[:2] != peer[:2]}
        self.gone[peer] = left

    # Joining

    def refusal(self, peer: Peer) -> str | None:
        """Return why a process that is not a member cannot become one; None if it can."""
        settings, place = self._settings, self._places.get((peer.role, peer.id))
        if place is None:
            joiners = f", and {settings.max_joiners} places for workers that join" if settings.max_joiners else ""
            return (
                f"this run has {settings.workers} workers and {settings.servers} servers{joiners}: it does not expect "
                f"{peer}"
            )
        if (peer in self.gone or peer.incarnation < place.incarnation) and peer not in self._silent_at_end:
            return (
                f"{peer} was silent for {settings.timeout:g} s and counts as dead: the run goes on without it; "
                "raise `timeout` if it was only busy"
            )
        known = place.member
        if known is not None and known.peer != peer and known.peer.incarnation >= peer.incarnation:
            return f"{peer} was registered already ({known}), or has been replaced"
        return None

    def admit(self, now: float, peer: Peer, hello: Message) -> bool:
        """Register a process that is not refused. Return whether it is a member.

        The process does not become a member while another one, which is not known to be dead, has its place.
        """
        place = self._places[peer.role, peer.id]
        if place.member is not None:
            return place.member.peer == peer
        place.member = member = Member.from_hello(peer, hello, now)
        was_waited_for = not place.appeared and peer.id not in self.lost_servers
        place.appeared, place.promise = True, None
        place.incarnation = max(place.incarnation, peer.incarnation)
        if peer.incarnation and not self.is_joiners_place(peer.role, peer.id):
            self.history.note(now, f"{member} has taken the place of the process before it")
        if peer.role == SERVER:
            # A server that is replaced before it was missed has also lost its state.
            self.lost_servers.discard(peer.id)
            # Training has waited for a server that comes late, so the server is as old as the others. This does not
            # hold if another server had died in its place before: training may then have begun with the copies.
            member.since = (self._view.begun if was_waited_for else 0) or self.number + 1
            self.publish()
        return True

    # Losing

    def check_members(self, now: float, over: bool, view: int, waited: float) -> None:
        """Remove the members that were silent for too long; to be called several times a second.

        Servers that delay a result are also removed.

        Args:
            now: The present time.
            over: Whether the run is over, so that a loss has no consequences.
            view: Number of the view that all servers must see before a result is sent; 0 if no result waits.
            waited: Seconds for which that result has waited.
        """
        timeout, appear = self._settings.timeout, self._settings.appear
        silent = [member for member in self.members if now - member.seen > timeout]
        if over:
            for member in silent:
                self.remove(member)
                self._silent_at_end.add(member.peer)
            return
        if self._is_cut_off(now):
            return
        for member in silent:
            self._remove_silent(now, member, f"was silent for {timeout:g} s")
        for member in self.members:
            # A server that has not seen any view is still being set up.
            patience = PATIENCE * timeout if member.acknowledged > 0 else max(appear, PATIENCE * timeout)
            if member.peer.role == SERVER and member.acknowledged < view and waited > patience:
                self._remove_silent(now, member, f"has not followed view {view} for {patience:g} s")
        if now - self.began > appear and (missing := self.missing()):
            self._finish(
                f"{', '.join(missing)} did not appear within {appear:g} s: start the run on all "
                "its machines, and dedicated servers; --interconnect.wait sets how long to wait"
            )
        for place in self._places.values():
            if place.promise is not None and now > place.promise[0]:
                self._finish(place.promise[1])

    def died(self, now: float, member: Member, how: str, replaced: bool, over: bool = False) -> None:
        """Note that a process has died, as its supervision reports; it may be unregistered, or removed already.

        Args:
            now: The present time.
            member: The process.
            how: How it died, for the user.
            replaced: Whether another process takes its place.
            over: Whether the run is over, so that the loss has no consequences.
        """
        place = self._places.get((member.peer.role, member.peer.id))
        if place is None or member.peer.incarnation < place.incarnation:
            return  # The death was reported before, or another process has the place now.
        place.incarnation = member.peer.incarnation + 1
        place.appeared |= not replaced
        known = place.member
        if known is not None and known.peer.incarnation > member.peer.incarnation:
            return
        if known is not None:
            self.remove(known)
            self._forget(known)
            member = known
        if not over:  # After the run nothing needs a view of the remaining members.
            self._decide_without(now, member, how, replaced)

    def _is_cut_off(self, now: float) -> bool:
        """Whether it is more likely that this process is cut off than that all members have died at once."""
        members = self.members
        quiet = now - max((member.seen for member in members), default=now)
        timeout = self._settings.timeout
        if len(members) > 1 and quiet > timeout:
            self._finish(
                f"the coordinator has heard none of the {len(members)} members for {timeout:g} s: it is cut off"
            )
        return len(members) > 1 and quiet > timeout / 2

    def _remove_silent(self, now: float, member: Member, how: str) -> None:
        self.remove(member)
        if not self.is_joiners_place(*member.peer[:2]):  # Joiners are not started by a supervision.
            self.silent.append([*member.peer[:3]])
        self._forget(member)
        # The supervision asks for the silent members, ends them, and reports whether they are replaced. This takes a
        # moment, unless the supervision itself is gone.
        confirmed = min(self._settings.timeout, CONFIRM_SECONDS)
        self._decide_without(now, member, how, replaced=self._settings.supervised, seconds=confirmed)

    def _decide_without(
        self, now: float, member: Member, how: str, replaced: bool, seconds: float | None = None
    ) -> None:
        """Decide whether the run goes on without a member that was removed.

        Args:
            now: The present time.
            member: The removed member.
            how: How it was lost, for the user.
            replaced: Whether another process may take its place.
            seconds: How long to wait for that process or its announcement; None for as long as a process may take to
                appear.
        """
        peer = member.peer
        place = self._places[peer.role, peer.id]
        if peer.incarnation >= place.lost:
            place.lost = peer.incarnation + 1
            self.history.losses += 1
            self.history.note(now, f"{member} {how}")
        reason = self._without_server(member, how) if peer.role == SERVER else self._without_worker(member, how)
        if reason is not None and replaced:
            seconds = self._settings.appear if seconds is None else seconds
            text = f"{member} {how}, and no process took its place within {seconds:g} s"
            place.promise = now + seconds, text
        elif reason is not None:
            self._finish(reason)
        if peer.role == WORKER and self.sealed and not self.original_workers:
            self._finish(f"{member} {how}, and no worker is left")

    def _without_server(self, member: Member, how: str) -> str | None:
        """Return why the run cannot go on without a server; None if other servers have copies of its slices."""
        self.lost_servers.add(member.peer.id)
        if self._has_copies:
            self.publish()  # The copies of its slices take over; if the server returns, it has no state.
            return None
        return f"{member} {how}: its parameters are lost; with replication: 2 a run survives this"

    def _without_worker(self, member: Member, how: str) -> str | None:
        """Return why the run cannot go on without a worker; None if it can."""
        if self.is_joiners_place(*member.peer[:2]):
            return None
        if not self.sealed:
            when = " before training began" if self._settings.servers else ", and every worker is needed here"
            return f"{member} {how}{when}"
        if member.peer.id == WRITER:
            return f"{member}, which writes checkpoints and logs, {how}: with max_restarts it would be started again"
        return None

    # Views

    @property
    def number(self) -> int:
        """The number of the present view."""
        return self._view.number

    @property
    def _has_copies(self) -> bool:
        return len(self.lost_servers) <= self._settings.survivable

    def publish(self) -> None:
        """Number the changed view, and send it to all members."""
        members = self.members
        servers = [member for member in members if member.peer.role == SERVER]
        workers = [m for m in members if m.peer.role == WORKER and m.peer.id in self.group] if self.sealed else []
        self._view = View(
            self.number + 1,
            tuple(ServerInfo(m.peer.id, m.endpoint, m.public_key, m.since) for m in servers),
            tuple(WorkerInfo(m.peer.id, m.peer.incarnation, m.public_key) for m in workers),
            tuple(sorted(self.lost_servers)) if self._has_copies else (),
            self._view.begun or (self.number + 1 if self.sealed else 0),
        )
        self.view_message = self._make_view_message()
        self.tell_all(self.view_message)

    def _make_view_message(self) -> Message:
        return Message("view", {"view": self._view.as_dict()})

    def tell_all(self, message: Message) -> None:
        """Send a message to all members."""
        for member in self.members:
            self._send(member.peer, message)

    def not_seen(self, number: int) -> list[str]:
        """Return the names of the servers that do not follow a view yet; lost servers with copies do not count."""
        servers = set(range(self._settings.servers)) - (self.lost_servers if self._has_copies else set())
        seen = {m.peer.id for m in self.members if m.peer.role == SERVER and m.acknowledged >= number}
        return [f"{SERVER} {server}" for server in sorted(servers - seen)]
