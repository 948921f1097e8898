"""Images for segmentation tests: a bright square on a dark background, and masks that mark the square."""

from pathlib import Path

import numpy as np
from PIL import Image


def write_masked_images(folder: Path, count: int) -> None:
    """Write `images/` and `masks/` of two classes; the first rows of each mask have the ignored value 255."""
    random = np.random.default_rng(0)
    for part in ("images", "masks"):
        (folder / part).mkdir(parents=True)
    for index in range(count):
        mask = np.zeros((20, 24), dtype=np.uint8)
        top, left = random.integers(2, 9, 2)
        mask[top : top + 8, left : left + 8] = 1
        pixels = 60 + 120 * mask[..., None] + random.integers(40, size=(20, 24, 3))
        mask[: 1 + index % 3] = 255
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"images/{index}.png")
        Image.fromarray(mask).save(folder / f"masks/{index}.png")
