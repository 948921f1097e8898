"""Predicted masks as picture files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor


def write_masks(folder: Path, datamodule: Any, indices: Sequence[int], masks: Tensor) -> None:
    """Write masks as PNG files whose pixels are classes and look like colours.

    Args:
        folder: Where to; each is called as its sample, with .png for an ending.
        datamodule: Its ``sample_name(index)`` and ``mask_of_image(index, mask)``, which gives the mask the size of its
            image, are used if it has them.
        indices: Of the samples in the predict dataset.
        masks: Their classes (N, H, W).
    """
    sample_name = getattr(datamodule, "sample_name", str)
    mask_of_image = getattr(datamodule, "mask_of_image", lambda index, mask: mask)
    for index, mask in zip(indices, masks, strict=True):
        path = (folder / sample_name(index)).with_suffix(".png")
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(mask_of_image(index, mask).numpy().astype(np.uint8))
        picture.putpalette(palette())
        picture.save(path)


def palette() -> list[int]:
    """Red, green and blue of 256 classes, as in PASCAL VOC: each bit of a class's number is one of a colour."""
    colours = np.zeros((256, 3), dtype=np.uint8)
    for bit in range(8):
        for channel in range(3):
            colours[:, channel] |= ((np.arange(256) >> (3 * bit + channel)) & 1).astype(np.uint8) << (7 - bit)
    return [int(value) for value in colours.reshape(-1)]
