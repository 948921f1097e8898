"""Decoding of image files to tensors. Every kind of damage to a file raises the same error."""

from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

LIMIT = "is the limit (PIL.Image.MAX_IMAGE_PIXELS)"


class BrokenImageError(Exception):
    """A file is not an image, is damaged or is too large; the message gives the reason."""


def decode(file: Path | BinaryIO) -> Tensor:
    """Decode an image file, whatever its extension, and rotate it by its EXIF orientation.

    Pillow decodes the file: torchvision 0.29 announces the end of its own decoders, and its PNG decoder ends the
    process with a segmentation fault if image data is damaged.

    Args:
        file: Path of the file, or the open file.

    Returns:
        uint8 (3, H, W). Grey values are repeated for each channel, transparency is dropped, and 16 bits become 8.

    Raises:
        BrokenImageError: The file cannot be read or decoded, or has too many pixels.
    """
    try:
        with Image.open(file) as opened:
            count, limit = opened.width * opened.height, Image.MAX_IMAGE_PIXELS
            if limit is not None and count > limit:
                # Such a file may be made to fill the memory: Pillow itself allows twice as many pixels, for which a PNG
                # file of 0.4 MB takes 3 GB.
                raise ValueError(f"the image has {count / 1e6:.0f} megapixels, and {limit / 1e6:.0f} {LIMIT}")
            image = ImageOps.exif_transpose(opened)
            if image.mode.startswith("I;16"):
                # Pillow's own conversion clips at 255 instead of scaling: all but the darkest pixels become white.
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            if image.mode in ("I", "F"):
                raise ValueError(
                    f"pixels have 32 bits ({image.mode}) and an unknown range: convert them to 8 or 16 bits"
                )
            pixels = np.array(image.convert("RGB"))
    except Image.DecompressionBombError as error:  # `open` refuses images of more than twice the limit.
        megapixels = (Image.MAX_IMAGE_PIXELS or 0) / 1e6
        raise BrokenImageError(f"the image has too many pixels: {megapixels:.0f} megapixels {LIMIT}") from error
    # For damaged data Pillow's formats raise OSError, ValueError, SyntaxError, struct.error and other errors.
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise BrokenImageError(" ".join((reason or str(error) or type(error).__name__).split())) from error
    return torch.from_numpy(pixels).permute(2, 0, 1)


def fitted(height: int, width: int, size: int) -> tuple[int, int]:
    """Return height and width of an image after scaling its longer side to ``size``."""
    longer = max(height, width)
    return max(1, round(height * size / longer)), max(1, round(width * size / longer))


def of_image(mask: Tensor, height: int, width: int) -> Tensor:
    """Return a square mask in the size of the image that was fitted into the square, without the padding.

    Args:
        mask: (S, S).
        height: Height of the image.
        width: Width of the image.
    """
    rows, columns = fitted(height, width, mask.shape[-1])
    inner = mask[None, None, :rows, :columns].float()
    return F.interpolate(inner, (height, width), mode="nearest-exact")[0, 0].to(mask.dtype)
