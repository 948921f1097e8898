"""The curves of loss and accuracy as a picture."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

STYLES: dict[str, dict[str, Any]] = {
    "train": {"color": "#8a8f98", "linestyle": "--"},
    "val": {"color": "#1f6feb", "linestyle": "-"},
}


def draw_curves(history: Mapping[int, Mapping[str, float]], path: Path) -> None:
    """Draw training and validation loss on the left, accuracy in per cent on the right.

    Args:
        history: Metrics by epoch; ``train_loss``, ``val_loss``, ``train_acc`` and ``val_acc`` are drawn where they
            are known.
        path: The PNG file; its directory is made if need be.
    """
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    _draw(loss, history, "loss", scale=1)
    _draw(accuracy, history, "acc", scale=100)
    loss.set(title="Loss", xlabel="epoch")
    loss.set_ylim(bottom=0)
    accuracy.set(title="Accuracy", xlabel="epoch", ylabel="%")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _draw(axes: Axes, history: Mapping[int, Mapping[str, float]], metric: str, scale: float) -> None:
    for stage, style in STYLES.items():
        name = f"{stage}_{metric}"
        epochs = [epoch for epoch in sorted(history) if name in history[epoch]]
        if epochs:
            values = [scale * history[epoch][name] for epoch in epochs]
            axes.plot(epochs, values, label={"train": "training", "val": "validation"}[stage], **style)
            axes.plot(epochs[-1:], values[-1:], marker="o", markersize=4, color=style["color"])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    if axes.lines:
        axes.legend(frameon=False)
