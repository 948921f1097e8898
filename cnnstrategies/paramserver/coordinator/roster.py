"""Who takes part: who becomes a member, who is one no longer, and whether the run goes on without those that are gone.

Members learn of each other by numbered views. A member that is gone stays gone: its place may be taken by a later life.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cnnstrategies.paramserver.coordinator.settings import SERVER, WORKER, CoordinatorSettings
from cnnstrategies.paramserver.core.node import Message, Peer
from cnnstrategies.paramserver.core.view import ServerInfo, View, WorkerInfo

WRITER = 0  # the worker that writes checkpoints and logs: its loss for ever ends the run
CONFIRM_SECONDS = 5.0  # for a supervision to say what becomes of one that was silent
PATIENCE = 6  # times the time-out: for a server that lives and does not take up a view
MOST_FAULTS = 50
LONGEST = 300  # characters of a fault


@dataclass
class Member:
    """A process that has registered.

    Attributes:
        since: For a server, the number of the first view with it, or of the first one of training if that has waited
            for it.
        figures: What it has last said of itself; see :data:`.status.FIGURES`.
    """

    peer: Peer
    process: int  # its process id, for messages to the user
    host: str
    seen: float  # when its last sign of life came
    endpoint: str = ""
    public_key: str = ""
    acknowledged: int = 0  # number of the newest view that it has said to have seen
    since: int = 0
    asked: int = 0  # the last collective for which a worker has come
    figures: Mapping[str, float] = field(default_factory=dict)
    measured: float = 0.0  # when it has said them

    @classmethod
    def of(cls, peer: Peer, hello: Message, now: float) -> "Member":
        """A process that says hello."""
        host, endpoint, key = (hello.string(name) for name in ("host", "endpoint", "public_key"))
        return cls(peer, hello.integer("process"), host[:255], now, endpoint, key)

    def __str__(self) -> str:
        return f"{self.peer} (process {self.process} on {self.host})"


class History:
    """The last faults: deaths, returns and restarts, each with its time; and how many there were."""

    def __init__(self) -> None:
        self.faults: deque[tuple[float, str]] = deque(maxlen=MOST_FAULTS)
        self.losses = 0
        self.restarts = 0

    def note(self, now: float, text: str) -> None:
        """Something has happened."""
        self.faults.append((now, text[:LONGEST]))

    def begun_again(self, now: float) -> None:
        """This coordinator follows one that was killed."""
        self.losses += 1
        self.restarts += 1
        self.note(now, "the coordinator was started again")


@dataclass
class _Place:
    """What is known of those with one role and number."""

    member: Member | None = None
    appeared: bool = False  # nobody waits any more for its first process
    incarnation: int = 0  # the first that can register: those before it are over
    lost: int = 0  # those before this one are counted among the lost
    promise: tuple[float, str] | None = None  # until when somebody must have taken it, and why the run ends else


class Roster:
    """The members of a run.

    Attributes:
        began: When members were waited for first.
        group: The workers that take part in collectives; at first all that are expected.
        sealed: Whether training has begun. Before that views name no workers.
        lost_servers: The servers that have died and not come back.
        silent: The members that were silent: role, id and life of each, for the supervisions to end them.
        view_message: The view as a message: one for all, so that it is encoded once.
        gone: Those that were members and are no longer, with whether they left; of one place for who joins the last.
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
        places = [(SERVER, one) for one in range(settings.servers)]
        places += [(WORKER, one) for one in range(settings.workers + settings.max_joiners)]
        self._places = {place: _Place() for place in places}
        self._left_behind: set[Peer] = set()  # Members when the run was over, silent since: they are to hear why.
        self._view = View(0, (), ())
        self.view_message = self._message()

    # Members

    @property
    def members(self) -> list[Member]:
        """All of them, workers after servers."""
        return [place.member for place in self._places.values() if place.member is not None]

    def at(self, role: str, identity: int) -> Member | None:
        """The member with a number, whatever its life."""
        place = self._places.get((role, identity))
        return None if place is None else place.member

    def find(self, peer: Peer) -> Member | None:
        """A member, if it is this very process."""
        member = self.at(peer.role, peer.id)
        return member if member is not None and member.peer == peer else None

    def is_elastic(self, role: str, identity: int) -> bool:
        """Whether a place is for workers that join and leave: nobody waits for one in it."""
        return role == WORKER and identity >= self._settings.workers

    @property
    def of_the_run(self) -> set[int]:
        """The group without those that have joined: without these the others have nobody to train for."""
        return {worker for worker in self.group if not self.is_elastic(WORKER, worker)}

    def free_place(self) -> tuple[int, int] | None:
        """The lowest number that nobody has of those for workers that join, and a life that was never there."""
        for (role, identity), place in self._places.items():
            if place.member is None and self.is_elastic(role, identity):
                return identity, place.incarnation
        return None

    def missing(self) -> list[str]:
        """The expected members that have never been there."""
        found = [(role, one) for (role, one), place in self._places.items() if not place.appeared]
        absent = [(role, one) for role, one in found if not self.is_elastic(role, one)]
        return [f"{role} {one}" for role, one in sorted(absent, key=lambda place: place[0] == SERVER)]

    def has_left(self, worker: int) -> bool:
        """Whether a worker has gone on purpose."""
        return any(left and peer[:2] == (WORKER, worker) for peer, left in self.gone.items())

    def account_for(self, role: str, identity: int) -> None:
        """Nobody waits any more for the first process of a place."""
        if place := self._places.get((role, identity)):
            place.appeared = True

    def remove(self, member: Member, left: bool = False) -> None:
        """A process is gone, on purpose or not."""
        peer = member.peer
        place = self._places[peer.role, peer.id]
        place.member = None
        if self.is_elastic(peer.role, peer.id):
            # A new life comes in each epoch: those before the last are known by its number.
            place.incarnation = max(place.incarnation, peer.incarnation + 1)
            self.gone = {other: how for other, how in self.gone.items() if other[:2] != peer[:2]}
        self.gone[peer] = left

    # Joining

    def refusal(self, peer: Peer) -> str | None:
        """Why a process that is no member cannot become one."""
        settings, place = self._settings, self._places.get((peer.role, peer.id))
        if place is None:
            more = f", and {settings.max_joiners} places for workers that join" if settings.max_joiners else ""
            return (
                f"this run has {settings.workers} workers and {settings.servers} servers{more}: no {peer} is expected"
            )
        if (peer in self.gone or peer.incarnation < place.incarnation) and peer not in self._left_behind:
            return (
                f"{peer} was silent for {settings.timeout:g} s and counts as dead: the run goes on without it; "
                "raise `timeout` if it was only busy"
            )
        known = place.member
        if known is not None and known.peer != peer and known.peer.incarnation >= peer.incarnation:
            return f"{peer} was registered already ({known}), or has been replaced"
        return None

    def admit(self, now: float, peer: Peer, hello: Message) -> bool:
        """Register a process that is not refused, once; it is no member in the place of one not known to be dead."""
        place = self._places[peer.role, peer.id]
        if place.member is not None:
            return place.member.peer == peer
        place.member = member = Member.of(peer, hello, now)
        was_waited_for = not place.appeared and peer.id not in self.lost_servers
        place.appeared, place.promise = True, None
        place.incarnation = max(place.incarnation, peer.incarnation)
        if peer.incarnation and not self.is_elastic(peer.role, peer.id):
            self.history.note(now, f"{member} has taken the place of the one before")
        if peer.role == SERVER:
            # A server that another replaces without having been missed has lost its state all the same.
            self.lost_servers.discard(peer.id)
            # Training has waited for one that comes late: it is as old as the others. Not so where one had died in its
            # place before: then it may have begun with the copies.
            member.since = (self._view.begun if was_waited_for else 0) or self.number + 1
            self.publish()
        return True

    # Losing

    def look(self, now: float, over: bool, view: int, waited: float) -> None:
        """Take out the members that give no sign of life; to be called several times a second.

        And the servers for which a result has `waited` too long, that is told when they have seen a `view`. Once the
        run is `over` nobody's loss matters any more.
        """
        timeout, appear = self._settings.timeout, self._settings.appear
        silent = [member for member in self.members if now - member.seen > timeout]
        if over:
            for member in silent:
                self.remove(member)
                self._left_behind.add(member.peer)
            return
        if self._hears_nobody(now):
            return
        for member in silent:
            self._miss(now, member, f"was silent for {timeout:g} s")
        for member in self.members:
            # One that has not seen any view yet is being set up.
            patience = PATIENCE * timeout if member.acknowledged > 0 else max(appear, PATIENCE * timeout)
            if member.peer.role == SERVER and member.acknowledged < view and waited > patience:
                self._miss(now, member, f"has not taken up view {view} for {patience:g} s")
        if now - self.began > appear and (missing := self.missing()):
            self._finish(
                f"{', '.join(missing)} did not appear within {appear:g} s: start the run on all "
                "its machines, and dedicated servers; --interconnect.wait sets how long to wait"
            )
        for place in self._places.values():
            if place.promise is not None and now > place.promise[0]:
                self._finish(place.promise[1])

    def died(self, now: float, member: Member, how: str, replaced: bool, over: bool = False) -> None:
        """A supervision has said that a process has died; it may not have registered yet, or have been missed already.

        Another takes its place if it is `replaced`; if the run is `over` its loss matters no more.
        """
        place = self._places.get((member.peer.role, member.peer.id))
        if place is None or member.peer.incarnation < place.incarnation:
            return  # That was said before, or another has come since.
        place.incarnation = member.peer.incarnation + 1
        place.appeared |= not replaced
        known = place.member
        if known is not None and known.peer.incarnation > member.peer.incarnation:
            return
        if known is not None:
            self.remove(known)
            self._forget(known)
            member = known
        if not over:  # Else nobody needs a view of who is left.
            self._lose(now, member, how, replaced)

    def _hears_nobody(self, now: float) -> bool:
        """Whether it is more likely that this process is cut off than that all others have died at once."""
        members = self.members
        quiet = now - max((member.seen for member in members), default=now)
        timeout = self._settings.timeout
        if len(members) > 1 and quiet > timeout:
            self._finish(
                f"the coordinator has heard none of the {len(members)} members for {timeout:g} s: it is cut off"
            )
        return len(members) > 1 and quiet > timeout / 2

    def _miss(self, now: float, member: Member, how: str) -> None:
        self.remove(member)
        if not self.is_elastic(*member.peer[:2]):  # No supervision has started one of these.
            self.silent.append([*member.peer[:3]])
        self._forget(member)
        # The supervision asks for the silent, ends them, and says whether another takes their place.
        # That takes it a moment, unless it is gone itself.
        confirmed = min(self._settings.timeout, CONFIRM_SECONDS)
        self._lose(now, member, how, replaced=self._settings.supervised, seconds=confirmed)

    def _lose(self, now: float, member: Member, how: str, replaced: bool, seconds: float | None = None) -> None:
        """Decide whether the run goes on without a member that was removed.

        If it is `replaced`, that one must have come, or been announced, within some seconds; None for as long as any
        may take to appear.
        """
        peer = member.peer
        place = self._places[peer.role, peer.id]
        if peer.incarnation >= place.lost:
            place.lost = peer.incarnation + 1
            self.history.losses += 1
            self.history.note(now, f"{member} {how}")
        trouble = self._without_server(member, how) if peer.role == SERVER else self._without_worker(member, how)
        if trouble is not None and replaced:
            seconds = self._settings.appear if seconds is None else seconds
            text = f"{member} {how}, and nobody took its place within {seconds:g} s"
            place.promise = now + seconds, text
        elif trouble is not None:
            self._finish(trouble)
        if peer.role == WORKER and self.sealed and not self.of_the_run:
            self._finish(f"{member} {how}, and no worker is left")

    def _without_server(self, member: Member, how: str) -> str | None:
        self.lost_servers.add(member.peer.id)
        if self._copies_are_left:
            self.publish()  # Its copies take over; if it returns, it is a new one.
            return None
        return f"{member} {how}: its parameters are lost; with replication: 2 a run survives this"

    def _without_worker(self, member: Member, how: str) -> str | None:
        if self.is_elastic(*member.peer[:2]):
            return None
        if not self.sealed:
            when = " before training began" if self._settings.servers else ", and every worker is needed here"
            return f"{member} {how}{when}"
        if member.peer.id == WRITER:
            return f"{member}, which writes checkpoints and logs, {how}: with max_restarts it would return"
        return None

    # Views

    @property
    def number(self) -> int:
        """Of the present view."""
        return self._view.number

    @property
    def _copies_are_left(self) -> bool:
        return len(self.lost_servers) <= self._settings.survivable

    def publish(self) -> None:
        """Give the view, which has changed, the next number and send it to all."""
        members = self.members
        servers = [member for member in members if member.peer.role == SERVER]
        workers = [m for m in members if m.peer.role == WORKER and m.peer.id in self.group] if self.sealed else []
        self._view = View(
            self.number + 1,
            tuple(ServerInfo(m.peer.id, m.endpoint, m.public_key, m.since) for m in servers),
            tuple(WorkerInfo(m.peer.id, m.peer.incarnation, m.public_key) for m in workers),
            tuple(sorted(self.lost_servers)) if self._copies_are_left else (),
            self._view.begun or (self.number + 1 if self.sealed else 0),
        )
        self.view_message = self._message()
        self.tell_all(self.view_message)

    def _message(self) -> Message:
        return Message("view", {"view": self._view.as_dict()})

    def tell_all(self, message: Message) -> None:
        """Send a message to all members."""
        for member in self.members:
            self._send(member.peer, message)

    def not_seen(self, number: int) -> list[str]:
        """The servers that a view has not reached; those whose slices others hold may be lost."""
        servers = set(range(self._settings.servers)) - (self.lost_servers if self._copies_are_left else set())
        seen = {m.peer.id for m in self.members if m.peer.role == SERVER and m.acknowledged >= number}
        return [f"{SERVER} {one}" for one in sorted(servers - seen)]
