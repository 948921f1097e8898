"""A coordinator's answers to watchers; they change nothing, and the coordinator keeps nothing about them."""

from collections.abc import Mapping, Sequence

from cnnstrategies.paramserver.coordinator.collective_rounds import CollectiveWait, abbreviated
from cnnstrategies.paramserver.coordinator.roster import Roster
from cnnstrategies.paramserver.coordinator.settings import WORKER, CoordinatorSettings
from cnnstrategies.paramserver.core.node import INTEGER_LIMIT, ControlError, Message
from cnnstrategies.paramserver.core.requests import DONE

WATCHER = "watcher"  # a role without membership
# a watcher's questions: the state of the run, and a place for a worker that wants to join
WATCH, PLACE = "watch", "place"
FIGURES = ("step", "samples", "sent", "received", "waited", "staleness", "pushed", "needs")


def answer(
    settings: CoordinatorSettings,
    roster: Roster,
    now: float,
    question: Message,
    waits: Sequence[CollectiveWait],
    ended: Message | None,
) -> Message:
    """Return the answer to a watcher's question.

    Args:
        settings: The coordinator's settings.
        roster: The members of the run.
        now: The present time.
        question: The watcher's message.
        waits: The present waits of the collectives.
        ended: The message about the run's end, if the run is over.

    Raises:
        ControlError: The question is unknown.
    """
    if question.kind not in (WATCH, PLACE):
        raise ControlError(f"a {WATCHER} does not send {question.kind!r}")
    fields = _run(settings, roster, now, waits) if question.kind == WATCH else _place(settings, roster, ended is None)
    fields["ended"] = None if ended is None else dict(ended.fields)
    return Message(DONE, fields, request=question.request)


def _run(
    settings: CoordinatorSettings, roster: Roster, now: float, waits: Sequence[CollectiveWait]
) -> dict[str, object]:
    history = roster.history
    return {
        "session": settings.session,
        "restarts": history.restarts,
        "timeout": settings.timeout,
        "seconds": now - roster.began,
        "training": roster.sealed,
        "members": [
            {
                "role": member.peer.role,
                "id": member.peer.id,
                "incarnation": member.peer.incarnation,
                "process": member.process,
                "host": member.host,
                "silent": now - member.seen,
                # A worker that has registered but is not admitted takes no part in steps.
                "takes_part": member.peer.role != WORKER or member.peer.id in roster.group,
                "measured": member.measured - roster.began,
                "figures": dict(member.figures),
            }
            for member in roster.members
        ],
        "missing": roster.missing()[:100],
        "waits": [[wait.operation, abbreviated(wait.waiting), abbreviated(wait.others)] for wait in waits],
        "losses": history.losses,
        "faults": [[now - at, text] for at, text in history.faults],
    }


def _place(settings: CoordinatorSettings, roster: Roster, goes_on: bool) -> dict[str, object]:
    """Return a free place for a joiner, if there is one; two joiners that ask at once may get the same place."""
    place = roster.free_place() if goes_on else None
    return {
        "session": settings.session,
        "workers": settings.workers,
        "timeout": settings.timeout,
        "max_joiners": settings.max_joiners,
        **({} if place is None else {"place": place[0], "incarnation": place[1]}),
    }


def figures_of(message: Message) -> Mapping[str, float] | None:
    """Return the figures of a heartbeat; None if it has none.

    All but ``step``, ``pushed`` and ``needs`` are sums since the member's start: samples, bytes sent and received,
    seconds waited for the servers, and the number of others' updates between the values that a worker computed with and
    its own update. A server's ``step`` is its number of updates. ``pushed`` is the number of the run's common steps
    that a worker has pushed. A worker goes on when all others have pushed the step ``needs``.

    Raises:
        ControlError: A figure has an unknown name or is not a number.
    """
    figures = message.fields.get("figures")
    if figures is None:
        return None
    if not isinstance(figures, dict) or any(name not in FIGURES for name in figures):
        raise ControlError(f"{message.kind}: the figures have unknown names")
    # A comparison with NaN is false.
    if any(type(figure) not in (int, float) or not 0 <= figure < INTEGER_LIMIT for figure in figures.values()):
        raise ControlError(f"{message.kind}: a figure is not a number")
    return figures
