"""How a coordinator goes on where one has stopped that was killed."""

from collections.abc import Callable
from dataclasses import dataclass

from cnnstrategies.paramserver.coordinator.admission import Admission
from cnnstrategies.paramserver.coordinator.dispatch import Dispatcher
from cnnstrategies.paramserver.coordinator.meetings import Rounds
from cnnstrategies.paramserver.coordinator.memory import ROUND, VALUE
from cnnstrategies.paramserver.coordinator.recovery import Fate, Life, Recovery
from cnnstrategies.paramserver.coordinator.roster import SERVER, WORKER, Member, Roster
from cnnstrategies.paramserver.coordinator.settings import CoordinatorSettings
from cnnstrategies.paramserver.coordinator.values import Values
from cnnstrategies.paramserver.core.node import Message, Peer
from cnnstrategies.paramserver.core.requests import HELD, PROBE


@dataclass(frozen=True)
class Parts:
    """What a coordinator consists of."""

    roster: Roster
    rounds: Rounds
    values: Values
    dispatcher: Dispatcher
    admission: Admission


class Restart:
    """Waits for the members' reports, takes up what they say, and asks for what it lacks.

    Args:
        settings: Of the coordinator.
        parts: It consists of.
        send: Sends a message.
        hello: Lets a process register.
        forget: Drops what is known of a member that is gone.
        finish: Ends the run.

    Attributes:
        notices: What was told to all before.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        parts: Parts,
        send: Callable[[Peer, Message], None],
        hello: Callable[[float, Peer, Message], None],
        forget: Callable[[float, Member], None],
        finish: Callable[[str, bool], None],
    ) -> None:
        self.notices: dict[str, int] = {}
        self._settings = settings
        self._parts = parts
        self._send = send
        self._hello = hello
        self._forget_member = forget
        self._finish = finish
        self._recovery: Recovery | None = None
        self._holders: dict[str, list[Peer]] = {}
        self._leaving: dict[Peer, float] = {}  # who has left and may know what nobody else does; when it was heard

    def begin(self, now: float) -> None:
        """Wait for reports from now on, if there was a coordinator before."""
        settings = self._settings
        if settings.term:
            self._recovery = Recovery(
                settings.workers, settings.servers, now, settings.timeout, settings.appear, settings.elastic
            )

    @property
    def waits(self) -> bool:
        """Whether reports are waited for."""
        return self._recovery is not None

    # Reports

    def hear(self, now: float, sender: Peer, message: Message) -> None:
        """A process that may be a member says something while reports are waited for."""
        recovery = self._recovery
        assert recovery is not None
        if message.kind == "hello":
            recovery.hear(now, sender, message)
        elif message.kind == "over":
            recovery.leave(sender)
        elif sender not in recovery.hellos:
            self._send(sender, Message("again"))
        else:
            recovery.seen[sender] = now  # By whatever it says: who has no view yet asks, and sends no heartbeats.
            if message.kind == "beat":
                self._send(sender, Message("pong", {"number": 0}))
            elif message.kind == PROBE:
                numbers = message.integers("ids")
                why = [f"{role} {identity}" for role, identity, _ in recovery.missing()[:4]]
                self._send(sender, Message(HELD, {"ids": numbers, "blames": [why] * len(numbers)}))

    def ended(self, life: Life, process: int, how: str | None, replaced: bool) -> bool:
        """A supervision says that a process has ended; whether that is kept until the reports are there."""
        if self._recovery is not None:
            self._recovery.fates[life] = Fate(life, process, how, replaced)
        return self._recovery is not None

    def look(self, now: float) -> None:
        """Go on as soon as the reports are there; to be called several times a second."""
        for peer, heard in list(self._leaving.items()):
            if now - heard > self._settings.timeout:
                self.forget(now, peer)
        recovery = self._recovery
        if recovery is not None and recovery.complete(now):
            self._recovery = None
            self._take_up(now, recovery)

    def give_up(self) -> None:
        """The run is over: let those in that are here, so that they are told."""
        recovery, self._recovery = self._recovery, None
        for peer, seen in recovery.seen.items() if recovery is not None else ():
            self._parts.roster.add(Member(peer, 0, "", seen))

    def _take_up(self, now: float, recovery: Recovery) -> None:
        roster, admission = self._parts.roster, self._parts.admission
        missing = recovery.missing()
        roster.follow(self._settings.term, recovery.view.begun, recovery.state)
        for fate in recovery.fates.values():
            if fate.how is None:
                self._left(fate.life)
        told = recovery.told()
        # Who was being let in as the last one was killed has not begun, and asks again.
        roster.group -= {one for one, known in told.items() if not known and roster.is_elastic(WORKER, one)}
        sequence = max([roster.reached, *told.values()])
        self._holders = recovery.holders(self._rounds_needed(sequence))
        lacks = [int(item.removeprefix(ROUND)) for item in self._holders if item.startswith(ROUND)]
        self._parts.rounds.follow(sequence, told, lacks)
        # What these had not worked on the last coordinator has given out again, and maybe to others.
        let_go = [peer for peer in recovery.reports if self._was_let_go(peer)]
        self._parts.dispatcher.follow(
            recovery.epochs(but=let_go), () if recovery.state is None else recovery.state.done
        )
        self.notices.update(recovery.notices())
        for peer, message in recovery.hellos.items():
            if peer in recovery.reports and not roster.is_over(peer):
                self._admit(peer, message, recovery)
        for peer, left in list(roster.gone.items()):
            if not left and roster.at(peer.role, peer.id) is None:  # The last one has waited for another in its place.
                how = "was lost before the coordinator was started again"
                admission.lost(now, Member(Peer(*peer[:3]), 0, "another coordinator's word", now), how)
        for fate in recovery.fates.values():
            if fate.how is not None:
                member = Member(Peer(*fate.life), fate.process, "this node", now)
                admission.died(now, member, fate.how, fate.replaced)
        for life in missing if recovery.number >= 0 else ():
            how = f"gave no sign of life for {self._settings.timeout:g} s after the coordinator was started again"
            admission.lost(now, Member(Peer(*life), 0, "another coordinator's word", now), how)
        self._sweep(now, recovery)
        if not roster.of_the_run:
            self._finish("the session is over: every worker has left", True)
        roster.publish()
        for peer, message in recovery.hellos.items():
            self._hello(recovery.seen[peer], peer, message)
        admission.expect(now)  # At once: a report that comes now would meet a coordinator that knows nothing.
        for peer in recovery.reports:
            if roster.find(peer) is None and not roster.gone.get(peer):
                self.forget(now, peer)  # It is refused, and hands over nothing: another is asked.
        for item in [item for item, peers in self._holders.items() if not peers]:
            self._lose(now, item)
        self._leaving = {peer: seen for peer, seen in recovery.seen.items() if roster.gone.get(peer)}
        for peer in [*self._leaving, *(member.peer for member in roster.members)]:
            self.ask(peer)

    def _rounds_needed(self, sequence: int) -> list[int]:
        """The set-up's results, for workers that are started again, and the last one for who has not got it."""
        roster = self._parts.roster
        set_up = roster.sealed_at if roster.sealed else sequence
        return sorted({*range(set_up), *range(max(0, sequence - 1), sequence)})

    def _sweep(self, now: float, recovery: Recovery) -> None:
        """Take those out of the group that are no members any more."""
        roster = self._parts.roster
        lives = {one.id: one.incarnation for one in recovery.view.workers}
        for worker in sorted(roster.group) if roster.sealed else ():
            member, life = roster.at(WORKER, worker), lives.get(worker, 0)
            if member is None or member.peer.life != life:
                self._forget_member(now, Member(Peer(WORKER, worker, life), 0, "", now))

    def _was_let_go(self, peer: Peer) -> bool:
        """Whether a member was lost before, or has joined the run and left it: its word of chunks counts no more."""
        roster = self._parts.roster
        return roster.is_over(peer) and (roster.is_elastic(*peer[:2]) or not roster.has_left(peer.id))

    def _left(self, life: Life) -> None:
        roster = self._parts.roster
        roster.bury(*life)
        roster.account_for(*life[:2])
        roster.gone[Peer(*life)] = True
        if life[0] == WORKER:
            roster.group.discard(life[1])

    def _admit(self, peer: Peer, message: Message, recovery: Recovery) -> None:
        roster = self._parts.roster
        since = recovery.since(peer) if peer.role == SERVER else 0
        if since is None:
            return  # It is new to all others.
        seen, report = recovery.seen[peer], recovery.reports[peer]
        member = Member.of(peer, message, seen)
        member.acknowledged, member.since, member.told = report.seen, since, report.sequence
        roster.add(member)
        self._parts.admission.history.was_here(seen, peer)
        if peer.role == SERVER:
            roster.lost_servers.discard(peer.id)

    # What is lacking

    def leaves(self, now: float, peer: Peer) -> None:
        """One that has left says something."""
        if peer in self._leaving:
            self._leaving[peer] = now
            self.ask(peer)

    def needs(self, peer: Peer) -> bool:
        """Whether one is to hand over something."""
        return any(peers[:1] == [peer] for peers in self._holders.values())

    def ask(self, peer: Peer) -> None:
        """Ask a member for what it alone is to hand over; to be called now and then."""
        items = [item for item, peers in self._holders.items() if peers[:1] == [peer]]
        if items:
            self._send(peer, Message("lacks", {"items": items}))

    def give(self, now: float, message: Message) -> None:
        """Take what a member hands over."""
        item = message.string("item")
        if item not in self._holders:
            return
        if item.startswith(VALUE):
            self._parts.values.give(item.removeprefix(VALUE), message.frames)
        elif item == f"{ROUND}{message.integer('sequence')}":
            self._end(self._parts.rounds.give(now, message))
        del self._holders[item]

    def forget(self, now: float, peer: Peer) -> None:
        """A member is gone; one that has left hands over first what nobody else may know."""
        if self._parts.roster.gone.get(peer) and self.needs(peer) and peer not in self._leaving:
            self._leaving[peer] = now
            return
        self._leaving.pop(peer, None)
        for item, peers in list(self._holders.items()):
            if peer in peers:
                peers.remove(peer)
                if not peers:
                    self._lose(now, item)

    def _lose(self, now: float, item: str) -> None:
        del self._holders[item]
        if item.startswith(ROUND):
            self._end(self._parts.rounds.lose(now, int(item.removeprefix(ROUND))))

    def _end(self, trouble: str | None) -> None:
        if trouble is not None:
            self._finish(trouble, False)
