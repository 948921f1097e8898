"""The coordinator's list of members.

The list decides which processes are registered, which members are removed, and whether the run ends when a member is
lost.

A process that was removed cannot become a member again. Another process with a higher incarnation may take its place.
After every change of the membership, the coordinator sends a view with the next number to all members.
"""

from collections.abc import Callable
from dataclasses import replace

from cnnstrategies.identity import Identity
from cnnstrategies.paramserver.coordinator.places import Exit, History, Member, Place, PlaceEvent, PlaceState
from cnnstrategies.paramserver.coordinator.settings import SERVER, WORKER, CoordinatorSettings
from cnnstrategies.paramserver.core.node import Liveness, Message, Peer
from cnnstrategies.paramserver.core.view import ServerInfo, View, WorkerInfo

WRITER = 0  # id of the worker that writes checkpoints and logs; if this worker is lost and not replaced, the run ends
CONFIRM_SECONDS = 5.0  # seconds within which a supervision process must report whether it replaces a silent member
# A collective's result may have to wait until all servers have seen a view. A server that has not seen the view after
# this many time-outs is removed, even if it sends heartbeats.
PATIENCE = 6
# The coordinator checks its members more often than this fraction of the time-out. If no event occurs for longer, its
# process was stopped, for example by SIGSTOP.
STOPPED_FRACTION = 0.25


