"""Masks, which have the class of each pixel of an image, and the squares that whole images are fitted into."""

from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from cnnstrategies.data.decoding import BrokenImageError
from cnnstrategies.data.preprocessing import IMAGENET
from cnnstrategies.errors import ConfigurationError

FILL = [round(255 * value) for value in IMAGENET.mean]  # The colour that becomes 0, where a square is filled up.
LEAST_AREA = 0.25  # Of an image that a random crop shows.


def read_mask(file: Path | BinaryIO) -> Tensor:
    """A mask's classes (H, W), uint8: a palette's indices, or grey values.

    Raises:
        BrokenImageError: It cannot be decoded.
    """
    try:
        with Image.open(file) as opened:
            return torch.from_numpy(np.array(opened if opened.mode in ("L", "P") else opened.convert("L")))
    # Pillow's formats raise many kinds of errors for damaged data.
    except Exception as error:
        raise BrokenImageError(" ".join(str(error).split())) from error


def check_mask(mask: Tensor, path: Path, size: tuple[int, int], num_classes: int, ignore_index: int) -> None:
    """Refuse a mask that is not of its image, or has other classes.

    Args:
        mask: The mask.
        path: Its file.
        size: Height and width of its image.
        num_classes: Number of classes.
        ignore_index: The value of pixels that count nowhere.

    Raises:
        ConfigurationError: It is of another size, or has a class that is none.
    """
    if mask.shape != size:
        raise ConfigurationError(
            f"mask {path} is of {tuple(mask.shape)} pixels and its image of {tuple(size)}: make them equal"
        )
    largest = int(mask.masked_fill(mask == ignore_index, 0).max())
    if largest >= num_classes:
        raise ConfigurationError(
            f"mask {path} has the class {largest}, and num_classes={num_classes} has 0 to {num_classes - 1}: set "
            "data.init_args.num_classes and model.init_args.num_classes"
        )


def fitted(height: int, width: int, size: int) -> tuple[int, int]:
    """Height and width of an image that is scaled so that its longer side is ``size``."""
    longer = max(height, width)
    return max(1, round(height * size / longer)), max(1, round(width * size / longer))


def of_image(mask: Tensor, height: int, width: int) -> Tensor:
    """A square mask in the size of the image that was fitted into it, without what was filled up."""
    rows, columns = fitted(height, width, mask.shape[-1])
    inner = mask[None, None, :rows, :columns].float()
    return F.interpolate(inner, (height, width), mode="nearest-exact")[0, 0].to(mask.dtype)
