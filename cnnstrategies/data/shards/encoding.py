"""Conversion of an image file to the file that is stored in a shard."""

import io
from dataclasses import dataclass

from PIL import Image

from cnnstrategies.data.decoding import decode
from cnnstrategies.data.shards.jpeg import read_header, restart_interval

ORIENTATION = 0x0112  # Number of the EXIF tag for the orientation of an image.
EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}


@dataclass(frozen=True)
class EncodingOptions:
    """Options of ``cnnstrategies pack``.

    Attributes:
        size: Largest shorter side of a packed image, in pixels, if images are converted to JPEG. Larger images are
            scaled down to this size. None keeps the sizes of all images.
        quality: JPEG quality, if images are converted to JPEG; None if they are not converted.
        shard_bytes: Approximate total size of the source files in a shard, in bytes.
        bits: Number of bits that images with 16 bits per pixel use; None if the packing finds it out.
    """

    size: int | None
    quality: int | None
    shard_bytes: int
    bits: int | None = None


@dataclass(frozen=True)
class Encoded:
    """Image file to store in a shard.

    Attributes:
        data: Content of the file.
        extension: Extension of the file's name.
        width: Width of the image in pixels, after its rotation according to the EXIF orientation.
        height: Height of the image in pixels, after this rotation.
        plain: Whether the file is a baseline JPEG that needs no rotation, so that a crop can be decoded without the
            rest of the image; see ``jpeg.py``.
    """

    data: bytes
    extension: str
    width: int
    height: int
    plain: bool


def encode(data: bytes, size: int | None, quality: int | None, bits: int | None = None) -> Encoded:
    """Convert an image file to the file to store in a shard.

    With a ``quality``, the image is converted to JPEG. Without it, a JPEG, PNG or WebP file is kept as it is, and a
    file in another format, or with 16 bits per pixel, becomes a PNG file with 8 bits. The image is decoded in any case,
    to detect damaged files.

    Args:
        data: Content of the file.
        size: Largest shorter side, in pixels, to which an image is scaled down before its conversion to JPEG; None
            keeps the size.
        quality: JPEG quality; None if the image is not converted to JPEG.
        bits: Number of bits that images with 16 bits per pixel use; None for 16.

    Raises:
        BrokenImageError: The image cannot be decoded.
        PixelRangeError: A pixel needs more bits.
    """
    pixels = decode(io.BytesIO(data), bits or 16)
    height, width = pixels.shape[1:]
    if quality is None:
        with Image.open(io.BytesIO(data)) as opened:
            extension = None if opened.mode.startswith("I;16") else EXTENSIONS.get(opened.format or "")
            turned = opened.getexif().get(ORIENTATION, 1) != 1
        if extension is None:  # PNG files are lossless, and usually smaller than BMP, TIFF and PNM files.
            file = io.BytesIO()
            Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(file, "PNG")
            return Encoded(file.getvalue(), "png", width, height, False)
        header = read_header(data)
        plain = header is not None and not turned and (header.width, header.height) == (width, height)
        return Encoded(data, extension, width, height, plain)
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    if size is not None and min(width, height) > size:
        shorter = size / min(width, height)
        image = image.resize(
            (max(size, round(width * shorter)), max(size, round(height * shorter))), Image.Resampling.LANCZOS
        )
    file = io.BytesIO()
    # With 4:2:0 subsampling and restart markers, a crop can be decoded without the rest of the image; see jpeg.py.
    interval = restart_interval(image)
    image.save(file, "JPEG", quality=quality, subsampling="4:2:0", optimize=True, restart_marker_blocks=interval)
    return Encoded(file.getvalue(), "jpg", *image.size, True)
