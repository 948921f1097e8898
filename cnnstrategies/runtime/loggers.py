"""Loggers that continue the files of an earlier start of the run."""

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
    """Lightning's CSVLogger, except that existing lines are kept. Runs with a name use it in place of Lightning's.

    Its name differs from Lightning's because jsonargparse accepts only short names that belong to one class.

    At every moment the lines are in ``metrics.csv`` or in a file beside it, also when the process is killed.
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
                warnings.simplefilter("ignore")  # Lightning warns that it removes existing files.
                writer = super().experiment
            if kept.exists():
                names, lines = _read(kept)
                _write(file, names, lines)
                writer.metrics_keys = names
                kept.unlink()
        existing: ExperimentWriter = super().experiment
        return existing

    def drop_lines_from(self, step: int) -> None:
        """Remove the lines of `step` and later steps, which a run that resumes there writes again.

        Call this method on one rank.
        """
        file = Path(self.log_dir) / "metrics.csv"
        if file.exists():
            names, lines = _read(file)
            _write(file, names, [line for line in lines if int(line["step"]) < step])


def _read(file: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return the names of the columns and the complete lines; the last line of the file may be cut short."""
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
