"""What an image becomes in a shard."""

import io
from dataclasses import dataclass

from PIL import Image

from cnnstrategies.data.decoding import decode
from cnnstrategies.data.shards.jpeg import read_header, restart_interval

ORIENTATION = 0x0112  # EXIF
EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}


@dataclass(frozen=True)
class EncodingOptions:
    """How images are packed.

    Attributes:
        size: The shorter side to which larger images are shrunk; None leaves sizes as they are.
        quality: Of the JPEG files that images become; None leaves files as they are.
        shard_bytes: About the size of a shard, in bytes of the source.
    """

    size: int | None
    quality: int | None
    shard_bytes: int


@dataclass(frozen=True)
class Encoded:
    """An image in a shard.

    Attributes:
        width: When shown upright.
        plain: Whether it is a JPEG whose header says all that decoding needs.
    """

    data: bytes
    extension: str
    width: int
    height: int
    plain: bool


def encode(data: bytes, size: int | None, quality: int | None) -> Encoded:
    """Look at an image, and make it what is packed.

    Args:
        size: The shorter side to shrink it to; a smaller image keeps its size, and None every image.
        quality: Of the JPEG that it becomes; None leaves the file as it is.

    Raises:
        BrokenImageError: It cannot be decoded.
    """
    pixels = decode(io.BytesIO(data))
    height, width = pixels.shape[1:]
    if quality is None:
        with Image.open(io.BytesIO(data)) as opened:
            extension = EXTENSIONS.get(opened.format or "")
            turned = opened.getexif().get(ORIENTATION, 1) != 1
        if extension is None:  # A PNG file loses nothing, and is smaller than BMP, TIFF and PNM.
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
    # Of 4:2:0 and with restart markers, which let a reader decode no more than a crop; see jpeg.py.
    interval = restart_interval(image)
    image.save(file, "JPEG", quality=quality, subsampling="4:2:0", optimize=True, restart_marker_blocks=interval)
    return Encoded(file.getvalue(), "jpg", *image.size, True)
