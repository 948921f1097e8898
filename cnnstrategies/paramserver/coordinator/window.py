"""What a coordinator shows of its run to whoever watches it: that changes nothing, and nothing of it is kept."""

from collections import deque
from collections.abc import Mapping, Sequence

from cnnstrategies.paramserver.coordinator.roster import WORKER, Member, Roster
from cnnstrategies.paramserver.coordinator.settings import CoordinatorSettings
from cnnstrategies.paramserver.coordinator.watchdog import Wait, named
from cnnstrategies.paramserver.core.node import LARGEST, ControlError, Message
from cnnstrategies.paramserver.core.requests import DONE

MOST_LOST = 4096  # of which it is known that they are
MOST_FAULTS = 50
LONGEST = 300  # characters of a fault
FIGURES = ("step", "samples", "sent", "received", "waited", "staleness", "pushed", "needs")


class History:
    """The last faults.

    Attributes:
        faults: When and what: deaths, returns, restarts.
        losses: How many processes were lost, those included that are forgotten.
        restarts: How many of these were coordinators, each of which this one has followed.
    """

    def __init__(self) -> None:
        self.faults: deque[tuple[float, str]] = deque(maxlen=MOST_FAULTS)
        self.losses = 0
        self.restarts = 0
        self._lost: deque[tuple[str, int, int]] = deque(maxlen=MOST_LOST)

    def came(self, now: float, member: Member, returns: bool = True) -> None:
        """A process has become a member.

        Args:
            now: The time.
            member: It.
            returns: Whether one with a later life comes for another that was lost.
        """
        if member.peer.life and returns:
            self._note(now, f"{member} has taken the place of the one before")

    def lost(self, now: float, member: Member, how: str) -> None:
        """A member was lost; what is said later of the same one adds nothing."""
        if member.peer[:3] in self._lost:
            return
        self._lost.append(member.peer[:3])
        self.losses += 1
        self._note(now, f"{member} {how}")

    def begun_again(self, now: float) -> None:
        """This coordinator follows one that was killed."""
        self.losses += 1
        self.restarts += 1
        self._note(now, "the coordinator was started again")

    def _note(self, now: float, text: str) -> None:
        self.faults.append((now, text[:LONGEST]))


WATCHER = "watcher"  # a role that is no member
WATCH, PLACE = "watch", "place"  # all that it asks: how the run goes, and as which worker one may join it


class Window:
    """Composes the answers."""

    def __init__(self, settings: CoordinatorSettings, roster: Roster, history: History) -> None:
        self._settings = settings
        self._roster = roster
        self._history = history
        self._began = 0.0

    def begin(self, now: float) -> None:
        """Count seconds from now on."""
        self._began = now

    def answer(self, now: float, question: Message, waits: Sequence[Wait], ended: Message | None) -> Message:
        """The answer to a question.

        Args:
            now: The time.
            question: How the run goes, or for a place in it.
            waits: Who waits for whom.
            ended: What the members were told if the run is over.
        """
        if question.kind == PLACE:
            return Message(DONE, self._place(ended), request=question.request)
        if question.kind != WATCH:
            raise ControlError(f"a {WATCHER} does not say {question.kind!r}")
        history = self._history
        fields = {
            "session": self._settings.session,
            "restarts": history.restarts,
            "timeout": self._settings.timeout,
            "seconds": now - self._began,
            "training": self._roster.sealed,
            "ended": None if ended is None else dict(ended.fields),
            "members": self._members(now),
            "missing": self._roster.missing()[:100],
            "waits": [[wait.what, named(wait.who), named(wait.others)] for wait in waits],
            "losses": history.losses,
            "faults": [[now - at, text] for at, text in history.faults],
        }
        return Message(DONE, fields, request=question.request)

    def _place(self, ended: Message | None) -> dict[str, object]:
        """A place for a worker that wants to join, or why it has none; two that ask at once may get the same."""
        settings, place = self._settings, self._roster.free_place()
        fields: dict[str, object] = {
            "session": settings.session,
            "workers": settings.workers,
            "timeout": settings.timeout,
            "elastic": settings.elastic,
            "ended": None if ended is None else dict(ended.fields),
        }
        if place is not None and ended is None:
            fields |= {"place": place[0], "life": place[1]}
        return fields

    def _members(self, now: float) -> list[dict[str, object]]:
        return [
            {
                "role": member.peer.role,
                "id": member.peer.id,
                "life": member.peer.life,
                "process": member.process,
                "host": member.host,
                "silent": now - member.seen,
                # One that has come and is not let in yet is no part of a step.
                "takes_part": member.peer.role != WORKER or member.peer.id in self._roster.group,
                "measured": member.measured - self._began,
                "figures": dict(member.figures),
            }
            for member in self._roster.members
        ]


def figures_of(message: Message) -> Mapping[str, float] | None:
    """The figures of a heartbeat; None if it has none.

    All but ``step``, ``pushed`` and ``needs`` are sums since the member began: samples, bytes sent and received,
    seconds waited for the servers, and updates of others between what it has computed with and its own. A server's step
    is its updates. A worker has ``pushed`` so many of the run's common steps, and goes on when all others have pushed
    what it ``needs``.
    """
    figures = message.fields.get("figures")
    if figures is None:
        return None
    if not isinstance(figures, dict) or any(name not in FIGURES for name in figures):
        raise ControlError(f"{message.kind}: figures of other names")
    # A comparison with what is no number at all is false.
    if any(type(one) not in (int, float) or not 0 <= one < LARGEST for one in figures.values()):
        raise ControlError(f"{message.kind}: figures that are no numbers")
    return figures
