"""``cnnstrategies compare``: several runs beside each other, from what their loggers have left.

It reads log directories alone, and needs neither torch nor Lightning.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from cnnstrategies.commands.compare_options import parser
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.metric_names import is_of_epochs, less_is_better

CONFIGURATION = "config.yaml"
NO_METRICS = ("epoch", "hp_metric")  # That the logger writes by itself.
# Of every run, or of the machine: no settings that explain a difference.
UNINTERESTING = ("trainer.logger", "ckpt_path", "checkpoint.dirpath", "predictions", "config")


@dataclass(frozen=True)
class Run:
    """A run.

    Attributes:
        folder: Its log directory.
        metrics: Values by step, by the metric's name.
        settings: Its configuration, flat.
    """

    folder: Path
    metrics: Mapping[str, Mapping[int, float]]
    settings: Mapping[str, str]


def main(args: Sequence[str]) -> None:
    """Print the runs' metrics and the settings in which they differ, and draw their curves.

    Args:
        args: The command line from ``compare`` on.

    Raises:
        ConfigurationError: A folder is not a run's, or there are no two.
    """
    options = parser().parse_args(args[1:])
    if len(options.runs) < 2:
        raise ConfigurationError("compare: give two or more log directories, such as runs/quickstart/version_*")
    runs = [read_run(folder) for folder in options.runs]
    console = Console()
    for table in (metrics_table(runs), settings_table(runs)):
        if table.row_count:
            console.print(table)
    from cnnstrategies.commands.compare_curves import draw

    if draw({name: run.metrics for name, run in zip(names(runs), runs, strict=True)}, options.output):
        print(f"Drew {options.output}")


def read_run(folder: Path) -> Run:
    """What a log directory says.

    Raises:
        ConfigurationError: There are no events of TensorBoard.
    """
    if not any(folder.glob("events.out.tfevents.*")):
        raise ConfigurationError(
            f"compare: {folder} has no events of TensorBoard: give the log directory of a run, such as "
            "runs/quickstart/version_0; other loggers compare runs themselves"
        )
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    metrics = {name: {one.step: one.value for one in events.Scalars(name)} for name in events.Tags()["scalars"]}
    beside = folder / CONFIGURATION
    written = yaml.safe_load(beside.read_text(encoding="utf-8")) if beside.is_file() else {}
    return Run(folder, metrics, dict(_flat(written or {}, "")))


def metrics_table(runs: Sequence[Run]) -> Table:
    """Each run's best and last value of what was measured; the best of all is bold."""
    table = _table("best, and at the end", runs)
    for name in dict.fromkeys(name for run in runs for name in run.metrics):
        if not is_of_epochs(name) or name in NO_METRICS:
            continue
        best = min if less_is_better(name) else max
        top = best(value for run in runs for value in run.metrics.get(name, {}).values())
        cells = []
        for values in (run.metrics.get(name, {}) for run in runs):
            own = best(values.values(), default=None)
            text = "" if own is None else f"{own:.4f}, {values[max(values)]:.4f}"
            cells.append(f"[bold]{text}[/bold]" if own == top else text)
        table.add_row(name, *cells)
    return table


def settings_table(runs: Sequence[Run]) -> Table:
    """The settings in which the runs differ."""
    table = _table("different settings", runs)
    for key in dict.fromkeys(key for run in runs for key in run.settings):
        values = [run.settings.get(key, "") for run in runs]
        if len(set(values)) > 1 and not key.startswith(UNINTERESTING):
            table.add_row(key, *(escape(value) for value in values))
    return table


def names(runs: Sequence[Run]) -> list[str]:
    """The runs' folders without what they have in common."""
    folders = [str(run.folder.absolute()) for run in runs]
    same = os.path.commonpath([os.path.dirname(folder) for folder in folders])
    return [os.path.relpath(folder, same) for folder in folders]


def _table(title: str, runs: Sequence[Run]) -> Table:
    return Table(Column(title, no_wrap=True), *(Column(name, overflow="fold") for name in names(runs)))


def _flat(value: Any, place: str) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [pair for key, one in value.items() for pair in _flat(one, f"{place}.{key}" if place else str(key))]
    return [(place, "null" if value is None else str(value))]
