"""Draws the front page's pictures: `python docs/images/front.py`, in the root.

``strategies.svg``: the same configuration under four strategies, on paper. ``results.svg``: what the
benchmarks measured, read from their pages. ``choose.svg``: which strategy for whom. Each is drawn a second time for
phones, ``*_narrow.svg``.
"""

import re
from collections.abc import Iterator, Sequence
from io import StringIO
from pathlib import Path

from matplotlib import rcParams
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cnnstrategies.pipeline.timetable import timetable
from cnnstrategies.planning.costs import Link
from cnnstrategies.planning.simulate import simulate
from cnnstrategies.planning.stage_costs import StageCost, StageMessage

ROOT = Path(__file__).parents[2]
TEXT = "#808a96"  # Taken by `THEMES`, where they are understood.
# Of the page that shows the picture, not of the system alone: browsers hand its `color-scheme` on.
THEMES = """<style>
:root {--ink: #3f4a57}
@media (prefers-color-scheme: dark) {:root {--ink: #c3ccd6}}
</style>"""
SENT, BETWEEN = "gradients sent", "sent between stages"
COLOURS = {"forward": "#4C8BF5", "backward": "#F2994A", SENT: "#27AE60", BETWEEN: "#8E6CC9"}

# On paper, like AlexNet: nearly all of the time is the convolutions', nearly all of the parameters are the
# classifier's. In ms; forward is that of the whole batch on one quick device, and backward takes twice as long.
DEVICES, MICROBATCHES, UNTIL, UNTIL_NARROW = 4, 12, 460.0, 320.0
SPEEDS = (1.0, 1.0, 1.0, 0.5)  # The last device is half as quick.
CONVOLUTIONS, CLASSIFIER = 92.0, 8.0
# An all-reduce, or push and pull, of all devices, whatever else their links carry.
SEND_CONVOLUTIONS, SEND_CLASSIFIER = 4.0, 76.0

WIDE, NARROW = 9.0, 4.2  # inches; the narrow one fills a phone, its letters as large as the page's small ones

Bar = tuple[int, str, float, float]  # row, kind, start, end
# Steps that are made again and again, each with the share of a batch that it does.
Steps = list[tuple[float, list[Bar]]]


def one_device() -> Steps:
    """Forward and backward, one after the other, on a quick device."""
    forward = CONVOLUTIONS + CLASSIFIER
    return [(1.0, [(0, "forward", 0.0, forward), (0, "backward", forward, 3 * forward)])]


def data_parallel(rows: Sequence[int]) -> list[Bar]:
    """A step of devices that wait for each other; a layer's gradients are sent while backward goes on."""
    whole = (CONVOLUTIONS + CLASSIFIER) / DEVICES
    times = {row: whole / SPEEDS[row] for row in rows}
    sent = max(times.values()) * (1 + 2 * CLASSIFIER / (CONVOLUTIONS + CLASSIFIER))
    end = max(sent + SEND_CLASSIFIER, 3 * max(times.values())) + SEND_CONVOLUTIONS
    bars: list[Bar] = []
    for row, forward in times.items():
        bars += [(row, "forward", 0.0, forward), (row, "backward", forward, 3 * forward), (row, SENT, sent, end)]
    return bars


def ddp() -> Steps:
    """All wait for the slowest and for the classifier's gradients."""
    return [(1.0, data_parallel(range(DEVICES)))]


def parameter_server() -> Steps:
    """Each worker sends its gradients and gets parameters, and waits for nobody else."""
    return [(1 / DEVICES, data_parallel([row])) for row in range(DEVICES)]


def hybrid_pipeline() -> Steps:
    """Three replicas of the convolutions, the classifier on the slow device: by the package's simulator."""
    link = Link(bandwidth=1e9, latency=0.0)
    replicas = (DEVICES - 1, 1)
    gradients = int(SEND_CONVOLUTIONS * 1e-3 * link.bandwidth * 3 / 4)  # Three devices send 4/3 of them in a ring.
    stages = [
        StageCost(1, time, 2 * time, parameters, 0, 0, ((2 * time, parameters),))
        for time, parameters in (
            (CONVOLUTIONS * 1e-3 / MICROBATCHES, gradients),
            (CLASSIFIER / SPEEDS[-1] * 1e-3 / MICROBATCHES, 0),
        )
    ]
    activations = int(0.3e-3 * link.bandwidth)
    step = simulate(
        timetable(replicas, MICROBATCHES, "1f1b"), stages, {(0, 1): StageMessage(activations, activations)}, link
    )
    kinds = {"reduce": SENT, "send": BETWEEN}
    bars = []
    for span in step.spans:
        # A message is on the row of the first stage's device, whichever way it goes.
        row = (span.microbatch or 0) % replicas[0] if span.kind == "send" else span.rank
        bars.append((row, kinds.get(span.kind, span.kind), 1e3 * span.start, 1e3 * span.end))
    return [(1.0, bars)]


PANELS = {
    "auto": (one_device, "one device"),
    "ddp": (ddp, "all wait for the slow device and the classifier's gradients"),
    "hybrid_pipeline": (hybrid_pipeline, "the slow device has the classifier; its gradients are not sent"),
    "parameter_server_async": (parameter_server, "no device waits"),
}