class Roster:
    """The members of a run, and their places.

    Args:
        settings: The coordinator's settings.
        send: Function that sends a message to a process.
        forget: Function to call after a member has been removed as lost.
        finish: Function that ends the run with an error message.

    Attributes:
        liveness: The book of liveness of the members.
        began: Time at which the coordinator began to wait for members.
        group: Ids of the workers that take part in collectives. At the start of the run the group contains all original
            workers.
        sealed: Whether training has begun. Views contain no workers before training begins.
        silent: Role, id and incarnation of each member that was removed after a long silence. The supervision processes
            end these members' processes.
        history: The last faults.
        view_message: Message with the current view. All members get the same object, so that the message is encoded
            only once.
        gone: By former member: how the member has gone. For a joiner's place, only the last process is kept.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        send: Callable[[Peer, Message], None],
        forget: Callable[[Member], None],
        finish: Callable[[str], None],
    ) -> None:
        self.liveness: Liveness[Peer] = Liveness(STOPPED_FRACTION * settings.timeout)
        self.began = 0.0
        self.group = set(range(settings.workers))
        self.sealed = False
        self.silent: list[list[str | int]] = []
        self.gone: dict[Peer, Exit] = {}
        self.history = History()
        self._settings = settings
        self._send = send
        self._forget = forget
        self._finish = finish
        places = [(SERVER, server) for server in range(settings.servers)]
        places += [(WORKER, worker) for worker in range(settings.workers + settings.max_joiners)]
        self._places = {place: Place() for place in places}
        self._view = View(0, (), ())
        self.view_message = self._make_view_message()

    # Members

    @property
    def members(self) -> list[Member]:
        """All members: first the servers, then the workers."""
        return [place.member for place in self._places.values() if place.member is not None]

    def member_at(self, role: str, identity: int) -> Member | None:
        """Return the member that has the place of a role and an id, whatever its incarnation.

        Return None if the place is free, or if the run does not have a place with this role and id.
        """
        place = self._places.get((role, identity))
        return None if place is None else place.member

    def find(self, peer: Peer) -> Member | None:
        """Return the member that is exactly this process: role, id, incarnation and random number are equal.

        Return None if the process is not a member.
        """
        member = self.member_at(peer.role, peer.id)
        return member if member is not None and member.peer == peer else None

    def is_joiners_place(self, role: str, identity: int) -> bool:
        """Return whether the place with this role and id is reserved for joiners, for which the run does not wait."""
        return role == WORKER and identity >= self._settings.workers

    @property
    def original_workers(self) -> set[int]:
        """Ids of the group's original workers: all workers of the group except joiners."""
        return {worker for worker in self.group if not self.is_joiners_place(WORKER, worker)}

    def free_place(self) -> tuple[int, int] | None:
        """Return the lowest id of a free place for a joiner, and an incarnation that no process in this place has used.

        Return None if no place is free.
        """
        for (role, identity), place in self._places.items():
            if place.member is None and self.is_joiners_place(role, identity):
                return identity, place.incarnation
        return None

    def missing(self) -> list[str]:
        """Return the names of the servers and original workers for which the coordinator still waits.

        No process has registered yet in the place of such a server or worker.
        """
        absent = [
            (role, identity)
            for (role, identity), place in self._places.items()
            if place.is_awaited and not self.is_joiners_place(role, identity)
        ]
        return [f"{role} {identity}" for role, identity in sorted(absent, key=lambda place: place[0] == SERVER)]

    def has_left(self, worker: int) -> bool:
        """Return whether a worker has left on purpose. A worker that has died or is still a member has not left."""
        return any(way == Exit.LEFT and peer[:2] == (WORKER, worker) for peer, way in self.gone.items())

    @property
    def lost_servers(self) -> set[int]:
        """Ids of the servers that have died and were not replaced."""
        servers = range(self._settings.servers)
        return {server for server in servers if self._places[SERVER, server].is_lost}

    def stop_expecting(self, role: str, identity: int) -> None:
        """Record that the coordinator no longer waits for the first process with a role and an id."""
        if place := self._places.get((role, identity)):
            place.happen(PlaceEvent.IS_GIVEN_UP)

    def remove(self, member: Member, way: Exit = Exit.LOST) -> None:
        """Remove a member from its place.

        Args:
            member: The member.
            way: How the member has gone.
        """
        peer = member.peer
        place = self._places[peer.role, peer.id]
        place.clear()
        del self.liveness.heard[peer]
        if self.is_joiners_place(peer.role, peer.id):
            # Joiners may come and go in every epoch, each with a new incarnation. To stay small, `gone` keeps only the
            # last process in a joiner's place. Earlier processes are refused because of their lower incarnation.
            place.incarnation = max(place.incarnation, peer.incarnation + 1)
            self.gone = {other: known for other, known in self.gone.items() if other[:2] != peer[:2]}
        self.gone[peer] = way

    # Registration

    def stranger(self, peer: Peer, hello: Message) -> str | None:
        """Return the error message for an original worker that belongs to another run, or None for all other processes.

        Servers and joiners do not name the run to which they belong, because the user who starts them has chosen it.

        Args:
            peer: Identity of the process.
            hello: The registration's message.
        """
        expected = self._settings.run
        if not expected or peer.role != WORKER or self.is_joiners_place(peer.role, peer.id):
            return None
        text = hello.string("run")
        if text == expected:
            return None
        try:
            run = str(Identity.read(text))
        except ValueError:
            run = "a program with another version of cnnstrategies"
        return f"this process of {run} has reached {Identity.read(expected)} at {self._settings.endpoint}"

    def refusal(self, peer: Peer) -> str | None:
        """Return the error message for a process that may not become a member.

        Return None if the process may become a member, or is a member already.
        """
        settings, place = self._settings, self._places.get((peer.role, peer.id))
        if place is None:
            joiners = f", and {settings.max_joiners} places for workers that join" if settings.max_joiners else ""
            return (
                f"this run has {settings.workers} workers and {settings.servers} servers{joiners}: it does not expect "
                f"{peer}"
            )
        way = self.gone.get(peer)
        if way != Exit.SILENT_AT_END and (way is not None or peer.incarnation < place.incarnation):
            return (
                f"{peer} was silent for {settings.timeout:g} s and counts as dead, so the run goes on without it: "
                "raise `timeout` if the process was only busy"
            )
        known = place.member
        if known is not None and known.peer != peer and known.peer.incarnation >= peer.incarnation:
            return f"{peer} was registered already ({known}), or another process has replaced it"
        return None

    def admit(self, peer: Peer, hello: Message) -> bool:
        """Make a process a member if its place is free. Call this only if :meth:`refusal` returns None.

        If an earlier incarnation still has the place, the method returns False. The process must register again later.

        Args:
            peer: Identity of the process.
            hello: The registration's message.

        Returns whether the process is a member now.

        Raises:
            ControlError: A field of the registration is missing or invalid.
        """
        place = self._places[peer.role, peer.id]
        if place.member is not None:
            return place.member.peer == peer
        was_waited_for = place.state == PlaceState.EXPECTED
        member = Member.from_hello(peer, hello)
        place.register(member)
        self.liveness.hear(peer)
        if peer.incarnation and not self.is_joiners_place(peer.role, peer.id):
            self.history.note(self.liveness.now, f"{member} has replaced the earlier process of {member.peer}")
        if peer.role == SERVER:
            # Training waits for the first process of each server, so these first processes count as equally old. If a
            # first process has died, training may have begun with the other servers that hold its slices. A new process
            # of the server then lacks the values, and must count as younger than the other servers.
            member.since = (self._view.begun if was_waited_for else 0) or self.number + 1
            self.publish()
        return True

    # Losses of members

    def check_members(self, over: bool, view: int, waited: float) -> None:
        """Remove members that were silent for too long, and end the run if it cannot go on. Call this regularly.

        The method also removes servers that send heartbeats, but have not acted on the view `view` for too long.

        Args:
            over: Whether the run is over. Silent members are then removed without further consequences.
            view: Number of the view that all servers must see before a collective's result can be sent; 0 if no result
                waits.
            waited: Seconds for which the result has waited.
        """
        now, timeout, appear = self.liveness.now, self._settings.timeout, self._settings.appear
        silent = [member for member in self.members if now - self.liveness.heard[member.peer] > timeout]
        if over:
            for member in silent:
                self.remove(member, Exit.SILENT_AT_END)
            return
        if self._is_cut_off():
            return
        for member in silent:
            self._remove_silent(member, f"was silent for {timeout:g} s")
        for member in self.members:
            # A server that has not acted on any view is still starting, and gets more time.
            patience = PATIENCE * timeout if member.acknowledged > 0 else max(appear, PATIENCE * timeout)
            if member.peer.role == SERVER and member.acknowledged < view and waited > patience:
                self._remove_silent(member, f"has not followed view {view} for {patience:g} s")
        if now - self.began > appear and (missing := self.missing()):
            self._finish(
                f"{', '.join(missing)} did not appear within {appear:g} s: start the run on all its machines, start "
                "the dedicated servers, or wait longer with --interconnect.wait"
            )
        for place in self._places.values():
            if place.promise is not None and now > place.promise[0]:
                self._finish(place.promise[1])

    def died(self, member: Member, how: str, replaced: bool, over: bool = False) -> None:
        """Act on a supervision process's report that a process has died.

        The process may have died before it registered, or may have been removed from the members already.

        Args:
            member: The process.
            how: Cause of the death, for messages to the user.
            replaced: Whether the supervision process starts another process in the place of the dead one.
            over: Whether the run is over. The process is then removed without further consequences.
        """
        place = self._places.get((member.peer.role, member.peer.id))
        if place is None or member.peer.incarnation < place.incarnation:
            return  # This death was reported before, or a later incarnation has registered.
        place.incarnation = member.peer.incarnation + 1
        known = place.member
        if known is not None and known.peer.incarnation > member.peer.incarnation:
            return
        if known is not None:
            self.remove(known)
            self._forget(known)
            member = known
        if not over:
            self._decide_without(member, how, replaced)
        elif not replaced:
            place.happen(PlaceEvent.IS_GIVEN_UP)

    def _is_cut_off(self) -> bool:
        """Return whether the coordinator has probably lost its network connection. If so, no member may be removed.

        The connection counts as lost if there are several members and all of them were silent for half the time-out,
        because it is unlikely that all members die at the same time. If all members were silent for the whole time-out,
        the method also ends the run.
        """
        members, timeout = len(self.liveness.heard), self._settings.timeout
        if members > 1 and len(self.liveness.silent(timeout)) == members:
            self._finish(
                f"the coordinator has not heard any of the {members} members for {timeout:g} s: check the network "
                "connection of the coordinator's machine"
            )
        return members > 1 and len(self.liveness.silent(timeout / 2)) == members

    def _remove_silent(self, member: Member, how: str) -> None:
        self.remove(member)
        if not self.is_joiners_place(*member.peer[:2]):  # Supervision processes cannot end joiners' processes.
            self.silent.append([*member.peer[:3]])
        self._forget(member)
        # The supervision processes request the list of silent members, end the processes of these members, and report
        # whether they replace them. If no report arrives within these seconds, the supervision process itself may be
        # gone, so the coordinator does not wait longer.
        confirmed = min(self._settings.timeout, CONFIRM_SECONDS)
        self._decide_without(member, how, replaced=self._settings.supervised, seconds=confirmed)

    def _decide_without(self, member: Member, how: str, replaced: bool, seconds: float | None = None) -> None:
        """Decide whether the run goes on without a removed member, and end the run if it cannot.

        Args:
            member: The removed member.
            how: Cause of the loss, for messages to the user.
            replaced: Whether another process may take the member's place.
            seconds: Seconds to wait until the other process registers, or until a supervision process reports that it
                starts the other process. None to wait `CoordinatorSettings.appear` seconds.
        """
        peer = member.peer
        place = self._places[peer.role, peer.id]
        place.happen(PlaceEvent.DIES_AND_RESTARTS if replaced else PlaceEvent.DIES)
        if peer.incarnation >= place.lost:
            place.lost = peer.incarnation + 1
            self.history.losses += 1
            self.history.note(self.liveness.now, f"{member} {how}")
        reason = self._without_server(member, how) if peer.role == SERVER else self._without_worker(member, how)
        if reason is not None and replaced:
            seconds = self._settings.appear if seconds is None else seconds
            text = f"{member} {how}, and no process took its place within {seconds:g} s"
            place.promise = self.liveness.now + seconds, text
        elif reason is not None:
            self._finish(reason)
        if peer.role == WORKER and self.sealed and not self.original_workers:
            self._finish(f"{member} {how}, and no worker is left")

    def _without_server(self, member: Member, how: str) -> str | None:
        """Return an error message if the run cannot go on without a lost server.

        Return None if other servers hold the lost server's slices.

        Args:
            member: The server.
            how: Cause of the loss, for the error message.
        """
        if self._has_copies:
            self.publish()
            return None
        return f"{member} {how}: its parameters are lost; with `replication: 2` a run survives this"

    def _without_worker(self, member: Member, how: str) -> str | None:
        """Return an error message if the run cannot go on without a worker; otherwise None.

        Args:
            member: The worker.
            how: Cause of the loss, for the error message.
        """
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
        """Number of the current view."""
        return self._view.number

    @property
    def _has_copies(self) -> bool:
        return len(self.lost_servers) <= self._settings.survivable

    def respecify(self, number: int) -> None:
        """Send a new view, with which all servers begin again without values.

        Args:
            number: Number of the run's new specification.
        """
        self._view = replace(self._view, begun=0, specification=number)
        self.publish()

    def publish(self) -> None:
        """Send a new view with the current members to all members."""
        members = self.members
        servers = [member for member in members if member.peer.role == SERVER]
        workers = [m for m in members if m.peer.role == WORKER and m.peer.id in self.group] if self.sealed else []
        self._view = View(
            self.number + 1,
            tuple(ServerInfo(m.peer.id, m.endpoint, m.public_key, m.since) for m in servers),
            tuple(WorkerInfo(m.peer.id, m.peer.incarnation, m.public_key) for m in workers),
            tuple(sorted(self.lost_servers)) if self._has_copies else (),
            self._view.begun or (self.number + 1 if self.sealed else 0),
            self._view.specification,
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
        """Return the names of the servers that have not reported yet that they act on view `number` or a newer view.

        Lost servers are left out if other servers hold their slices.
        """
        servers = set(range(self._settings.servers)) - (self.lost_servers if self._has_copies else set())
        seen = {m.peer.id for m in self.members if m.peer.role == SERVER and m.acknowledged >= number}
        return [f"{SERVER} {server}" for server in sorted(servers - seen)]
