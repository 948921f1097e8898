"""Drawings of an evaluation: confusion matrices, reliability diagrams, sheets of images, and masks over images."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.figure import Figure
from PIL import Image, ImageDraw
from torch import Tensor
from torchmetrics.classification import BinaryConfusionMatrix, MulticlassConfusionMatrix

from cnnstrategies.callbacks.predictions import palette

DPI = 120
MOST_NUMBERS = 20  # Largest number of classes whose confusion matrix shows numbers.
MOST_NAMES = 60  # Largest number of classes whose names are shown.
MASKED = 8  # Number of images that are drawn with their masks.
SIDE = 256  # Height or width of an image in a sheet, in pixels.
LONGEST_NAME = 34  # Largest number of characters of a file name.
OPACITY = 0.55  # Opacity of a mask over an image.

Pixels = npt.NDArray[np.uint8]


def draw_confusion(confusion: Tensor, names: Sequence[str], title: str, path: Path) -> None:
    """Draw a confusion matrix with torchmetrics, as percentages of each true class; or those of several labels.

    Args:
        confusion: True and predicted classes (C, C), or for labels (L, 2, 2).
        names: Names of the classes or labels.
        title: Text above the picture.
        path: The PNG file.
    """
    totals = confusion.sum(-1, keepdim=True).clamp(min=1)
    percent = (100 * confusion / totals).round()
    if confusion.ndim == 3:
        _draw_labels(percent, names, title, path)
        return
    count = len(confusion)
    has_numbers = count <= MOST_NUMBERS
    size = min(12.0, 3.2 + 0.42 * count)
    figure = Figure(figsize=(size + 0.8, size), layout="constrained")
    axes = figure.subplots()
    MulticlassConfusionMatrix(count).plot(percent.long(), axes, has_numbers, [*names], "Blues")
    step = 1 if count <= MOST_NAMES else -(-count // 20)
    ticks = range(0, count, step)
    axes.set_xticks(ticks, [shortened(names[tick], 18) for tick in ticks], rotation=90, fontsize=8)
    axes.set_yticks(ticks, [shortened(names[tick], 18) for tick in ticks], rotation=0, fontsize=8)
    axes.images[0].set_clim(0, 100)
    for text in axes.texts:
        text.set_fontsize(8)
        value = int(text.get_text())
        text.set(text="" if value == 0 else str(value), color="white" if value > 50 else "black")
    axes.set_xlabel("predicted class", fontsize=10)
    axes.set_ylabel("true class", fontsize=10)
    axes.set_title(f"Confusion matrix, {title}", fontsize=11)
    figure.colorbar(axes.images[0], ax=axes, label="% of the true class", shrink=0.8)
    figure.savefig(path, dpi=DPI)


def _draw_labels(percent: Tensor, names: Sequence[str], title: str, path: Path) -> None:
    columns = math.ceil(math.sqrt(len(names)))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(2.3 * columns, 2.4 * rows + 0.4), layout="constrained")
    panels = [*figure.subplots(rows, columns, squeeze=False).flat]
    for axes in panels[len(names) :]:
        axes.remove()
    for axes, matrix, name in zip(panels, percent, names, strict=False):
        BinaryConfusionMatrix().plot(matrix.long(), axes, True, ["no", "yes"], "Blues")
        axes.images[0].set_clim(0, 100)
        axes.set_xticks([0, 1], ["no", "yes"], rotation=0, fontsize=8)
        axes.set_yticks([0, 1], ["no", "yes"], rotation=0, fontsize=8)
        axes.set_xlabel("predicted", fontsize=8)
        axes.set_ylabel("true", fontsize=8)
        axes.set_title(shortened(name, 24), fontsize=9)
        for text in axes.texts:
            value = int(text.get_text())
            text.set(text=f"{value} %", fontsize=9, color="white" if value > 50 else "black")
    figure.suptitle(f"Labels, {title}", fontsize=11)
    figure.savefig(path, dpi=DPI)


def draw_calibration(bins: Tensor, title: str, path: Path) -> None:
    """Draw a reliability diagram: how often predictions of a probability are right, and how many there are.

    Args:
        bins: Number of predictions, sum of their probabilities, and number of right ones (3, bins).
        title: Text above the picture.
        path: The PNG file.
    """
    count, confidence, right = (values.double().numpy() for values in bins)
    used = count > 0
    edges = np.linspace(0, 1, len(count) + 1)
    error = np.abs(right - confidence).sum() / max(1.0, count.sum())
    figure = Figure(figsize=(4.6, 5.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    upper.plot([0, 1], [0, 1], color="0.6", linestyle="--", label="perfectly calibrated")
    share = np.divide(right, count, out=np.zeros_like(right), where=used)
    upper.bar(edges[:-1], np.where(used, share, 0), np.diff(edges), align="edge", color="tab:blue", alpha=0.35)
    mean = confidence[used] / count[used]
    upper.plot(mean, share[used], marker="o", color="tab:blue", label="observed")
    upper.set(ylabel="fraction that is right", ylim=(0, 1), xlim=(0, 1))
    upper.set_title(f"Calibration, {title}\nexpected calibration error {error:.3f}", fontsize=11)
    upper.legend(loc="upper left", fontsize=8)
    lower.bar(edges[:-1], count, np.diff(edges), align="edge", color="0.6")
    lower.set(xlabel="predicted probability", ylabel="predictions")
    if count.max() > 50 * max(1.0, np.median(count[used]) if used.any() else 1.0):
        lower.set_yscale("log")
    figure.savefig(path, dpi=DPI)


def draw_values(points: Tensor, names: Sequence[str], title: str, path: Path) -> None:
    """Draw the predicted against the true values of a regression.

    Args:
        points: True and predicted values (N, 2, outputs).
        names: Names of the outputs to draw, which are the first ones.
        title: Text above the picture.
        path: The PNG file.
    """
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(3.9 * columns, 3.7 * rows + 0.4), layout="constrained")
    panels = [*figure.subplots(rows, columns, squeeze=False).flat]
    for axes in panels[len(names) :]:
        axes.remove()
    for output, name in enumerate(names):
        true, predicted = points[:, 0, output].numpy(), points[:, 1, output].numpy()
        axes = panels[output]
        axes.scatter(true, predicted, s=8, alpha=0.5, linewidths=0)
        ends = [min(true.min(), predicted.min()), max(true.max(), predicted.max())] if len(true) else [0, 1]
        axes.plot(ends, ends, color="0.6", linestyle="--")
        axes.set(xlabel="true", ylabel="predicted", title=shortened(name))
        axes.grid(alpha=0.25)
    figure.suptitle(f"Predicted values, {title}", fontsize=11)
    figure.savefig(path, dpi=DPI)


def draw_images(images: Sequence[Tensor], texts: Sequence[str], title: str, path: Path) -> None:
    """Draw a sheet of images.

    Args:
        images: uint8 (C, H, W).
        texts: Text above each image.
        title: Text above the sheet.
        path: The PNG file.
    """
    columns = min(4, len(images))
    _draw_sheet([scaled(image) for image in images], texts, columns, title, path)


def draw_masks(
    images: Tensor,
    targets: Tensor,
    predicted: Tensor,
    texts: Sequence[str],
    ignore_index: int | None,
    title: str,
    path: Path,
) -> None:
    """Draw images, and next to each the true and the predicted mask over it.

    Args:
        images: uint8 (N, C, H, W).
        targets: True class of each pixel (N, H, W).
        predicted: Predicted class of each pixel, in a smaller size (N, h, w).
        texts: Text above each image.
        ignore_index: Value of true masks' pixels that do not count; their predictions are not shown either.
        title: Text above the sheet.
        path: The PNG file.
    """
    tiles, captions = [], []
    for image, target, mask, text in zip(images, targets, predicted, texts, strict=False):
        pixels = scaled(image)
        size = (pixels.shape[1], pixels.shape[0])
        true, answer = (
            np.asarray(Image.fromarray(classes.numpy().astype(np.int32)).resize(size, Image.Resampling.NEAREST))
            for classes in (target, mask)
        )
        hidden = true == ignore_index if ignore_index is not None else np.zeros_like(true, dtype=bool)
        tiles += [pixels, over(pixels, true, hidden), over(pixels, answer, hidden)]
        captions += [text, "true", "predicted"]
    _draw_sheet(tiles, captions, 6 if len(images) > 1 else 3, title, path)


def draw_boxes(
    images: Sequence[Tensor],
    boxes: Sequence[Tensor],
    labels: Sequence[Tensor],
    predicted: Tensor,
    texts: Sequence[str],
    title: str,
    path: Path,
) -> None:
    """Draw each image with its true boxes, and next to it with its predicted boxes. A class has one colour.

    Args:
        images: float (C, H, W) in [0, 1], of any sizes.
        boxes: True boxes of each image (n, 4) as x1, y1, x2, y2.
        labels: Labels of the true boxes (n,).
        predicted: Predicted boxes (N, m, 6): four corners, label and score. Rows with the score 0 are unused.
        texts: Text above each image.
        title: Text above the sheet.
        path: The PNG file.
    """
    tiles, captions = [], []
    for image, true, kinds, answer, text in zip(images, boxes, labels, predicted, texts, strict=False):
        pixels = scaled((image * 255).clamp(0, 255).to(torch.uint8))
        factor = pixels.shape[0] / image.shape[1]
        drawn = answer[answer[:, 5] > 0]
        tiles += [with_boxes(pixels, true * factor, kinds), with_boxes(pixels, drawn[:, :4] * factor, drawn[:, 4])]
        captions += [text, "predicted"]
    _draw_sheet(tiles, captions, 4 if len(tiles) > 2 else 2, title, path)


def with_boxes(pixels: Pixels, boxes: Tensor, labels: Tensor) -> Pixels:
    """Return an image (h, w, 3) with boxes (n, 4), as x1, y1, x2, y2, in the colours of their labels (n,)."""
    picture, colours = Image.fromarray(pixels), palette()
    pen = ImageDraw.Draw(picture)
    for (left, top, right, bottom), label in zip(boxes.tolist(), labels.int().tolist(), strict=True):
        start = 3 * (label % 256)
        colour = (colours[start], colours[start + 1], colours[start + 2])
        corners = (left, top, max(left, right - 1), max(top, bottom - 1))
        pen.rectangle(corners, outline=colour if label else (255, 255, 255), width=2)
    return np.asarray(picture)


def _draw_sheet(tiles: Sequence[Pixels], texts: Sequence[str], columns: int, title: str, path: Path) -> None:
    rows = -(-len(tiles) // columns)
    figure = Figure(figsize=(2.6 * columns, 2.95 * rows + 0.4), layout="constrained")
    panels = [*figure.subplots(rows, columns, squeeze=False).flat]
    for axes in panels:
        axes.set_axis_off()
    for axes, tile, text in zip(panels, tiles, texts, strict=False):
        axes.imshow(tile, interpolation="nearest")
        axes.set_title(text, fontsize=7.5)
    figure.suptitle(title[0].upper() + title[1:], fontsize=11)
    figure.savefig(path, dpi=DPI)


def scaled(image: Tensor) -> Pixels:
    """Return an image as RGB pixels (h, w, 3), whose longer side is `SIDE` pixels.

    Args:
        image: uint8 (C, H, W). With one or two channels the result is grey; of several channels the first three count.
    """
    channels = image[:3] if len(image) >= 3 else image[:1].expand(3, -1, -1)
    pixels = channels.permute(1, 2, 0).contiguous().numpy().astype(np.uint8)
    factor = SIDE / max(pixels.shape[:2])
    height, width = (max(1, round(factor * length)) for length in pixels.shape[:2])
    kind = Image.Resampling.NEAREST if factor > 1 else Image.Resampling.BILINEAR
    return np.asarray(Image.fromarray(pixels).resize((width, height), kind))


def over(pixels: Pixels, classes: npt.NDArray[Any], hidden: npt.NDArray[np.bool_]) -> Pixels:
    """Return an image with the colours of its classes over it.

    Args:
        pixels: The image (h, w, 3).
        classes: Class of each pixel (h, w). Class 0 is usually the background, and is not coloured.
        hidden: Pixels that are shown in grey (h, w).
    """
    colours = np.array(palette(), dtype=np.float64).reshape(256, 3)[np.clip(classes, 0, 255)]
    opacity = np.where(hidden, OPACITY, np.where(classes == 0, 0.0, OPACITY))[..., None]
    colours = np.where(hidden[..., None], 128.0, colours)
    mixed: Pixels = (pixels * (1 - opacity) + colours * opacity).round().astype(np.uint8)
    return mixed


def shortened(name: str, longest: int = LONGEST_NAME) -> str:
    """Return the end of a long name, which differs between files more often than its beginning."""
    return name if len(name) <= longest else f"...{name[3 - longest :]}"