def speed(steps: Steps) -> float:
    """Batches per ms."""
    return sum(share / max(end for *_, end in bars) for share, bars in steps)


def strategies(narrow: bool) -> Figure:
    """Four timelines, each with how often one device's speed it is."""
    until = UNTIL_NARROW if narrow else UNTIL
    figure = Figure(figsize=(NARROW if narrow else WIDE, 5.6), facecolor="none", layout="constrained")
    heights = [1.0, 3.0, 3.0, 3.0]
    axes = figure.subplots(len(PANELS), 1, sharex=True, gridspec_kw={"height_ratios": heights})
    for axis, (name, (steps, message)) in zip(axes, PANELS.items(), strict=True):
        spans: dict[tuple[int, str], list[tuple[float, float]]] = {}
        for _, bars in steps():
            period = max(end for *_, end in bars)
            for row, kind, start, end in bars:
                starts = (start + number * period for number in range(1 + int(until / period)))
                spans.setdefault((row, kind), []).extend((at, end - start) for at in starts if at < until)
        rows = 1 + max(row for row, _ in spans)
        for (row, kind), lengths in spans.items():
            if kind == BETWEEN:  # From device to device, behind those that it passes.
                axis.vlines([at for at, _ in lengths], row + 0.58, rows - 0.92, colors=COLOURS[kind], lw=0.8, zorder=0)
                continue
            place, edge = ((row + 0.64, 0.26), "none") if kind == SENT else ((row + 0.08, 0.5), TEXT)
            axis.broken_barh(lengths, place, facecolors=COLOURS[kind], edgecolor=edge, linewidth=0.4)
        axis.set(ylim=(rows, 0), xlim=(0, until), yticks=[row + 0.45 for row in range(rows)])
        names = [f"device {row}" + ("" if SPEEDS[row] == 1 else ", slow") for row in range(rows)]
        axis.set_yticklabels(names, fontsize=9)
        axis.set_title(name if narrow else f"strategy: {name}", loc="left", fontsize=11, family="monospace", color=TEXT)
        times = f"speed {speed(steps()) / speed(one_device()):.1f} x"
        axis.set_title(times if narrow else f"{message}:  {times}", loc="right", fontsize=10, color=TEXT)
        _style(axis)
        if axis is not axes[-1]:
            axis.tick_params(bottom=False)
    axes[-1].set_xlabel("ms, simulated", color=TEXT, fontsize=9)
    figure.legend(
        [Patch(color=colour) for colour in COLOURS.values()], list(COLOURS), loc="outside lower center",
        ncols=2 if narrow else 4, frameon=False, labelcolor=TEXT, fontsize=9,
    )  # fmt: skip
    return figure


