"""Which classes are taken for which, as numbers and as a picture."""

import csv
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from torch import Tensor

MOST_CLASSES = 1000  # Of a matrix: 8 MB.
MOST_NUMBERS = 20  # Classes with which the picture has a number in each cell.
MOST_NAMES = 60  # Classes with which it has their names.


def count_pairs(predicted: Tensor, targets: Tensor, num_classes: int) -> Tensor:
    """How often each class (row) was taken for each (column): int64 (num_classes, num_classes).

    Args:
        predicted: Classes, of any shape.
        targets: The true ones, of the same shape; others than ``range(num_classes)`` do not count.
        num_classes: Number of classes.
    """
    counted = (targets >= 0) & (targets < num_classes)
    pairs = targets[counted] * num_classes + predicted[counted]
    return torch.bincount(pairs, minlength=num_classes**2).reshape(num_classes, num_classes)


def most_confused(counts: Tensor, most: int) -> list[tuple[int, int, int]]:
    """The pairs of classes that are confused most often: true class, predicted class and how often."""
    wrong = counts.clone().fill_diagonal_(0).flatten()
    values, places = wrong.sort(descending=True, stable=True)
    classes = len(counts)
    pairs = zip(places[:most].tolist(), values[:most].tolist(), strict=True)
    return [(place // classes, place % classes, often) for place, often in pairs if often]


def intersections_over_unions(counts: Tensor) -> list[float]:
    """For each class its true and predicted pixels over those that are either; NaN without any."""
    both = counts.diagonal()
    either = counts.sum(dim=0) + counts.sum(dim=1) - both
    return [float(value) for value in both.double() / either]


def write_confusion(counts: Tensor, names: Sequence[str], path: Path) -> None:
    """Write a matrix as CSV: a row for each true class, a column for each predicted one."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["true class", *names])
        for name, row in zip(names, counts.tolist(), strict=True):
            writer.writerow([name, *row])


def draw_confusion(counts: Tensor, names: Sequence[str], path: Path) -> None:
    """Draw a matrix: the darker, the larger the share of the row's true class.

    Args:
        counts: How often each class (row) was taken for each (column).
        names: Of the classes.
        path: The PNG file.
    """
    classes = len(counts)
    shares = (100 * counts.double() / counts.sum(dim=1, keepdim=True).clamp(min=1)).numpy()
    side = min(16.0, max(4.0, 1.5 + (0.42 if classes <= MOST_NUMBERS else 0.2) * classes))
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.subplots()
    # By the root: what is rarely confused is to be seen, too.
    picture = axes.imshow(shares, cmap="Blues", norm=PowerNorm(0.5, 0, 100), interpolation="nearest")
    axes.set(xlabel="predicted class", ylabel="true class")
    figure.colorbar(picture, ax=axes, label="% of the true class", shrink=0.8)
    if classes <= MOST_NAMES:
        size = 9 if classes <= MOST_NUMBERS else 6
        upright = max(map(len, names)) > 3
        axes.set_xticks(range(classes), names, rotation=90 if upright else 0, fontsize=size)
        axes.set_yticks(range(classes), names, fontsize=size)
    if classes <= MOST_NUMBERS:
        for row, values in enumerate(shares):
            for column, share in enumerate(values):
                if counts[row, column]:
                    text = f"{share:.0f}" if share >= 1 else "<1"
                    axes.text(column, row, text, ha="center", va="center", size=8, color="w" if share > 30 else "k")
    axes.spines[:].set_visible(False)
    figure.savefig(path, dpi=120)
