"""Boxes of images as annotation files give them: conversion to corners, and checks against the image's size."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from cnnstrategies.errors import ConfigurationError

BoxFormat = Literal["xyxy", "xywh", "cxcywh"]
Corners = tuple[float, float, float, float]
OUTSIDE = "boxes that were clipped to their image"
EMPTY = "boxes of size 0"


@dataclass(frozen=True)
class ReadBox:
    """A box as an annotation file gives it.

    Attributes:
        place: File, and line or entry, for error messages.
        name: Name of the class.
        numbers: Four numbers in the file's format, in pixels.
        is_crowd: Whether the box surrounds several objects, which training leaves out and the metrics ignore.
        is_difficult: Whether the metrics ignore the box, which training uses.
        area: Area of the object in pixels; 0 for the area of the box.
    """

    place: str
    name: str
    numbers: Corners
    is_crowd: bool = False
    is_difficult: bool = False
    area: float = 0.0


@dataclass
class ReadImage:
    """An image with its boxes.

    Attributes:
        path: Path of the image file.
        size: Height and width in pixels.
        boxes: Boxes of the image, in the order of the file; empty for an image without objects.
        number: Number of the image in its annotation file, such as COCO's ``id``; None without such a number.
    """

    path: Path
    size: tuple[int, int]
    boxes: list[ReadBox] = field(default_factory=list)
    number: int | None = None


@dataclass(frozen=True)
class BoxRules:
    """Options of a data module that say how boxes are read.

    Attributes:
        box_format: Format of the four numbers of a box; None for the format of the kind of file.
        outside: Whether boxes that reach beyond their image are clipped and counted, or refused.
        empty: Whether boxes of size 0 are refused, or dropped and counted.
    """

    box_format: BoxFormat | None = None
    outside: Literal["clip", "refuse"] = "clip"
    empty: Literal["refuse", "drop"] = "refuse"


def corners_of(numbers: Sequence[float], box_format: BoxFormat) -> Corners:
    """Return a box as x1, y1, x2, y2.

    Args:
        numbers: Four numbers: two corners (``xyxy``), the upper left corner with width and height (``xywh``), or the
            centre with width and height (``cxcywh``).
        box_format: Format of the numbers.
    """
    first, second, third, fourth = numbers
    if box_format == "xyxy":
        return first, second, third, fourth
    left, top = (first, second) if box_format == "xywh" else (first - third / 2, second - fourth / 2)
    return left, top, left + third, top + fourth


def targets_of(
    image: ReadImage, names: Sequence[str], first_label: int, rules: BoxRules, left_out: Counter[str]
) -> Tensor:
    """Return the boxes of an image as rows (n, 8): x1, y1, x2, y2, label, is crowd, is difficult, and area.

    Args:
        image: The image. The numbers of its boxes are x1, y1, x2, y2.
        names: Names of the classes.
        first_label: Label of the first class.
        rules: How boxes are read.
        left_out: Counter to which clipped and dropped boxes are added.

    Raises:
        ConfigurationError: A box has no finite numbers, is turned around, is refused by the rules, or has a class that
            is not one of the names.
    """
    labels = {name: number for number, name in enumerate(names, start=first_label)}
    rows: list[list[float]] = []
    for box in image.boxes:
        clipped = _checked(box, image, rules, left_out)
        if box.name not in labels:
            raise ConfigurationError(
                f"{box.place}: the class {box.name!r} is not one of the training classes ({_named(names)}); rename the "
                "class, or add training images with it"
            )
        if clipped is not None:
            left, top, right, bottom = clipped
            area = box.area or (right - left) * (bottom - top)
            rows.append([*clipped, labels[box.name], float(box.is_crowd), float(box.is_difficult), area])
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, 8)


def _checked(box: ReadBox, image: ReadImage, rules: BoxRules, left_out: Counter[str]) -> Corners | None:
    """Return a box within its image, or None if the box is dropped."""
    left, top, right, bottom = box.numbers
    height, width = image.size
    text = ", ".join(f"{number:g}" for number in box.numbers)
    if not all(map(isfinite, box.numbers)):
        raise ConfigurationError(f"{box.place}: the box ({text}) has a number that is not finite; correct the box")
    if right < left or bottom < top:
        raise ConfigurationError(
            f"{box.place}: the box from ({left:g}, {top:g}) to ({right:g}, {bottom:g}) ends before it begins; correct "
            "it, or set data.init_args.box_format to the format of the file: xyxy, xywh or cxcywh"
        )
    within = (min(max(left, 0.0), width), min(max(top, 0.0), height), min(right, width), min(bottom, height))
    within = (within[0], within[1], max(within[2], within[0]), max(within[3], within[1]))
    is_within = within[2] > within[0] and within[3] > within[1]
    if right > left and bottom > top and within != box.numbers:
        if rules.outside == "refuse":
            raise ConfigurationError(
                f"{box.place}: the box from ({left:g}, {top:g}) to ({right:g}, {bottom:g}) reaches beyond its image of "
                f"{width} x {height} pixels; correct it, set data.init_args.box_format to the format of the file, or "
                "set data.init_args.outside: clip"
            )
        left_out[OUTSIDE] += is_within
    if is_within:
        return within
    if rules.empty == "refuse":
        raise ConfigurationError(
            f"{box.place}: the box from ({left:g}, {top:g}) to ({right:g}, {bottom:g}) has the size 0 within its image "
            f"of {width} x {height} pixels; correct or remove it, or set data.init_args.empty: drop"
        )
    left_out[EMPTY] += 1
    return None


def _named(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + ", ..." * (len(names) > most)
