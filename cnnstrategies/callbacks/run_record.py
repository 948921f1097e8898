"""A run that is started again goes on in its loggers' runs, and in the lines of its metrics.csv."""

import csv
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from typing_extensions import override

from cnnstrategies.cluster.run_folder import IDS, read_record, write_record

KEPT = ".metrics.csv.kept"


class RunRecord(Callback):
    """Says in ``run.json``, beside the checkpoints, whose they are and which runs of its loggers are this one's.

    What is logged is on the disk when a checkpoint is: after a restart nothing is missing from before it, and lines of
    metrics.csv from after it, which will be written again, are removed.

    Args:
        name: The run's.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.is_global_zero:
            for logger in _csv_loggers(trainer):
                keep_lines(logger)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folders = [
            Path(callback.dirpath)
            for callback in trainer.checkpoint_callbacks
            if isinstance(callback, ModelCheckpoint) and callback.dirpath and "://" not in str(callback.dirpath)
        ]
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]  # set outside the class
            return
        ids = {}
        for number, logger in enumerate(trainer.loggers):
            if type(logger).__name__ in IDS:
                _ = logger.experiment  # Begins the run, which has an id from then on.
                ids[str(number)] = str(logger.version)
        for folder in dict.fromkeys(folders):
            write_record(folder, {**read_record(folder), "run": self.name, "loggers": ids})

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            for logger in _csv_loggers(trainer):
                drop_lines_from(logger, trainer.global_step)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _flush(trainer)  # Lightning logs an epoch's means after its checkpoint.

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        _flush(trainer)


def keep_lines(logger: CSVLogger) -> None:
    """Have a logger append to its metrics.csv, which it would remove; before it has logged anything.

    Whenever the process is killed, the lines are in one of two files.

    Args:
        logger: On the rank that writes.
    """
    file = Path(logger.log_dir) / "metrics.csv"
    kept = file.with_name(KEPT)
    if file.exists():
        os.replace(file, kept)
    elif not kept.exists():
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It says that it removes what is there.
        experiment = logger.experiment
    names, lines = _read(kept)
    _write(file, names, lines)
    experiment.metrics_keys = names
    kept.unlink()


def drop_lines_from(logger: CSVLogger, step: int) -> None:
    """Remove the lines of a step and later ones, which a run that goes on there writes again.

    Args:
        logger: On the rank that writes.
        step: The first that is to be made.
    """
    file = Path(logger.log_dir) / "metrics.csv"
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


def _csv_loggers(trainer: Trainer) -> list[CSVLogger]:
    return [one for one in trainer.loggers if isinstance(one, CSVLogger) and "://" not in str(one.log_dir)]


def _flush(trainer: Trainer) -> None:
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger | TensorBoardLogger):
            logger.save()
