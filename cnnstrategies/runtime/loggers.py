"""Loggers that go on where an earlier start of the run was."""

import csv
import os
import warnings
from collections.abc import Iterable
from pathlib import Path

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch import loggers
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from typing_extensions import override

KEPT = ".metrics.csv.kept"


class KeptCSVLogger(loggers.CSVLogger):
    """Lightning's, which keeps the lines that are there; a run with a name has it in the place of Lightning's.

    Its name is another one: jsonargparse takes no short name that two classes have.

    Whenever the process is killed, the lines are in ``metrics.csv`` or in a file beside it.
    """

    @property
    @override
    @rank_zero_experiment
    def experiment(self) -> ExperimentWriter:
        if self._experiment is None and "://" not in self.log_dir:
            file = Path(self.log_dir) / "metrics.csv"
            kept = file.with_name(KEPT)
            if file.exists():
                os.replace(file, kept)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # It says that it removes what is there.
                writer = super().experiment
            if kept.exists():
                names, lines = _read(kept)
                _write(file, names, lines)
                writer.metrics_keys = names
                kept.unlink()
        found: ExperimentWriter = super().experiment
        return found

    def drop_lines_from(self, step: int) -> None:
        """Remove the lines of a step and later ones, which a run that goes on there writes again; on one rank."""
        file = Path(self.log_dir) / "metrics.csv"
        if file.exists():
            names, lines = _read(file)
            _write(file, names, [line for line in lines if int(line["step"]) < step])


def _read(file: Path) -> tuple[list[str], list[dict[str, str]]]:
    """The columns and the whole lines; the last one may be cut short."""
    with open(file, newline="", encoding="utf-8") as text:
        reader = csv.DictReader(text)
        lines = [line for line in reader if None not in line.values() and line.get("step", "").isdigit()]
        return list(reader.fieldnames or ()), lines


def _write(file: Path, names: list[str], lines: Iterable[dict[str, str]]) -> None:
    partial = file.with_name(f".{file.name}.partial")
    with open(partial, "w", newline="", encoding="utf-8") as text:
        writer = csv.DictWriter(text, names)
        writer.writeheader()
        writer.writerows(lines)
    os.replace(partial, file)
