"""The curves of loss and accuracy, or of what else was logged, as a picture."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from cnnstrategies.models.metric_names import is_of_epochs

History = Mapping[int, Mapping[str, float]]

STYLES: dict[str, dict[str, Any]] = {
    "train": {"color": "#8a8f98", "linestyle": "--"},
    "val": {"color": "#1f6feb", "linestyle": "-"},
}
LABELS = {"train": "training", "val": "validation"}
PANELS = {"loss": "Loss", "acc": "Accuracy"}  # A word in a metric's name, and the title.


def draw_curves(history: History, path: Path) -> None:
    """Draw losses on the left, accuracies in per cent on the right; where there are neither, whatever there is.

    Args:
        history: Metrics by epoch, of which there are some. ``train_loss``, ``val_loss``, ``train_acc`` and ``val_acc``
            are drawn where they are known, or else losses and accuracies with other names.
        path: The PNG file; its directory is made if need be.
    """
    panels = choose_panels(history)
    figure = Figure(figsize=(4.5 * len(panels), 3.6), layout="constrained")
    for axes, (title, names) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        _draw(axes, history, names, percent=title == PANELS["acc"])
        axes.set(title=title, xlabel="epoch")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def choose_panels(history: History) -> dict[str, list[str]]:
    """The titles of the panels, and the metrics that each shows; none where nothing was logged."""
    logged = list(dict.fromkeys(name for metrics in history.values() for name in metrics if is_of_epochs(name)))
    panels = {}
    for word, title in PANELS.items():
        usual = [f"{stage}_{word}" for stage in STYLES]
        names = [name for name in usual if name in logged] or [name for name in logged if word in name.lower()]
        if names:
            panels[title] = names
    return panels or ({"Metrics": logged} if logged else {})


def _draw(axes: Axes, history: History, names: list[str], percent: bool) -> None:
    # Some modules log per cent.
    shares = percent and all(metrics.get(name, 0) <= 1 for metrics in history.values() for name in names)
    for name in names:
        epochs = [epoch for epoch in sorted(history) if name in history[epoch]]
        values = [history[epoch][name] * (100 if shares else 1) for epoch in epochs]
        stage = name.split("_")[0]
        usual = name in (f"{stage}_loss", f"{stage}_acc") and stage in STYLES
        label, style = (LABELS[stage], STYLES[stage]) if usual else (name, {})
        (line,) = axes.plot(epochs, values, label=label, **style)
        axes.plot(epochs[-1:], values[-1:], marker="o", markersize=4, color=line.get_color())
    if percent:
        axes.set(ylabel="%")
    elif all(values >= 0 for metrics in history.values() for name, values in metrics.items() if name in names):
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
