"""The curves of several runs in one picture."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from cnnstrategies.metric_names import worth_showing

COLUMNS = 2


def draw(runs: Mapping[str, Mapping[str, Mapping[int, float]]], path: Path) -> bool:
    """Draw a panel for each metric that a summary would show; whether there is any.

    Args:
        runs: Values by step, by metric, by run.
        path: The PNG file; its directory is made if need be.
    """
    names = worth_showing(dict.fromkeys(name for metrics in runs.values() for name in metrics if name != "epoch"))
    if not names:
        return False
    rows = -(-len(names) // COLUMNS)
    figure = Figure(figsize=(4.5 * min(COLUMNS, len(names)), 3.6 * rows), layout="constrained")
    panels = figure.subplots(rows, min(COLUMNS, len(names)), squeeze=False).flatten()
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    for axes, name in zip(panels, names, strict=False):
        for run, metrics in runs.items():
            values = metrics.get(name, {})
            axes.plot(list(values), list(values.values()), label=run)
        axes.set(title=name, xlabel="step")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    panels[0].legend(frameon=False, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return True
