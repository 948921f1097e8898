"""Draws the picture of docs/spatial.md: python docs/images/parts.py, in the root. Rows of an image on two devices."""

import sys
from pathlib import Path

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

sys.path.insert(0, str(Path(__file__).parent))

from front import TEXT, write

COLOURS = ("#4C8BF5", "#F2994A")  # Of the devices.
ROWS, COLUMNS, GAP = 4, 6, 1.6  # Rows of each device, and the space between the devices.


def row(axis: Axes, top: float, owner: int, is_halo: bool = False) -> None:
    """Draw a row of pixels in the colour of the device that owns it; a halo as an outline with hatching."""
    for column in range(COLUMNS):
        face, edge = ("none", COLOURS[owner]) if is_halo else (COLOURS[owner], "none")
        hatch = "////" if is_halo else None
        axis.add_patch(Rectangle((column, top), 0.94, 0.94, facecolor=face, edgecolor=edge, linewidth=0.8, hatch=hatch))


def label(axis: Axes, place: tuple[float, float], text: str, **options: object) -> None:
    axis.text(*place, text, color=TEXT, fontsize=9, **{"va": "center", **options})


def parts() -> Figure:
    """Two parts of an image, the rows that a convolution fetches, and the two parts of its result."""
    figure = Figure(figsize=(9.0, 3.6), facecolor="none", layout="constrained")
    axes = figure.subplots(1, 3, gridspec_kw={"width_ratios": [1, 1.25, 1]})
    titles = (
        "each device has its rows",
        "a 3 x 3 convolution fetches halos",
        "each device computes its rows of the result",
    )
    for axis, title in zip(axes, titles, strict=True):
        axis.set(xlim=(-2.6, COLUMNS + 0.4), ylim=(2 * ROWS + 2 + GAP, -0.4), aspect="equal")
        axis.axis("off")
        axis.set_title(title, fontsize=10, color=TEXT)
    for axis in (axes[0], axes[2]):
        for device in range(2):
            first = 1 + device * (ROWS + GAP)
            for number in range(ROWS):
                row(axis, first + number, device)
            label(axis, (-0.3, first + ROWS / 2), f"device {device}", ha="right")
    middle = axes[1]
    middle.set_xlim(-2.6, COLUMNS + 2.6)
    for number in range(ROWS):
        row(middle, number, 0)
        row(middle, ROWS + 2 + GAP + number, 1)
    row(middle, ROWS, 1, is_halo=True)
    row(middle, ROWS + 1 + GAP, 0, is_halo=True)
    for device, (source, target) in enumerate(((ROWS - 0.5, ROWS + 1.5 + GAP), (ROWS + 2.5 + GAP, ROWS + 0.5))):
        side, bend = ((COLUMNS + 0.1, -0.5), (-0.1, -0.5))[device]
        middle.annotate(
            "", (side, target), (side, source),
            arrowprops={"arrowstyle": "->", "color": COLOURS[device], "lw": 1.6, "connectionstyle": f"arc3,rad={bend}"},
        )  # fmt: skip
    label(middle, (COLUMNS + 1.2, ROWS + 1 + GAP / 2), "halos", ha="left")
    return figure


def main() -> None:
    """Write the picture beside this file; the same bytes each time."""
    rcParams.update({"svg.hashsalt": "cnnstrategies", "svg.fonttype": "none", "font.family": "sans-serif"})
    write(parts(), "parts")


if __name__ == "__main__":
    main()
