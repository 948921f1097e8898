"""Who becomes a member, who is one no longer, and whether the run goes on without those that are gone."""

from collections.abc import Callable

from cnnstrategies.paramserver.coordinator.roster import SERVER, WORKER, WRITER, Member, Roster
from cnnstrategies.paramserver.coordinator.settings import CoordinatorSettings
from cnnstrategies.paramserver.coordinator.watchdog import Watchdog
from cnnstrategies.paramserver.coordinator.window import History
from cnnstrategies.paramserver.core.node import Message, Peer

CONFIRM_SECONDS = 5.0  # for a supervision to say what becomes of one that was silent
PATIENCE = 6  # times the time-out: for a server that lives and does not take up a view


class Admission:
    """Registration and loss of members.

    Args:
        settings: Of the coordinator.
        roster: The members.
        watchdog: Hears of members that are to come.
        forget: Drops what is known of a member that is gone.
        finish: Ends the run.

    Attributes:
        silent: The members that were silent: role, id and life of each, for the supervisions to end them.
        history: What has happened to members.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        roster: Roster,
        watchdog: Watchdog,
        forget: Callable[[float, Member], None],
        finish: Callable[[str], None],
    ) -> None:
        self.silent: list[list[str | int]] = []
        self.history = History()
        self._settings = settings
        self._roster = roster
        self._watchdog = watchdog
        self._forget = forget
        self._finish = finish
        self._began = 0.0
        self._told: set[Peer] = set()
        self._left_behind: set[Peer] = set()  # Members when the run was over, silent since: they are to hear why.

    def begin(self, now: float) -> None:
        """Wait for the members from now on."""
        self._began = now

    # Joining

    def refusal(self, peer: Peer) -> str | None:
        """Why a process that is no member cannot become one."""
        if not self._roster.expects(peer.role, peer.id):
            return (
                f"this run has {self._settings.workers} workers and {self._settings.servers} "
                f"servers{self._places}: no {peer} is expected"
            )
        if self._roster.is_over(peer) and peer not in self._left_behind:
            return (
                f"{peer} was silent for {self._settings.timeout:g} s and counts as dead: the run goes on without it; "
                "raise `timeout` if it was only busy"
            )
        known = self._roster.at(peer.role, peer.id)
        if known is not None and known.peer != peer and known.peer.life >= peer.life:
            return f"{peer} was registered already ({known}), or has been replaced"
        return None

    @property
    def _places(self) -> str:
        elastic = self._settings.elastic
        return f", and {elastic} places for workers that join" if elastic else ""

    def is_early(self, peer: Peer) -> bool:
        """Whether a process comes to take the place of another that is not known to be dead: it must ask again."""
        known = self._roster.at(peer.role, peer.id)
        return known is not None and known.peer.life < peer.life

    def admit(self, now: float, peer: Peer, message: Message) -> None:
        """Register a process that is not refused; a second time does nothing."""
        if self._roster.find(peer) is not None:
            return
        member = Member.of(peer, message, now)
        was_waited_for = not self._roster.has_appeared(peer.role, peer.id) and peer.id not in self._roster.lost_servers
        self._roster.add(member)
        self.history.came(now, member, returns=not self._roster.is_elastic(peer.role, peer.id))
        self._watchdog.kept(peer.role, peer.id)
        if peer.role == SERVER:
            # A server that another replaces without having been missed has lost its state all the same.
            self._roster.lost_servers.discard(peer.id)
            # Training has waited for one that comes late: it is as old as the others. Not so where one had died in its
            # place before: then it may have begun with the copies.
            member.since = (self._roster.begun if was_waited_for else 0) or self._roster.number + 1
            self._roster.publish()

    # Losing

    def look(self, now: float, over: bool, overdue: tuple[int, list[str]]) -> None:
        """Take out the members that give no sign of life; to be called several times a second.

        Args:
            now: The time.
            over: Whether the run is over, and nobody's loss matters any more.
            overdue: A view, and the servers that live and have not taken it up in good time.
        """
        timeout = self._settings.timeout
        if over:
            for member in self._roster.members:
                if now - member.seen > timeout:
                    self._roster.remove(member)
                    self._left_behind.add(member.peer)
            return
        if self._hears_nobody(now):
            return
        for member in self._roster.members:
            if now - member.seen > timeout:
                self._miss(now, member, f"was silent for {timeout:g} s")
        view, blind = overdue
        for member in self._roster.members:
            # One that has not seen any yet is being set up: it imports.
            set_up = member.acknowledged > 0 or now - member.came > self._settings.appear
            if str(member.peer) in blind and set_up:
                self._miss(now, member, f"has not taken up view {view} for {PATIENCE * timeout:g} s")
        self.expect(now)

    def expect(self, now: float) -> None:
        """End the run if the time is up and somebody has never been there."""
        if now - self._began > self._settings.appear and (missing := self._roster.missing()):
            self._finish(
                f"{', '.join(missing)} did not appear within {self._settings.appear:g} s: start the run on all "
                "its machines, and dedicated servers; --network.wait sets how long to wait"
            )

    def died(self, now: float, member: Member, how: str, replaced: bool, over: bool = False) -> None:
        """A supervision has said that a process has died.

        Args:
            now: The time.
            member: Which one; it may not have registered yet, or have been missed already.
            how: In which way.
            replaced: Whether another takes its place.
            over: Whether the run is over, and its loss matters no more.
        """
        role, identity, life, _ = member.peer
        if member.peer in self._told or self._roster.has_begun_again(member.peer):
            return
        self._told.add(member.peer)
        self._roster.bury(role, identity, life)
        if not replaced:
            self._roster.account_for(role, identity)
        known = self._roster.at(role, identity)
        if known is not None and known.peer.life > life:
            return
        if known is not None:
            self._roster.remove(known)
            self._forget(now, known)
            member = known
        if not over:  # Else nobody needs a view of who is left.
            self._lose(now, member, how, replaced)

    def _hears_nobody(self, now: float) -> bool:
        """Whether it is more likely that this process is cut off than that all others have died at once."""
        members = self._roster.members
        quiet = now - max((member.seen for member in members), default=now)
        timeout = self._settings.timeout
        if len(members) > 1 and quiet > timeout:
            self._finish(
                f"the coordinator has heard none of the {len(members)} members for {timeout:g} s: it is cut off"
            )
        return len(members) > 1 and quiet > timeout / 2

    def _miss(self, now: float, member: Member, how: str) -> None:
        self._roster.remove(member)
        if not self._roster.is_elastic(*member.peer[:2]):  # No supervision has started one of these.
            self.silent.append([*member.peer[:3]])
        self._forget(now, member)
        # The supervision asks for the silent, ends them, and says whether another takes their place.
        # That takes it a moment, unless it is gone itself.
        confirmed = min(self._settings.timeout, CONFIRM_SECONDS)
        self._lose(now, member, how, replaced=self._settings.supervised, seconds=confirmed)

    def _lose(self, now: float, member: Member, how: str, replaced: bool, seconds: float | None = None) -> None:
        """Decide whether the run goes on without a member that was removed.

        Args:
            now: The time.
            member: Which one.
            how: It was lost.
            replaced: Whether another takes its place.
            seconds: In which that one must have come, or been announced.
        """
        self.history.lost(now, member, how)
        role, identity = member.peer.role, member.peer.id
        trouble = self._of_server(now, member, how) if role == SERVER else self._of_worker(member, how)
        if trouble is not None and replaced:
            seconds = self._settings.appear if seconds is None else seconds
            text = f"{member} {how}, and nobody took its place within {seconds:g} s"
            self._watchdog.promise(role, identity, now + seconds, text)
        elif trouble is not None:
            self._finish(trouble)
        if role == WORKER and self._roster.sealed and not self._roster.of_the_run:
            self._finish(f"{member} {how}, and no worker is left")

    def _of_server(self, now: float, member: Member, how: str) -> str | None:
        self._roster.lost_servers.add(member.peer.id)
        if self._roster.copies_are_left:
            self._roster.publish()  # Its copies take over; if it returns, it is a new one.
            return None
        return f"{member} {how}: its parameters are lost; with replication: 2 a run survives this"

    def _of_worker(self, member: Member, how: str) -> str | None:
        if self._roster.is_elastic(*member.peer[:2]):
            return None
        if not self._roster.sealed:
            when = " before training began" if self._settings.servers else ", and every worker is needed here"
            return f"{member} {how}{when}"
        if member.peer.id == WRITER:
            return f"{member}, which writes checkpoints and logs, {how}: with max_restarts it would return"
        return None
