"""Files of an evaluation's pictures: which are written, and the tables among them."""

import codecs
import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cnnstrategies.callbacks import picture_drawing as drawing
from cnnstrategies.runtime.whole_file import whole_file

Table = list[list[str]]
MOST_LABELS = 25  # Largest number of labels whose confusion matrices are drawn.
MOST_OUTPUTS = 9  # Largest number of outputs of a regression that are drawn.


@dataclass
class Evaluated:
    """Counts of an evaluation, and the source of its samples.

    Attributes:
        split: ``val`` or ``test``, with which the names of the files begin.
        epoch: Epoch of the training, or None for an evaluation outside of ``fit``.
        states: The counts by name; see :class:`.PictureCounts`.
        datamodule: The data module, or None.
        ignore_index: Value of the pixels of a mask that do not count; None if all pixels count.
    """

    split: str
    epoch: int | None
    states: dict[str, Tensor]
    datamodule: Any
    ignore_index: int | None

    @property
    def source(self) -> Any:
        """The samples of the split, or None if the data module does not have them as ``ImageDataModule`` does."""
        source = getattr(self.datamodule, f"{self.split}_source", None)
        return source if hasattr(source, "fetch") else None

    @property
    def title(self) -> str:
        """Name of the split, with the epoch if there is one."""
        name = "test" if self.split == "test" else "validation"
        return name if self.epoch is None else f"{name}, epoch {self.epoch}"

    def names(self, count: int) -> list[str]:
        """Return the names of classes or outputs: those of the data module, or else their indices."""
        names = [str(name) for name in getattr(self.datamodule, "class_names", None) or ()]
        return names if len(names) == count else [str(index) for index in range(count)]

    def sample_name(self, index: int) -> str:
        """Return the file name of a sample, or text with its index if it does not have a file."""
        return str(getattr(self.source, "name", "image {}".format)(index))


