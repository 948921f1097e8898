"""Images in which one class of pixels is bright, and masks that say so."""

from pathlib import Path

import numpy as np
from PIL import Image


def write_masked_images(
    folder: Path, count: int, size: tuple[int, int] = (20, 24), square: int = 8, kind: str = "png"
) -> None:
    """Writes `images/` and `masks/` of two classes; the first row of each mask counts nowhere."""
    random = np.random.default_rng(0)
    for part in ("images", "masks"):
        (folder / part).mkdir(parents=True)
    for index in range(count):
        mask = np.zeros(size, dtype=np.uint8)
        top, left = random.integers(2, square + 1, 2)
        mask[top : top + square, left : left + square] = 1
        pixels = 60 + 120 * mask[..., None] + random.integers(40, size=(*size, 3))
        mask[: 1 + index % 3] = 255
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"images/{index}.{kind}", quality=90)
        Image.fromarray(mask).save(folder / f"masks/{index}.png")


def no_mask():
    Path("data/train/masks/3.png").unlink()


def another_size():
    Image.new("L", (9, 9)).save("data/train/masks/3.png")


def another_class():
    Image.new("L", (24, 20), 7).save("data/train/masks/3.png")


# What spoils the fourth of them in data/train, and what is said of it.
MASK_MISTAKES = {
    no_mask: r"images/3.png has no mask: put 3.png into .*masks",
    another_size: r"mask .*3.png is of \(9, 9\) pixels and its image of \(20, 24\)",
    another_class: r"mask .*3.png has the class 7, and num_classes=2 has 0 to 1",
}
