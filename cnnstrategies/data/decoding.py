"""Decoding of image files to tensors, and scaling of segmentation masks to the size of their images."""

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

from cnnstrategies.errors import ConfigurationError

T = TypeVar("T")
SAMPLE = 32  # Number of a split's files that are read before the run.
BITS = (8, 10, 12, 14, 16)  # Numbers of bits that cameras and scanners use in pixels of 16 bits.
LIMIT = "is the limit (PIL.Image.MAX_IMAGE_PIXELS)"


class BrokenImageError(Exception):
    """Error for a file that is not an image, is damaged or has too many pixels. The error's text gives the reason."""


class PixelRangeError(Exception):
    """Error for an image with a pixel that needs more bits than the images are said to use."""


def decode(file: Path | BinaryIO, bits: int = 16) -> Tensor:
    """Decode an image file and rotate the image according to its EXIF orientation.

    The file's content, and not its extension, determines the format. Pillow decodes the file. The decoders of
    torchvision are not used, because torchvision 0.29 deprecates them, and because its PNG decoder crashes with a
    segmentation fault on damaged files.

    Args:
        file: Path of the file, or the open file.
        bits: Number of bits that images with 16 bits per pixel use.

    Returns:
        RGB image, uint8 (3, H, W). Greyscale is converted to RGB, the alpha channel is removed, and of 16 bits the
        highest 8 that are used remain.

    Raises:
        BrokenImageError: The file cannot be read or decoded, or has too many pixels.
        PixelRangeError: A pixel of 16 bits needs more than ``bits`` bits.
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
                # Pillow's own conversion would clip values at 255, so that most pixels would become white.
                values = np.asarray(image)
                if (largest := int(values.max(initial=0))) >= 2**bits:
                    raise PixelRangeError(
                        f"a pixel has the value {largest}, but images are read with bits={bits}, that is values up to "
                        f"{2**bits - 1}: set bits to {_next(largest)}"
                    )
                image = Image.fromarray((values >> (bits - 8)).astype(np.uint8))
            if image.mode in ("I", "F"):
                raise ValueError(
                    f"the pixels have 32 bits (mode {image.mode}) and an unknown range: convert them to 8 or 16 bits"
                )
            pixels = np.array(image.convert("RGB"))
    # `Image.open` raises this error if an image has more than twice as many pixels as Pillow's limit.
    except Image.DecompressionBombError as error:
        megapixels = (Image.MAX_IMAGE_PIXELS or 0) / 1e6
        raise BrokenImageError(f"the image has too many pixels: {megapixels:.0f} megapixels {LIMIT}") from error
    except PixelRangeError:
        raise
    # For damaged files, Pillow's decoders raise OSError, ValueError, SyntaxError, struct.error and other errors, so all
    # errors are caught.
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise BrokenImageError(" ".join((reason or str(error) or type(error).__name__).split())) from error
    return torch.from_numpy(pixels).permute(2, 0, 1)


def read_image(path: Path, bits: int | None, remedy: str) -> Tensor:
    """Decode an image file; see :func:`decode`.

    Args:
        path: Path of the file.
        bits: Number of bits that images with 16 bits per pixel use; None for 16.
        remedy: End of the error's text for a damaged file.

    Raises:
        ConfigurationError: The file is damaged, or a pixel needs more bits.
    """
    try:
        return decode(path, bits or 16)
    except BrokenImageError as error:
        raise ConfigurationError(f"broken image {path} ({error}): {remedy}") from None
    except PixelRangeError as error:
        raise ConfigurationError(f"{path}: {error}") from None


def bits_of(images: Sequence[Path]) -> int | None:
    """Return the number of bits that the images with 16 bits per pixel use: 8, 10, 12, 14 or 16.

    A camera with 12 bits writes values below 4096 into pixels of 16 bits. :data:`SAMPLE` evenly spaced files are read.
    The result is None if none of these has 16 bits per pixel. Damaged files are skipped.

    Raises:
        ConfigurationError: The images have 16 bits per colour, of which 14 or fewer are used. Pillow reads only the
            highest 8 bits of these files, so that few levels would remain.
    """
    largest: list[int] = []
    coloured: list[tuple[int, Path]] = []  # Largest value of the highest 8 bits, and path.
    for path in spaced(images):
        try:
            with Image.open(path) as image:
                if any(";16" in str(tile) for tile in image.tile) and image.mode in ("RGB", "RGBA"):
                    coloured.append((int(np.asarray(image.convert("RGB")).max(initial=0)), path))
                elif image.mode.startswith("I;16"):
                    largest.append(int(np.asarray(image).max(initial=0)))
        except Exception:  # Pillow raises errors of many classes. Training will name the file.
            continue
    if coloured and (level := max(coloured)[0]) < 64:
        raise ConfigurationError(
            f"{max(coloured)[1]} has 16 bits per colour, and all values in {len(coloured)} such images are below "
            f"{(level + 1) * 256}: only the highest 8 bits would be read, {level + 1} levels; convert the images to 8 "
            "bits per colour"
        )
    return _next(max(largest)) if largest else None


def checked_bits(bits: int | None) -> int | None:
    """Return ``bits``, the option of a data module.

    Raises:
        ConfigurationError: The number is not within 8 to 16.
    """
    if bits is not None and not 8 <= bits <= 16:
        raise ConfigurationError(f"bits={bits}: use 8 to 16, the bits that images with 16 bits per pixel use")
    return bits


def spaced(entries: Sequence[T]) -> list[T]:
    """Return :data:`SAMPLE` entries that are evenly spaced, or all if there are fewer."""
    if len(entries) <= SAMPLE:
        return [*entries]
    return [entries[number * len(entries) // SAMPLE] for number in range(SAMPLE)]


def _next(largest: int) -> int:
    return next(bits for bits in BITS if largest < 2**bits)


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
