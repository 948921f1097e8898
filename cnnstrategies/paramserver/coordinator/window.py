"""What a coordinator shows of its run to whoever watches it: that changes nothing, and nothing of it is kept."""

from collections.abc import Sequence

from cnnstrategies.paramserver.coordinator.history import History
from cnnstrategies.paramserver.coordinator.roster import WORKER, Roster
from cnnstrategies.paramserver.coordinator.settings import CoordinatorSettings
from cnnstrategies.paramserver.coordinator.watchdog import Wait, named
from cnnstrategies.paramserver.core.node import ControlError, Message
from cnnstrategies.paramserver.core.requests import DONE

WATCHER = "watcher"  # a role that is no member
WATCH, PLACE = "watch", "place"  # all that it asks: how the run goes, and as which worker one may join it


class Window:
    """Composes the answers.

    Args:
        settings: Of the coordinator.
        roster: The members.
        history: What has happened to them.
    """

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
            question: How the run goes; with ``events`` the answer has all that has happened to members, too. Or for a
                place in it.
            waits: Who waits for whom.
            ended: What the members were told if the run is over.

        Raises:
            ControlError: It is another kind of message.
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
        if question.flag("events"):
            fields["events"] = [[now - event.at, *event[1:]] for event in history.events]
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
