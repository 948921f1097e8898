"""Which rectangle of each image of a batch is shown, drawn for all of them at once."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

LEAST_AREA, RATIO = 0.08, (3 / 4, 4 / 3)  # Szegedy et al. 2015; torchvision's defaults, as are the ten attempts.
ATTEMPTS = 10
Sizes = npt.NDArray[np.int64]


class Crop(NamedTuple):
    """A rectangle, and whether it is shown mirrored."""

    left: int
    top: int
    width: int
    height: int
    mirrored: bool


def random_crops(widths: Sizes, heights: Sizes, least_area: float = LEAST_AREA) -> list[Crop]:
    """Rectangles of random size, shape and place as torchvision's ``RandomResizedCrop`` draws them, half mirrored.

    From torch's own generator: what seeds a batch seeds its crops.

    Args:
        widths: Of the images, in pixels.
        heights: Of the images, in pixels.
        least_area: Share of an image that its crop has at least.
    """
    count = len(widths)
    area, ratio, left, top, mirror = torch.rand(5, ATTEMPTS, count, dtype=torch.float64).numpy()
    area = (least_area + area * (1 - least_area)) * widths * heights
    ratio = np.exp(np.log(RATIO[0]) + ratio * np.log(RATIO[1] / RATIO[0]))
    width, height = np.rint(np.sqrt(area * ratio)).astype(int), np.rint(np.sqrt(area / ratio)).astype(int)
    fits = (width > 0) & (width <= widths) & (height > 0) & (height <= heights)
    chosen = fits.argmax(0), np.arange(count)
    # Where none fits: the largest rectangle in the middle whose shape is allowed.
    found = fits[chosen]
    width = np.where(found, width[chosen], np.minimum(widths, np.rint(heights * RATIO[1]).astype(int)))
    height = np.where(found, height[chosen], np.minimum(heights, np.rint(widths / RATIO[0]).astype(int)))
    x = np.where(found, left[chosen] * (widths - width + 1), (widths - width) / 2).astype(int)
    y = np.where(found, top[chosen] * (heights - height + 1), (heights - height) / 2).astype(int)
    mirrored = mirror[0] < 0.5
    rows = np.stack([x, y, width, height], axis=1).tolist()
    return [Crop(row[0], row[1], row[2], row[3], bool(flip)) for row, flip in zip(rows, mirrored.tolist(), strict=True)]


def centre_crops(widths: Sizes, heights: Sizes, share: float) -> list[Crop]:
    """Squares in the middle.

    Args:
        widths: Of the images, in pixels.
        heights: Of the images, in pixels.
        share: Of the shorter side that they cover.
    """
    side = np.maximum(1, np.rint(np.minimum(widths, heights) * share).astype(int))
    x, y = (widths - side) // 2, (heights - side) // 2
    rows = zip(x.tolist(), y.tolist(), side.tolist(), strict=True)
    return [Crop(left, top, width, width, False) for left, top, width in rows]


def whole_images(widths: Sizes, heights: Sizes) -> list[Crop]:
    """Rectangles that show all of the images.

    Args:
        widths: Of the images, in pixels.
        heights: Of the images, in pixels.
    """
    return [Crop(0, 0, width, height, False) for width, height in zip(widths.tolist(), heights.tolist(), strict=True)]
