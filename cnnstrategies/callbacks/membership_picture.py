"""When which process of a run was a member, as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

COLOURS = {"worker": "#1f6feb", "server": "#8a8f98"}
LOST = "#cf222e"
MOST_ROWS = 64

Bar = tuple[float, float, bool]  # from, to, lost


def bars(events: Sequence[Sequence[Any]]) -> dict[tuple[str, int], list[Bar]]:
    """The lives in each place, in seconds before now, which are negative.

    Args:
        events: Of a coordinator: seconds ago, role, id, life and what has happened, in order. The first ones may be
            forgotten: who leaves and has not come was there before.
    """
    places: dict[tuple[str, int], list[Bar]] = {}
    here: dict[tuple[str, int], float] = {}
    begin = -max((float(event[0]) for event in events), default=0.0)
    for ago, role, identity, _, what in events:
        place, at = (str(role), int(identity)), -float(ago)
        own = places.setdefault(place, [])
        if what == "came":
            if place in here:  # Nobody has said that the one before had gone.
                own.append((here[place], at, True))
            here[place] = at
        elif place in here or not own:
            own.append((here.pop(place, begin), at, what == "lost"))
    for place, since in here.items():
        places[place].append((since, 0.0, False))
    return dict(sorted(places.items()))


def draw_membership(events: Sequence[Sequence[Any]], path: Path) -> None:
    """Draw a row for each place, and a bar for each life in it; a cross where one was lost.

    Args:
        events: See :func:`bars`.
        path: The PNG file; its directory is made if need be.
    """
    rows = list(bars(events).items())[:MOST_ROWS]
    begin = min((bar[0] for _, own in rows for bar in own), default=0.0)
    figure = Figure(figsize=(7.0, 1.2 + 0.28 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for row, ((role, _), own) in enumerate(rows):
        spans = [(since - begin, until - since) for since, until, _ in own]
        axes.broken_barh(spans, (row - 0.3, 0.6), facecolors=COLOURS.get(role, "black"), alpha=0.8)
        lost = [until - begin for _, until, was_lost in own if was_lost]
        axes.plot(lost, [row] * len(lost), linestyle="", marker="x", color=LOST, markersize=7, markeredgewidth=2)
    axes.set_yticks(range(len(rows)), [f"{role} {identity}" for (role, identity), _ in rows])
    axes.set(xlabel="seconds", title="Members (x: lost)")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
