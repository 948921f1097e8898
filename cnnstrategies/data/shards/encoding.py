"""An image as it goes into a shard: as it is, or shrunk and encoded anew."""

import io
from dataclasses import dataclass

from PIL import Image
from torch import Tensor

from cnnstrategies.data.decoding import decode
from cnnstrategies.data.shards.jpeg import read_header, restart_interval

ORIENTATION = 0x0112  # EXIF
EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}


@dataclass(frozen=True)
class Encoded:
    """An image in a shard.

    Attributes:
        data: Its file.
        extension: That of the file.
        width: When shown upright.
        height: When shown upright.
        plain: Whether it is a JPEG whose header says all that decoding needs.
        original: Height and width before it was shrunk.
    """

    data: bytes
    extension: str
    width: int
    height: int
    plain: bool
    original: tuple[int, int]


def encode(data: bytes, size: int | None, quality: int | None) -> Encoded:
    """Look at an image, and make it what is packed.

    Args:
        data: Its file.
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
            return Encoded(file.getvalue(), "png", width, height, False, (height, width))
        header = read_header(data)
        plain = header is not None and not turned and (header.width, header.height) == (width, height)
        return Encoded(data, extension, width, height, plain, (height, width))
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
    return Encoded(file.getvalue(), "jpg", *image.size, True, (height, width))


def encode_mask(mask: Tensor, width: int, height: int) -> bytes:
    """A mask as a PNG file of grey values, which loses nothing.

    Args:
        mask: Its classes (H, W).
        width: That it becomes: of each pixel, the class of the nearest one.
        height: Likewise.
    """
    image = Image.fromarray(mask.numpy())
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.NEAREST)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
