"""Hand pictures and tables to loggers that can show them."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from PIL import Image


def log_pictures(loggers: Iterable[Logger], files: Sequence[Path], step: int) -> None:
    """Log pictures and tables to TensorBoard, Weights & Biases and MLflow. Other loggers cannot show them.

    Args:
        loggers: The trainer's loggers. Only rank 0 may call this.
        files: PNG and CSV files.
        step: Number of the training step.
    """
    for logger in loggers:
        for file in files:
            name = f"pictures/{file.stem}"
            if isinstance(logger, TensorBoardLogger):
                if file.suffix == ".png":
                    pixels = np.asarray(Image.open(file).convert("RGB"))
                    logger.experiment.add_image(name, pixels, step, dataformats="HWC")
                else:
                    logger.experiment.add_text(name, markdown(read_table(file)), step)
            elif isinstance(logger, WandbLogger):
                if file.suffix == ".png":
                    logger.log_image(name, [str(file)], step)
                else:
                    columns, *rows = read_table(file)
                    logger.log_table(name, columns, rows, step=step)
            elif isinstance(logger, MLFlowLogger):
                logger.experiment.log_artifact(logger.run_id, str(file), "pictures")


def read_table(file: Path) -> list[list[str]]:
    """Return the rows of a CSV file, beginning with the names of the columns."""
    with open(file, newline="", encoding="utf-8") as text:
        return list(csv.reader(text))


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    first, *others = (f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)
    return "\n".join([first, "|" + " --- |" * len(rows[0]), *others])
