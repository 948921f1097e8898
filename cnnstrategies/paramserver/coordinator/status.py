"""What a coordinator shows of its run to whoever watches it: that changes nothing, and nothing of it is kept."""

from collections.abc import Mapping, Sequence

from cnnstrategies.paramserver.coordinator.collective_rounds import CollectiveWait, named
from cnnstrategies.paramserver.coordinator.roster import Roster
from cnnstrategies.paramserver.coordinator.settings import WORKER, CoordinatorSettings
from cnnstrategies.paramserver.core.node import LARGEST, ControlError, Message
from cnnstrategies.paramserver.core.requests import DONE

WATCHER = "watcher"  # a role that is no member
WATCH, PLACE = "watch", "place"  # all that it asks: how the run goes, and as which worker one may join it
FIGURES = ("step", "samples", "sent", "received", "waited", "staleness", "pushed", "needs")


def answer(
    settings: CoordinatorSettings,
    roster: Roster,
    now: float,
    question: Message,
    waits: Sequence[CollectiveWait],
    ended: Message | None,
) -> Message:
    """The answer to a question; `ended` is what the members were told if the run is over."""
    if question.kind not in (WATCH, PLACE):
        raise ControlError(f"a {WATCHER} does not say {question.kind!r}")
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
                # One that has come and is not let in yet is no part of a step.
                "takes_part": member.peer.role != WORKER or member.peer.id in roster.group,
                "measured": member.measured - roster.began,
                "figures": dict(member.figures),
            }
            for member in roster.members
        ],
        "missing": roster.missing()[:100],
        "waits": [[wait.what, named(wait.who), named(wait.others)] for wait in waits],
        "losses": history.losses,
        "faults": [[now - at, text] for at, text in history.faults],
    }


def _place(settings: CoordinatorSettings, roster: Roster, goes_on: bool) -> dict[str, object]:
    """A place for a worker that wants to join, if there is one; two that ask at once may get the same."""
    place = roster.free_place() if goes_on else None
    return {
        "session": settings.session,
        "workers": settings.workers,
        "timeout": settings.timeout,
        "max_joiners": settings.max_joiners,
        **({} if place is None else {"place": place[0], "incarnation": place[1]}),
    }


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
