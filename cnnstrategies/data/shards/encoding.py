"""Encoding of an image for a shard."""

import io
from dataclasses import dataclass

from PIL import Image

from cnnstrategies.data.decoding import decode
from cnnstrategies.data.shards.jpeg import read_header, restart_interval

ORIENTATION = 0x0112  # EXIF
EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}


@dataclass(frozen=True)
class EncodingOptions:
    """Options for packing images.

    Attributes:
        size: Shorter side to which larger images are shrunk; None keeps the sizes.
        quality: Quality of the JPEG files that images are converted to; None keeps the files.
        shard_bytes: Approximate size of a shard, in bytes of the source.
    """

    size: int | None
    quality: int | None
    shard_bytes: int


@dataclass(frozen=True)
class Encoded:
    """An encoded image.

    Attributes:
        data: Content of the file.
        extension: Extension of the file.
        width: Width of the upright image.
        height: Height of the upright image.
        plain: Whether the image is an upright baseline JPEG, of which a part can be decoded; see ``jpeg.py``.
    """

    data: bytes
    extension: str
    width: int
    height: int
    plain: bool


def encode(data: bytes, size: int | None, quality: int | None) -> Encoded:
    """Decode an image file, and encode the image for a shard.

    Args:
        data: Content of the file.
        size: Shorter side to which a larger image is shrunk; None keeps the size.
        quality: Quality of the JPEG file that the image is converted to; None keeps the file.

    Raises:
        BrokenImageError: The image cannot be decoded.
    """
    pixels = decode(io.BytesIO(data))
    height, width = pixels.shape[1:]
    if quality is None:
        with Image.open(io.BytesIO(data)) as opened:
            extension = EXTENSIONS.get(opened.format or "")
            turned = opened.getexif().get(ORIENTATION, 1) != 1
        if extension is None:  # PNG is lossless, and smaller than BMP, TIFF and PNM.
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
    # With 4:2:0 and restart markers a reader can decode a crop alone; see jpeg.py.
    interval = restart_interval(image)
    image.save(file, "JPEG", quality=quality, subsampling="4:2:0", optimize=True, restart_marker_blocks=interval)
    return Encoded(file.getvalue(), "jpg", *image.size, True)
