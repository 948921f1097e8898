"""Decoding of image files to tensors, and scaling of segmentation masks to the size of their images."""

from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

LIMIT = "is the limit (PIL.Image.MAX_IMAGE_PIXELS)"


class BrokenImageError(Exception):
    """Error for a file that is not an image, is damaged or has too many pixels. The error's text gives the reason."""


def decode(file: Path | BinaryIO) -> Tensor:
    """Decode an image file and rotate the image according to its EXIF orientation.

    The file's content, and not its extension, determines the format. Pillow decodes the file. The decoders of
    torchvision are not used, because torchvision 0.29 deprecates them, and because its PNG decoder crashes with a
    segmentation fault on damaged files.

    Args:
        file: Path of the file, or the open file.

    Returns:
        RGB image, uint8 (3, H, W). Greyscale is converted to RGB, the alpha channel is removed, and values of 16 bits
        are reduced to 8 bits.

    Raises:
        BrokenImageError: The file cannot be read or decoded, or has too many pixels.
    """
    try:
        with Image.open(file) as opened:
            count, limit = opened.width * opened.height, Image.MAX_IMAGE_PIXELS
            if limit is not None and count > limit:
                # The file may be a decompression bomb. Pillow itself raises an error only above twice this limit. An
                # image of that size needs 3 GB of memory, although its PNG file may have only 0.4 MB.
                raise ValueError(f"the image has {count / 1e6:.0f} megapixels, and {limit / 1e6:.0f} {LIMIT}")
            image = ImageOps.exif_transpose(opened)
            if image.mode.startswith("I;16"):
                # Scale values of 16 bits to 8 bits. Pillow's own conversion would clip values at 255, so that most
                # pixels would become white.
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            if image.mode in ("I", "F"):
                raise ValueError(
                    f"the pixels have 32 bits (mode {image.mode}) and an unknown range: convert them to 8 or 16 bits"
                )
            pixels = np.array(image.convert("RGB"))
    # `Image.open` raises this error if an image has more than twice as many pixels as Pillow's limit.
    except Image.DecompressionBombError as error:
        megapixels = (Image.MAX_IMAGE_PIXELS or 0) / 1e6
        raise BrokenImageError(f"the image has too many pixels: {megapixels:.0f} megapixels {LIMIT}") from error
    # For damaged files, Pillow's decoders raise OSError, ValueError, SyntaxError, struct.error and other errors, so all
    # errors are caught.
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise BrokenImageError(" ".join((reason or str(error) or type(error).__name__).split())) from error
    return torch.from_numpy(pixels).permute(2, 0, 1)


def fitted(height: int, width: int, size: int) -> tuple[int, int]:
    """Return the height and width, in pixels, of an image after its longer side has been scaled to ``size``."""
    longer = max(height, width)
    return max(1, round(height * size / longer)), max(1, round(width * size / longer))


def of_image(mask: Tensor, height: int, width: int) -> Tensor:
    """Remove the padding from a predicted mask, and scale the mask to the size of the original image.

    Args:
        mask: Mask (S, S) that was predicted for the scaled and padded image.
        height: Height of the original image, in pixels.
        width: Width of the original image, in pixels.

    Returns:
        Mask (height, width).
    """
    rows, columns = fitted(height, width, mask.shape[-1])
    inner = mask[None, None, :rows, :columns].float()
    return F.interpolate(inner, (height, width), mode="nearest-exact")[0, 0].to(mask.dtype)
