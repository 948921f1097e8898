"""A coordinator's replies to watchers. A watcher is a process that asks for the state of a run but is not a member.

The coordinator does not keep any state about watchers, and a watcher's request does not change the coordinator's state.
"""

from collections.abc import Mapping, Sequence

from cnnstrategies.paramserver.coordinator.collective_rounds import CollectiveWait, abbreviated
from cnnstrategies.paramserver.coordinator.roster import Roster
from cnnstrategies.paramserver.coordinator.settings import WORKER, CoordinatorSettings
from cnnstrategies.paramserver.core.node import INTEGER_LIMIT, ControlError, Message
from cnnstrategies.paramserver.core.requests import DONE

WATCHER = "watcher"  # role of a process that asks the coordinator for the state of the run, but is not a member
# Kinds of a watcher's requests. WATCH asks for the state of the run, and PLACE asks for a free worker id for a joiner.
WATCH, PLACE = "watch", "place"
# Names of the figures that members report with their heartbeats; see `figures_of`.
FIGURES = ("step", "samples", "sent", "received", "waited", "staleness", "pushed", "needs")


def answer(
    settings: CoordinatorSettings,
    roster: Roster,
    now: float,
    question: Message,
    waits: Sequence[CollectiveWait],
    ended: Message | None,
) -> Message:
    """Return the reply to a watcher's question.

    Args:
        settings: The coordinator's settings.
        roster: The members of the run.
        now: The current time.
        question: The watcher's message.
        waits: Operations that workers wait for now; see :attr:`.Rounds.waits`.
        ended: The message to all members with the reason why the run has ended; None before the end.

    Raises:
        ControlError: The kind of the question is unknown.
    """
    if question.kind not in (WATCH, PLACE):
        raise ControlError(f"a {WATCHER} must not send the request {question.kind!r}")
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
                "silent": now - roster.liveness.heard[member.peer],
                # A registered worker that is not admitted to the group yet does not take part in steps.
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
    """Return the reply to a joiner that asks for a free worker id.

    The id is not reserved, so two joiners that ask at the same time may get the same id.
    """
    place = roster.free_place() if goes_on else None
    return {
        "session": settings.session,
        "workers": settings.workers,
        "timeout": settings.timeout,
        "max_joiners": settings.max_joiners,
        **({} if place is None else {"place": place[0], "incarnation": place[1]}),
    }


def figures_of(message: Message) -> Mapping[str, float] | None:
    """Return the figures in a member's heartbeat by name; None if the heartbeat contains no figures.

    | name      | meaning                                                                                         |
    | --------- | ----------------------------------------------------------------------------------------------- |
    | step      | a worker's step; a server's number of updates                                                   |
    | samples   | number of samples that a worker has trained on since its start                                  |
    | sent      | number of bytes sent since the member's start                                                   |
    | received  | number of bytes received since the member's start                                               |
    | waited    | seconds that a worker has waited for the servers since its start                                |
    | staleness | number of other workers' updates between a worker's pull and its push, summed over its steps    |
    | pushed    | number of the run's steps that a worker has pushed                                              |
    | needs     | number of the run's steps that all other workers must push before this worker can go on         |

    Raises:
        ControlError: The figures are not a dictionary, or a figure has an unknown name or is not a number.
    """
    figures = message.fields.get("figures")
    if figures is None:
        return None
    if not isinstance(figures, dict) or any(name not in FIGURES for name in figures):
        raise ControlError(
            f"{message.kind}: figures is not a dictionary, or contains a name other than {', '.join(FIGURES)}"
        )
    # The range check also refuses NaN, because comparisons with NaN are false.
    if any(type(figure) not in (int, float) or not 0 <= figure < INTEGER_LIMIT for figure in figures.values()):
        raise ControlError(f"{message.kind}: a figure is not a number from 0 to 2^63")
    return figures
