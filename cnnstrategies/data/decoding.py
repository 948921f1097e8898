"""Image files to tensors; a damaged file is an error, whatever its damage."""

from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

MOST = "are the most (PIL.Image.MAX_IMAGE_PIXELS)"


class BrokenImageError(Exception):
    """A file that is not an image, a damaged or too large one; the message says why."""


def decode(file: Path | BinaryIO) -> Tensor:
    """Decode an image file, whatever its extension, and turn it as its EXIF orientation says.

    By Pillow: torchvision 0.29 announces the end of its own decoders, and its PNG decoder ends the process by a
    segmentation fault where image data is damaged.

    Args:
        file: Its path, or what is in it.

    Returns:
        uint8 (3, H, W); grey is repeated, transparency is dropped, 16 bits become 8.

    Raises:
        BrokenImageError: The file cannot be read or decoded.
    """
    try:
        with Image.open(file) as opened:
            count, most = opened.width * opened.height, Image.MAX_IMAGE_PIXELS
            if most is not None and count > most:
                # It may be made to fill the memory. Pillow itself decodes twice as many pixels, for which a PNG of
                # 0.4 MB takes 3 GB.
                raise ValueError(f"it has {count / 1e6:.0f} megapixels, and {most / 1e6:.0f} {MOST}")
            image = ImageOps.exif_transpose(opened)
            if image.mode.startswith("I;16"):
                # Pillow's own conversion clips at 255 instead of scaling: all but the darkest pixels become white.
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            if image.mode in ("I", "F"):
                raise ValueError(f"pixels of 32 bits ({image.mode}), whose range is unknown: give it 8 or 16")
            pixels = np.array(image.convert("RGB"))
    except Image.DecompressionBombError as error:  # Of `open`, which itself refuses twice as many.
        limit = (Image.MAX_IMAGE_PIXELS or 0) / 1e6
        raise BrokenImageError(f"it has too many pixels: {limit:.0f} megapixels {MOST}") from error
    # Pillow's formats raise OSError, ValueError, SyntaxError, struct.error and others for damaged data.
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise BrokenImageError(" ".join((reason or str(error) or type(error).__name__).split())) from error
    return torch.from_numpy(pixels).permute(2, 0, 1)


def fitted(height: int, width: int, size: int) -> tuple[int, int]:
    """Height and width of an image that is scaled so that its longer side is ``size``."""
    longer = max(height, width)
    return max(1, round(height * size / longer)), max(1, round(width * size / longer))


def of_image(mask: Tensor, height: int, width: int) -> Tensor:
    """A square mask in the size of the image that was fitted into it, without what was filled up."""
    rows, columns = fitted(height, width, mask.shape[-1])
    inner = mask[None, None, :rows, :columns].float()
    return F.interpolate(inner, (height, width), mode="nearest-exact")[0, 0].to(mask.dtype)
