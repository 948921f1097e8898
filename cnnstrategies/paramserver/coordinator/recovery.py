"""How a coordinator that follows one that was killed learns what that one knew: the members tell it."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cnnstrategies.paramserver.coordinator.memory import ROUND, VALUE, Report, Taken
from cnnstrategies.paramserver.coordinator.roster import SERVER, WORKER, Member, RosterState
from cnnstrategies.paramserver.core.node import ControlError, Message, Peer
from cnnstrategies.paramserver.core.view import ServerInfo, View

Life = tuple[str, int, int]


@dataclass(frozen=True)
class Fate:
    """What a supervision says of a process that has ended.

    Attributes:
        life: Role, id and life.
        process: Its process id.
        how: It ended; None if it left.
        replaced: Whether another takes its place.
    """

    life: Life
    process: int
    how: str | None
    replaced: bool


class Recovery:
    """Gathers what members report.

    It is complete when all members of the newest view that was reported have, before training all that are expected, or
    are known to have ended, or time is up. Nobody else is a member then: that one had not told anybody.

    Args:
        workers: How many the run has.
        servers: How many servers it has.
        began: When this began.
        timeout: Seconds to wait at most.
        appear: Seconds to wait at most while nobody has reported a view.
        elastic: How many workers may have joined beside those of the run.

    Attributes:
        view: The newest view that was reported; one without members if nobody knows one.
        state: What the coordinator that was killed has told with it; None likewise.
    """

    def __init__(
        self, workers: int, servers: int, began: float, timeout: float, appear: float, elastic: int = 0
    ) -> None:
        self.hellos: dict[Peer, Message] = {}
        self.reports: dict[Peer, Report] = {}
        self.seen: dict[Peer, float] = {}
        self.fates: dict[Life, Fate] = {}
        self._places = [(WORKER, one) for one in range(workers)] + [(SERVER, one) for one in range(servers)]
        self._others = [(WORKER, workers + one) for one in range(elastic)]
        self._until, self._latest = began + timeout, began + appear
        self._number = -1
        self.view = View(-1, (), ())
        self.state: RosterState | None = None

    def hear(self, now: float, sender: Peer, message: Message) -> None:
        """A process says hello.

        Raises:
            ControlError: Its report has other fields.
        """
        if (sender.role, sender.id) not in self._places + self._others:
            return
        Member.of(sender, message, now)  # checks it: it is acted on when all have reported
        report = Report.of(message)
        told = None if report is None else _newest(report)
        older = [peer for peer in self.hellos if peer[:2] == sender[:2] and peer != sender]
        if any(peer.life >= sender.life for peer in older):
            return
        for peer in older:
            self.leave(peer)
        self.hellos[sender], self.seen[sender] = message, now
        if report is not None and told is not None:
            self.reports[sender] = report
            view, state = told
            # Who has joined before training says nothing of those that are waited for.
            says = (sender.role, sender.id) in self._places or state.sealed >= 0
            if report.number > self._number and says:
                self.view, self.state = view, state
                self._number = report.number

    def leave(self, peer: Peer) -> None:
        """A process has ended."""
        self.hellos.pop(peer, None)
        self.reports.pop(peer, None)
        self.seen.pop(peer, None)

    def complete(self, now: float) -> bool:
        """Whether nobody else has to be waited for."""
        return now > (self._until if self._number >= 0 else self._latest) or not (self.missing() or self._successors())

    def missing(self) -> list[Life]:
        """Who has not reported: members of the newest view, and before training all that are expected.

        Views name no workers before training, and who comes to a collective changes no view.
        """
        lives = {peer[:2]: peer.life for peer in self.hellos}
        if self.state is None:
            return [(*place, 0) for place in self._places if place not in lives]
        ended = {life[:2]: life[2] for life in sorted(self.fates)}
        members = {(role, identity): life for role, identity, life in self.state.members}
        members |= {(WORKER, one.id): one.incarnation for one in self.view.workers}
        if self.state.sealed < 0:
            members = dict.fromkeys(self._places, 0) | members
        return [
            (*place, life)
            for place, life in sorted(members.items())
            if lives.get(place, -1) < life and ended.get(place, -1) < life
        ]

    def _successors(self) -> list[Life]:
        """Who takes the place of one that has ended before training, as far as is known, and has not reported.

        Nobody is told of these then, and they may have been told that training begins.
        """
        if self.state is None or self.state.sealed >= 0:
            return []
        lives = {peer[:2]: peer.life for peer in self.hellos}
        last = {life[:2]: fate for life, fate in sorted(self.fates.items())}
        return [
            (role, identity, fate.life[2] + 1)
            for (role, identity), fate in last.items()
            if fate.replaced and lives.get((role, identity), -1) <= fate.life[2]
        ]

    # What was told

    @property
    def number(self) -> int:
        """Of the newest view; -1 if nobody knows one."""
        return self._number

    def since(self, server: Peer) -> int | None:
        """Since which view a server is there; None if the newest view has not this very process."""
        report = self.reports.get(server)
        if report is None:
            return None
        own = _own(report, server)
        return next((one.since for one in self.view.servers if [one] == own), None)

    def told(self) -> dict[int, int]:
        """How many collectives each worker knows the results of."""
        return {peer.id: report.sequence for peer, report in self.reports.items() if peer.role == WORKER}

    def notices(self) -> dict[str, int]:
        """What was told to all."""
        return {name: value for report in self.reports.values() for name, value in report.notices.items()}

    def epochs(self, but: Collection[Peer]) -> dict[int, dict[int, Taken]]:
        """What each worker was given of each epoch, but for some."""
        found: dict[int, dict[int, Taken]] = {}
        for peer, report in self.reports.items():
            for number, taken in report.epochs.items() if peer not in but else ():
                found.setdefault(number, {})[peer.id] = taken
        return found

    def holders(self, rounds: Sequence[int]) -> dict[str, list[Peer]]:
        """Who has what the coordinator lacks: some collectives' results, and values; first those that were told."""
        found: dict[str, list[Peer]] = {f"{ROUND}{one}": [] for one in rounds}
        for peer, report in sorted(self.reports.items()):
            for item in report.items:
                if item in found or item.startswith(VALUE):
                    found.setdefault(item, []).append(peer)
        for item, peers in found.items():
            if item.startswith(VALUE):
                name = item.removeprefix(VALUE)
                peers.sort(key=lambda peer: not self.reports[peer].values[name])
        return found


def was_member(server: Peer, message: Message) -> bool:
    """Whether a server that says hello has been in a view.

    Raises:
        ControlError: Its report has other fields.
    """
    report = Report.of(message)
    return report is not None and bool(_own(report, server))


def begun(message: Message) -> int:
    """Number of the first view of training as a process knows it that says hello; 0 if it knows none.

    Raises:
        ControlError: Its report has other fields.
    """
    report = Report.of(message)
    return 0 if report is None else _newest(report)[0].begun


def _own(report: Report, server: Peer) -> list[ServerInfo]:
    return [one for one in _newest(report)[0].servers if one.id == server.id]


def _newest(report: Report) -> tuple[View, RosterState]:
    """The newest view that a member knows, and what it was told with it.

    Raises:
        ControlError: That is none.
    """
    try:
        told = Message("report", json.loads(report.newest))
    except (ValueError, RecursionError) as error:
        raise ControlError(f"report: {error}") from error
    if not isinstance(told.fields, dict):
        raise ControlError("report: no JSON object")
    return View.from_dict(told.object("view")), RosterState.of(told.object("roster"))
