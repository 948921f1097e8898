"""Logger that appends to the file of an earlier start of the same run."""

import csv
import io
import os
import warnings
from collections.abc import Iterable
from pathlib import Path

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch import loggers
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from typing_extensions import override

from cnnstrategies.runtime.whole_file import whole_file

KEPT = ".metrics.csv.kept"


class KeptCSVLogger(loggers.CSVLogger):
    """Lightning's CSVLogger, changed to keep the lines of an existing file. Runs with a name use this class.

    The class is not called ``CSVLogger``, because jsonargparse accepts a class name without a module only if the class
    name is unique.

    Lightning's logger would delete an existing ``metrics.csv``, so the file is renamed first. If the process is killed
    before the lines are copied back, the next start copies them from the renamed file.
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
                warnings.simplefilter("ignore")  # Hide Lightning's warning that existing log files will be deleted.
                writer = super().experiment
            if kept.exists():
                names, lines = _read(kept)
                _write(file, names, lines)
                writer.metrics_keys = names
                kept.unlink()
        existing: ExperimentWriter = super().experiment
        return existing

    def drop_lines_from(self, step: int) -> None:
        """Remove the lines of ``step`` and of later steps. A run that is resumed at this step writes them again.

        Call this on only one rank.
        """
        file = Path(self.log_dir) / "metrics.csv"
        if file.exists():
            names, lines = _read(file)
            _write(file, names, [line for line in lines if int(line["step"]) < step])


def _read(file: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return the names of a CSV file's columns, and a mapping from these names to values for each complete line."""
    with open(file, newline="", encoding="utf-8") as text:
        reader = csv.DictReader(text)
        lines = [line for line in reader if None not in line.values() and line.get("step", "").isdigit()]
        return list(reader.fieldnames or ()), lines


def _write(file: Path, names: list[str], lines: Iterable[dict[str, str]]) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    writer.writerows(lines)
    with whole_file(file, "free some space, or set another folder with --trainer.logger.init_args.save_dir") as binary:
        binary.write(text.getvalue().encode())
