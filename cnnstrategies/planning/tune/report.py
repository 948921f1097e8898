"""What ``tune`` has found, as a table and as a picture."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from cnnstrategies.planning.candidates import Effect
from cnnstrategies.planning.tune.contest import DEFAULT, Row

EFFECTS = {Effect.NONE: "", Effect.ROUNDING: "", Effect.LEARNING: "changes learning"}


def table(rows: Sequence[Row], rate: float, title: str = "") -> Table:
    """The candidates, fastest first.

    Args:
        rows: What became of them.
        rate: Steps per second of the default.
        title: What was tried, where that is not all.
    """
    shown = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left")
    for name in ("settings", "steps/s", "speed [interval]", "", ""):
        shown.add_column(name, justify="left" if name in ("settings", "") else "right")
    shown.add_row(DEFAULT, f"{rate:.3g}", "1", "", "")
    for row in ordered(rows):
        if row.verdict is None:
            shown.add_row(row.setting.name, "", "", row.trouble or "not tried: no time left", "")
            continue
        one = row.verdict
        speed = f"{one.speed:.2f} [{one.low:.2f}, {one.high:.2f}]"
        shown.add_row(row.setting.name, f"{rate * one.speed:.3g}", speed, one.outcome, EFFECTS[row.setting.effect])
    return shown


def ordered(rows: Sequence[Row]) -> list[Row]:
    """Fastest first, and what did not run at the end."""
    return sorted(rows, key=lambda row: -row.verdict.speed if row.verdict is not None else 0.0)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the speeds with their intervals into a PNG file."""
    measured = [row for row in ordered(rows) if row.verdict is not None][::-1]
    figure = Figure((7, 1 + 0.4 * max(1, len(measured))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for place, row in enumerate(measured):
        one = row.verdict
        assert one is not None
        color = "tab:green" if one.outcome == "faster" else "tab:gray"
        axes.plot([one.low, one.high], [place, place], color=color, linewidth=2)
        axes.plot([one.speed], [place], "o", color=color)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(measured)), [row.setting.name for row in measured])
    axes.set_xlabel("speed over the default's")
    figure.savefig(path, dpi=150)