def write_pictures(folder: Path, evaluated: Evaluated) -> list[Path]:
    """Write the pictures and tables of an evaluation, and return the paths of the files.

    Args:
        folder: Folder of the files; it is created if it does not exist.
        evaluated: The evaluation.

    Raises:
        OSError: A picture cannot be written.
        ConfigurationError: A table cannot be written, or an image cannot be read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    states, files = evaluated.states, []

    def path(name: str) -> Path:
        files.append(folder / f"{evaluated.split}_{name}")
        return files[-1]

    confusion = states.get("confusion")
    if confusion is not None and len(confusion):
        names = evaluated.names(len(confusion))
        if confusion.ndim == 2 or len(confusion) <= MOST_LABELS:
            drawing.draw_confusion(confusion, names, evaluated.title, path("confusion_matrix.png"))
        write_table(path("classes.csv"), table_of_classes(confusion, names, of_pixels="masks" in states))
    if "bins" in states:
        drawing.draw_calibration(states["bins"], evaluated.title, path("calibration.png"))
    if "points" in states:
        names = evaluated.names(states["points"].shape[2])
        drawing.draw_values(states["points"], names[:MOST_OUTPUTS], evaluated.title, path("predicted_values.png"))
        write_table(path("errors.csv"), table_of_errors(states["errors"], names))
    if evaluated.source is not None:
        _write_mistakes(evaluated, path)
    return files


def _write_mistakes(evaluated: Evaluated, path: Any) -> None:
    """Write the sheet of the worst images, or of their masks, and the table with their names."""
    states = evaluated.states
    # Samplers that are not this package's may repeat samples.
    rows: dict[int, int] = {}
    for row, (index, score) in enumerate(
        zip(states["worst_rows"][:, 0].tolist(), states["worst_values"][:, 0].tolist(), strict=True)
    ):
        if index >= 0 and score > float("-inf"):
            rows.setdefault(index, row)
    if not rows:
        return
    images, targets = evaluated.source.fetch(list(rows))
    names = [evaluated.sample_name(index) for index in rows]
    chosen = list(rows.values())
    columns, lines = describe_mistakes(evaluated, chosen)
    if "boxes" in states:
        count = min(len(chosen), drawing.MASKED)
        drawing.draw_boxes(
            images[:count],
            [target["boxes"] for target in targets[:count]],
            [target["labels"] for target in targets[:count]],
            states["boxes"][chosen[:count]],
            [f"{drawing.shortened(name)}\n{line}" for name, line in zip(names, lines, strict=True)],
            f"worst images, {evaluated.title}",
            path("boxes.png"),
        )
    elif "masks" not in states:
        texts = ["\n".join([name, text]) for name, text in zip(map(drawing.shortened, names), lines, strict=True)]
        drawing.draw_images(list(images), texts, f"worst mistakes, {evaluated.title}", path("mistakes.png"))
    elif states["masks"].numel():
        count = min(len(chosen), drawing.MASKED)
        drawing.draw_masks(
            images[:count],
            targets[:count],
            states["masks"][chosen[:count]],
            [f"{drawing.shortened(name)}\n{line}" for name, line in zip(names, lines, strict=True)],
            evaluated.ignore_index,
            f"worst images, {evaluated.title}",
            path("masks.png"),
        )
    values = [[f"{value:.6f}" for value in states["worst_values"][row].tolist()] for row in chosen]
    header = ["sample", "mistake", *columns]
    first = 1 if "boxes" in states else 0  # The size of the mistake is the sum of the other two numbers.
    table = [
        [name, line, *value[first : first + len(columns)]]
        for name, line, value in zip(names, lines, values, strict=True)
    ]
    write_table(path("mistakes.csv"), [header, *table])


def describe_mistakes(evaluated: Evaluated, rows: Sequence[int]) -> tuple[list[str], list[str]]:
    """Return the names of the columns of ``worst_values``, and a text for each of the worst samples.

    Args:
        evaluated: The evaluation.
        rows: The rows of the table of worst mistakes.
    """
    states = evaluated.states
    integers, values = states["worst_rows"][rows].tolist(), states["worst_values"][rows].tolist()
    if "boxes" in states:
        return ["missing", "wrong"], [f"{value[1]:.0f} missing, {value[2]:.0f} wrong" for value in values]
    if "masks" in states:
        return ["wrong"], [f"{value[0]:.1%} of the pixels are wrong" for value in values]
    if "points" in states:
        names = evaluated.names(states["points"].shape[2])
        texts = [
            f"{names[numbers[1]]} is {value[1]:.4g}, predicted {value[2]:.4g}"
            for numbers, value in zip(integers, values, strict=True)
        ]
        return ["squared error", "true", "predicted"], texts
    names = evaluated.names(len(states["confusion"]) or 1 + max(max(numbers[1:]) for numbers in integers))
    if states["confusion"].ndim == 3:
        texts = [
            f"{'' if there else 'not '}{names[label]}, predicted with {value[1]:.0%}"
            for (_, label, there), value in zip(integers, values, strict=True)
        ]
        return ["loss", "probability"], texts
    texts = [
        f"{names[true]}, predicted {names[predicted]} ({value[1]:.0%})"
        for (_, predicted, true), value in zip(integers, values, strict=True)
    ]
    return ["loss", "probability of the predicted class", "probability of the true class"], texts


def table_of_classes(confusion: Tensor, names: Sequence[str], of_pixels: bool) -> Table:
    """Return the table with the precision and the recall of each class or label.

    Args:
        confusion: Confusion matrix: true and predicted classes (C, C), or for labels (L, 2, 2).
        names: Names of the classes or labels.
        of_pixels: Whether the matrix counts pixels.
    """
    confusion = confusion.double()
    if confusion.ndim == 3:
        right, true, predicted = confusion[:, 1, 1], confusion[:, 1].sum(1), confusion[:, :, 1].sum(1)
    else:
        right, true, predicted = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    columns = {
        "precision": right / predicted,
        "recall": right / true,
        "f1": 2 * right / (true + predicted),
        **({"iou": right / (true + predicted - right)} if of_pixels else {}),
    }
    counted = "pixels" if of_pixels else "images"
    table = [["class", counted, f"predicted {counted}", *columns]]
    for row, name in enumerate(names):
        values = [float(column[row]) for column in columns.values()]
        cells = ["" if value != value else f"{value:.4f}" for value in values]  # NaN: the class does not occur.
        table.append([name, f"{true[row]:.0f}", f"{predicted[row]:.0f}", *cells])
    return table


def table_of_errors(errors: Tensor, names: Sequence[str]) -> Table:
    """Return the table with the errors of each output.

    Args:
        errors: Number of samples, and sums of errors, absolute errors and squared errors (4, outputs).
        names: Names of the outputs.
    """
    count, total, absolute, squared = errors.double()
    columns = torch.stack([total / count, absolute / count, (squared / count).sqrt()], 1).tolist()
    rows = [[name, *(f"{value:.6g}" for value in values)] for name, values in zip(names, columns, strict=True)]
    return [["output", "mean error", "mean absolute error", "root mean squared error"], *rows]


def write_table(path: Path, rows: Table) -> None:
    """Write a CSV file."""
    with whole_file(path, "free some space, or set pictures: false") as file:
        csv.writer(codecs.getwriter("utf-8")(file)).writerows(rows)