def cell(page: str, column: str, *row: str) -> float:
    """A number from a page's table: in a column, and the row whose first cells are these."""
    lines = (ROOT / "benchmarks" / page).read_text().splitlines()
    table = [[part.strip() for part in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    header = next(cells for cells in table if column in cells)
    row_cells = next(cells for cells in table if cells[: len(row)] == list(row))
    return float(row_cells[header.index(column)])


def measured() -> Iterator[tuple[str, float]]:
    """Yield descriptions of measurements with their speed as a multiple of DDP's speed."""
    for network, mbits, link in (("AlexNet", "100", "100 Mbit/s"), ("VGG-16", "100", "100 Mbit/s"),
                                 ("AlexNet", "1000", "1 Gbit/s"), ("VGG-16", "1000", "1 Gbit/s")):  # fmt: skip
        page = "pipeline/slow_link.md"
        yield f"hybrid_pipeline [2, 1], {network}, {link}", cell(page, "DDP / hybrid", network, mbits)
    page, column = "parameter_server/slow_link.md", "times DDP's"
    yield "parameter_server local, every 8 steps, 100 Mbit/s", cell(page, column, "local, every 8 steps")
    both = [
        cell("parameter_server/both_ways.md", "samples/s", strategy) for strategy in ("sync, onebit both ways", "ddp")
    ]
    yield "parameter_server sync, onebit both ways, 100 Mbit/s", both[0] / both[1]
    slow = cell("parameter_server/straggler.md", column, "parameter_server, async, dynamic")
    yield "parameter_server async, one of 2 workers slowed to a quarter", slow
    for name in ("VGG-11, 9.5 million parameters", "ResNet-20, 0.27 million parameters"):
        ratio = cell("parameter_server/step_time.md", "ratio of medians", name)
        yield f"parameter_server sync, {name.partition(',')[0]}, one machine", 1 / ratio


def results(narrow: bool) -> Figure:
    """A bar for each measurement, its name beside it, or above it."""
    rows = sorted(measured(), key=lambda row: row[1])
    figure = Figure(figsize=(NARROW, 5.4) if narrow else (WIDE, 3.6), facecolor="none", layout="constrained")
    axis = figure.subplots()
    names, values = zip(*rows, strict=True)
    colours = ["#27AE60" if value >= 1 else "#F2994A" for value in values]
    axis.barh(range(len(rows)), values, color=colours, height=0.4 if narrow else 0.6)
    axis.set_yticks([] if narrow else range(len(rows)), [] if narrow else names, fontsize=8)
    for place, (name, value) in enumerate(rows):
        axis.text(max(value, 1.0) + 0.08, place, f"{value:.3g}", va="center", fontsize=8, color=TEXT)
        if narrow:
            axis.text(0.08, place + 0.26, name, va="bottom", fontsize=8, color=TEXT)
    # Not through the names.
    half = 0.22 if narrow else 0.5
    for row in range(len(rows)):
        axis.plot((1.0, 1.0), (row - half, row + half), color=TEXT, linewidth=1, linestyle="--")
    axis.set_xlabel("times the speed of DDP, measured in the same run", color=TEXT, fontsize=9)
    axis.set_xlim(0, max(values) * (1.15 if narrow else 1.08))
    _style(axis)
    return figure


QUESTIONS = (
    ("Do the activations of one image fit on one device?", "no", "spatial"),
    ("Does the network fit on one device?", "no", "hybrid_pipeline, or fsdp on GPUs"),
    ("Do all workers stay until the end?", "no", "parameter_server_async"),
    ("Are they equally fast?", "no", "ddp_balanced"),
    ("Is “communication” small in a StepProfile?", "yes", "ddp"),
    ("Are most parameters in the last layers (AlexNet, VGG)?", "yes", "hybrid_pipeline, replicas: [N - 1, 1]"),
)
OTHERWISE = "ddp_bf16, ddp_powersgd,\nparameter_server with compression"


def choose(narrow: bool) -> Figure:
    """Questions from top to bottom, answers to the right, or below."""
    rows = len(QUESTIONS)
    step, gap = (2.0, 0.95) if narrow else (1.0, 0.0)  # from question to question, and from one to its answer
    middle, right = (4.6, 3.0) if narrow else (2.4, 6.5)
    figure = Figure(figsize=(NARROW, 7.9) if narrow else (WIDE, 5.0), facecolor="none", layout="constrained")
    axis = figure.subplots()
    end = rows * step + (0.1 if narrow else 0.2)
    axis.set(xlim=(0, 10), ylim=(end + 0.55, -0.5))
    axis.axis("off")
    box = {"boxstyle": "round,pad=0.45", "facecolor": "none", "edgecolor": TEXT}
    answer = {**box, "edgecolor": COLOURS[SENT]}
    arrow = {"arrowstyle": "->", "color": TEXT}
    for row, (question, leaves, strategy) in enumerate(QUESTIONS):
        top, stays = row * step, {"no": "yes", "yes": "no"}[leaves]
        down = 0.6 if narrow else middle
        axis.annotate("", (down, top + step - 0.28), (down, top + 0.28), arrowprops=arrow)
        axis.text(down + 0.1, top + step / 2, stays, va="center", fontsize=9, color=TEXT)
        if narrow:
            axis.annotate("", (right + 0.9, top + gap - 0.28), (right + 0.9, top + 0.28), arrowprops=arrow)
            axis.text(right + 1.0, top + gap / 2, leaves, va="center", fontsize=9, color=TEXT)
        else:
            axis.annotate("", (6.35, top), (4.85, top), arrowprops=arrow)
            axis.text(5.6, top - 0.12, leaves, ha="center", va="bottom", fontsize=9, color=TEXT)
        place = (0.25, "left") if narrow else (middle, "center")
        axis.text(place[0], top, question, ha=place[1], va="center", fontsize=9, color=TEXT, bbox=box)
        style = {"fontsize": 9, "family": "monospace", "color": TEXT, "bbox": answer}
        axis.text(right, top + gap, strategy, va="center", **style)
    place = (0.25, "left") if narrow else (middle, "center")
    axis.text(place[0], end, OTHERWISE, ha=place[1], va="center", **style)
    return figure


def _style(axis: object) -> None:
    axis.set_facecolor("none")  # type: ignore[attr-defined]
    axis.tick_params(colors=TEXT, labelsize=8)  # type: ignore[attr-defined]
    for side, spine in axis.spines.items():  # type: ignore[attr-defined]
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(TEXT)


def write(figure: Figure, name: str) -> None:
    """Write a figure as an SVG file beside this file, with text in the colour of the page's theme."""
    FigureCanvasSVG(figure)
    drawn = StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None}, transparent=True)
    text = re.sub(f"(?<=[: ]){TEXT}", f"var(--ink, {TEXT})", drawn.getvalue())
    Path(__file__).with_name(f"{name}.svg").write_text(text.replace("<defs>", f"{THEMES}\n <defs>", 1))


def main() -> None:
    """Write the pictures beside this file; the same bytes each time."""
    rcParams.update({"svg.hashsalt": "cnnstrategies", "svg.fonttype": "none", "font.family": "sans-serif"})
    for draw in (strategies, results, choose):
        for narrow in (False, True):
            write(draw(narrow), f"{draw.__name__}{'_narrow' if narrow else ''}")


if __name__ == "__main__":
    main()
