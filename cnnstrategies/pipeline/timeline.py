"""Draw a predicted or measured pipeline step as a picture that shows what each rank does at each time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

COLOURS = {
    "forward": "#4C8BF5",
    "backward": "#F2994A",
    "update": "#8D6E63",
    "reduce": "#27AE60",
    "send": "#8E6CC9",
    "receive": "#3AA6A6",
}
IDLE = "#F1F1F1"
# Kinds of spans that overlap with computations. These spans are drawn as narrow bars below the computations.
TRANSFERS = ("send", "receive", "reduce")


@dataclass(frozen=True)
class Span:
    """A period of time in which a rank performs one action.

    Attributes:
        rank: The rank.
        kind: The action: forward, backward, reduce, send, receive or update.
        stage: Stage of the rank.
        microbatch: The microbatch; None if the action belongs to the whole step.
        start: Start of the period in seconds, on a clock that all ranks share.
        end: End of the period in seconds, on the same clock.
    """

    rank: int
    kind: str
    stage: int
    microbatch: int | None
    start: float
    end: float


class Clock(Protocol):
    """A stopwatch that measures the total time of all spans of one kind, without waiting for a device."""

    def begin(self) -> None:
        """Start the stopwatch. The pipeline calls this when a span begins."""

    def end(self) -> None:
        """Stop the stopwatch. The pipeline calls this when the span ends."""


def draw_timeline(
    spans: Sequence[Span], path: str | Path, title: str, rank_names: Mapping[int, str] | None = None
) -> None:
    """Draw spans as one row per rank, with the time in milliseconds, and write the picture as a PNG file.

    Args:
        spans: Spans of all ranks. The time axis begins with the earliest span.
        path: Path of the file.
        title: Heading of the picture.
        rank_names: Labels of the rows by rank, for example ``{0: "stage 0.0"}``; by default "rank 0" and so on.
    """
    # The import is here because it takes long, and programs that only record spans do not need it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = sorted({span.rank for span in spans})
    origin = min(span.start for span in spans)
    length = max(span.end for span in spans) - origin
    figure = Figure(figsize=(12, 1.6 + 0.55 * len(ranks)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for row in range(len(ranks)):
        axes.broken_barh([(0, length * 1e3)], (row - 0.4, 0.8), facecolor=IDLE)
    for span in spans:
        row = ranks.index(span.rank)
        thin = span.kind in TRANSFERS
        height = 0.22 if thin else 0.8
        bottom = row + 0.3 if thin else row - 0.4
        left, width = (span.start - origin) * 1e3, (span.end - span.start) * 1e3
        colour = COLOURS[span.kind]
        axes.broken_barh([(left, width)], (bottom, height), facecolor=colour, edgecolor="white", linewidth=0.6)
        # The microbatch is only written if the span is wide enough: a digit needs about 1 % of the picture's width.
        if not thin and span.microbatch is not None and width > 0.01e3 * length * len(str(span.microbatch)):
            axes.text(
                left + width / 2,
                row,
                str(span.microbatch),
                ha="center",
                va="center",
                color="white",
                fontsize=8,
            )
    names = rank_names or {}
    axes.set_yticks(range(len(ranks)), [names.get(rank, f"rank {rank}") for rank in ranks])
    axes.set_ylim(len(ranks) - 0.4, -0.6)
    axes.set_xlim(0, length * 1e3)
    axes.set_xlabel("time in ms (numbers: microbatches)")
    axes.set_title(title, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    kinds = [kind for kind in COLOURS if any(span.kind == kind for span in spans)]
    handles = [Patch(color=COLOURS[kind], label=kind) for kind in kinds] + [Patch(color=IDLE, label="idle")]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(str(path))
