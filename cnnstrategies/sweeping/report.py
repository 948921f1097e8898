"""What a sweep has found, as a table and as a picture."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from optuna.trial import FrozenTrial, TrialState
from rich import box
from rich.table import Table

from cnnstrategies.sweeping.plan import Plan, Range

COLUMNS = 3
COLORS = {TrialState.COMPLETE: "tab:blue", TrialState.PRUNED: "tab:gray"}


def value_of(trial: FrozenTrial, plan: Plan) -> float | None:
    """The best that a trial has reported; None if it has reported no number."""
    reported = filter(math.isfinite, trial.intermediate_values.values())
    return (max if plan.most else min)(reported, default=None)


def table(trials: Sequence[FrozenTrial], plan: Plan) -> Table:
    """The trials, the best first; those that were pruned, have failed or are not through come after them."""
    shown = Table(box=box.SIMPLE_HEAD)
    for name in ("trial", plan.metric, "validations", "", *map(short, plan.parameters)):
        shown.add_column(name, justify="left" if name == "" else "right", overflow="fold")
    for trial in sorted(trials, key=lambda one: _order(one, plan)):
        value = value_of(trial, plan)
        shown.add_row(
            str(trial.number),
            "" if value is None else f"{value:.6g}",
            str(len(trial.intermediate_values)),
            _state(trial),
            *(_in_digits(trial.params.get(name)) for name in plan.parameters),
        )
    return shown


def in_words(params: Mapping[str, Any]) -> str:
    """A trial's values in one line."""
    return ", ".join(f"{short(key)} {_in_digits(value)}" for key, value in params.items())


def short(key: str) -> str:
    """The end of a key of the configuration, which says enough: ``optimizer.lr``."""
    return ".".join([part for part in key.split(".") if part != "init_args"][-2:])


def draw(trials: Sequence[FrozenTrial], plan: Plan, path: Path) -> None:
    """Draw the metric by trial, with the best so far, and by each parameter, into a PNG file."""
    seen = [one for one in trials if one.state in COLORS and value_of(one, plan) is not None]
    rows = -(-(1 + len(plan.parameters)) // COLUMNS)
    figure = Figure(figsize=(4 * COLUMNS, 3.2 * rows), layout="constrained")
    panels = figure.subplots(rows, COLUMNS, squeeze=False).flatten()
    for axes in panels[1 + len(plan.parameters) :]:
        axes.set_visible(False)
    for axes, name in zip(panels, ["trial", *plan.parameters], strict=False):
        for state, color in COLORS.items():
            of_state = [one for one in seen if one.state == state]
            places = [one.number if name == "trial" else _place(one.params[name], plan, name) for one in of_state]
            label = "whole" if state == TrialState.COMPLETE else "pruned"
            axes.plot(places, [value_of(one, plan) for one in of_state], "o", color=color, markersize=4, label=label)
        space = plan.parameters.get(name)
        if isinstance(space, Range) and space.log:
            axes.set_xscale("log")
            axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set(xlabel=short(name), ylabel=plan.metric)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    _draw_best(panels[0], seen, plan)
    panels[0].legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=120)


def _draw_best(axes: Any, seen: Sequence[FrozenTrial], plan: Plan) -> None:
    numbers: list[int] = []
    best: list[float] = []
    for one in seen:
        value = value_of(one, plan)
        if one.state == TrialState.COMPLETE and value is not None:
            numbers.append(one.number)
            best.append((max if plan.most else min)(value, *best[-1:]) if best else value)
    axes.step(numbers, best, where="post", color="tab:blue", linewidth=1, label="best so far")


def _place(value: Any, plan: Plan, name: str) -> Any:
    return value if isinstance(plan.parameters[name], Range) else str(value)


def _order(trial: FrozenTrial, plan: Plan) -> tuple[bool, float]:
    value = value_of(trial, plan)
    worth = math.inf if value is None else (-value if plan.most else value)
    return trial.state != TrialState.COMPLETE, worth


def _state(trial: FrozenTrial) -> str:
    if trial.state == TrialState.FAIL:
        return f"failed: {trial.user_attrs.get('cause', '')}"
    return {TrialState.COMPLETE: "", TrialState.PRUNED: "pruned"}.get(trial.state, "not through")


def _in_digits(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
