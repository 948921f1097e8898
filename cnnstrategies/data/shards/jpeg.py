"""Decoding of a crop of a JPEG file without decoding the whole image.

A baseline JPEG consists of rows of small rectangles, the minimum coded units (called units here; ITU-T T.81 section
A.2). The decoding of a unit depends on the units before it. If the height in the header is reduced, a decoder skips the
units below a crop. Units after a restart marker do not depend on the units before the marker. In a file with restart
markers, the units around a crop can therefore be copied to a new, smaller JPEG file.
"""

import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cnnstrategies.data.decoding import BrokenImageError
from cnnstrategies.errors import ConfigurationError

BASELINE = (0xC0, 0xC1)
OTHER_FRAMES = {*range(0xC2, 0xD0)} - {0xC4, 0xC8, 0xCC}
SCAN, RESTART_INTERVAL = 0xDA, 0xDD
ALONE = {0x01, *range(0xD0, 0xD9)}  # Codes of the JPEG markers that are not followed by a segment.
RESTARTS = [bytes((0xFF, 0xD0 + number)) for number in range(8)]
END = b"\xff\xd9"
# Number of pixels around a crop that are decoded as well. Decoders interpolate colours between neighbouring pixels, so
# pixels at the border of a smaller JPEG can differ from those of the whole JPEG.
MARGIN = 2
DecoderName = Literal["auto", "pillow", "simplejpeg"]
SCALES = (8, 4, 2)  # Factors by which a decoder can scale a JPEG down while it decodes, which saves time.


@dataclass(frozen=True)
class JpegHeader:
    """Header of a baseline JPEG with three components.

    Attributes:
        frame: Offset of the frame header in the file, in bytes.
        width: Width of the image, in pixels.
        height: Height of the image, in pixels.
        unit_width: Width of a unit, in pixels.
        unit_height: Height of a unit, in pixels.
        interval: Number of units between two restart markers; 0 if the file has no restart markers.
        data: Offset of the first compressed unit in the file, in bytes.
    """

    frame: int
    width: int
    height: int
    unit_width: int
    unit_height: int
    interval: int
    data: int

    @property
    def columns(self) -> int:
        """Number of units in a row."""
        return -(-self.width // self.unit_width)


@dataclass(frozen=True)
class Cut:
    """JPEG file with a rectangle of a larger JPEG image.

    Attributes:
        data: Content of the file.
        left: Column of the larger image at which the rectangle begins, in pixels.
        top: Row of the larger image at which the rectangle begins, in pixels.
        width: Width of the rectangle, in pixels.
        height: Height of the rectangle, in pixels.
        exact: Whether the file ends with the last unit of the rectangle. Otherwise it has more data, which a decoder
            ignores.
    """

    data: bytes
    left: int
    top: int
    width: int
    height: int
    exact: bool


def read_header(data: bytes) -> JpegHeader | None:
    """Return the header of a JPEG file.

    The result is None if the file is not a baseline JPEG with three components in one scan.
    """
    if data[:2] != b"\xff\xd8":
        return None
    at, interval, frame = 2, 0, 0
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF or marker in ALONE:
            at += 1 if marker == 0xFF else 2
            continue
        length = int.from_bytes(data[at + 2 : at + 4])
        if marker in OTHER_FRAMES:
            return None
        if marker in BASELINE:
            frame = at
        elif marker == RESTART_INTERVAL:
            interval = int.from_bytes(data[at + 4 : at + 6])
        elif marker == SCAN:
            if not frame or data[frame + 9] != 3 or data[at + 4] != 3 or data[frame + 4] != 8:
                return None
            height, width = (int.from_bytes(data[frame + p : frame + p + 2]) for p in (5, 7))
            factors = [data[frame + 11 + 3 * component] for component in range(3)]
            unit_width, unit_height = 8 * max(f >> 4 for f in factors), 8 * max(f & 15 for f in factors)
            return (
                JpegHeader(frame, width, height, unit_width, unit_height, interval, at + 2 + length) if height else None
            )
        at += 2 + length
    return None


def cut(data: bytes, header: JpegHeader, left: int, top: int, right: int, bottom: int) -> Cut:
    """Return the smallest JPEG that contains a crop, by copying compressed data without decoding it.

    The crop has exactly the same pixels as in the whole JPEG. The result usually contains more pixels than the crop.

    Args:
        data: Content of the whole JPEG file.
        header: Header of the whole JPEG.
        left: First column of the crop, in pixels.
        top: First row of the crop, in pixels.
        right: Column after the last column of the crop, in pixels.
        bottom: Row after the last row of the crop, in pixels.
    """
    rows = -(-header.height // header.unit_height)
    last = min(rows, -(-(bottom + MARGIN) // header.unit_height))
    height = min(header.height, last * header.unit_height)
    if not header.interval or header.columns % header.interval:
        if last == rows:
            return Cut(data, 0, 0, header.width, header.height, True)
        return Cut(_resized(data[: header.data], header, header.width, height) + data[header.data :],
                   0, 0, header.width, height, False)  # fmt: skip
    step = header.interval * header.unit_width
    in_row = header.columns // header.interval
    first = max(0, top - MARGIN) // header.unit_height
    begin, end = max(0, left - MARGIN) // step, min(in_row, -(-(right + MARGIN) // step))
    x, y = begin * step, first * header.unit_height
    width, height = min(header.width, end * step) - x, height - y
    starts, ends = _intervals(data, header.data)
    if len(starts) != in_row * rows:
        return Cut(data, 0, 0, header.width, header.height, True)  # The file is damaged. The decoder reports the error.
    chosen = [place for row in range(first, last) for place in range(row * in_row + begin, row * in_row + end)]
    pieces = [_resized(data[: header.data], header, width, height)]
    for place, restart in zip(chosen, itertools.cycle(RESTARTS)):  # `strict` would fail, because the cycle is infinite.
        pieces += data[starts[place] : ends[place]], restart
    pieces[-1] = END
    return Cut(b"".join(pieces), x, y, width, height, True)


def restart_interval(image: Image.Image) -> int:
    """Return the number of units between two restart markers, for packing an image with 4:2:0 subsampling.

    The result is 2 or 3 if this number divides the number of units in a row, and otherwise 1. With more markers,
    smaller rectangles can be copied from the file, but each marker takes about four bytes.
    """
    columns = -(-image.width // 16)
    return next(count for count in (2, 3, 1) if columns % count == 0)


def _resized(head: bytes, header: JpegHeader, width: int, height: int) -> bytes:
    changed = bytearray(head)
    changed[header.frame + 5 : header.frame + 9] = height.to_bytes(2) + width.to_bytes(2)
    return bytes(changed)


def _intervals(data: bytes, start: int) -> tuple[list[int], list[int]]:
    """Return the offsets, in bytes, at which the intervals between restart markers begin and end."""
    values = np.frombuffer(data, np.uint8)
    markers = np.flatnonzero(values[start:-1] == 0xFF) + start
    markers = markers[(values[markers + 1] & 0xF8) == 0xD0]
    return [start, *(markers + 2).tolist()], [*markers.tolist(), len(data) - len(END)]


# Function that decodes a JPEG, scales it down by a factor, and returns uint8 (H, W, 3).
Decoder = Callable[[Cut, int], Tensor]


def find_decoder(name: DecoderName) -> Decoder:
    """Return the decoder for JPEG files that the option ``decoder`` selects.

    Raises:
        ConfigurationError: The decoder is not installed.
    """
    installed = importlib.util.find_spec("simplejpeg") is not None
    if name == "simplejpeg" and not installed:
        raise ConfigurationError(
            "decoder=simplejpeg needs the package simplejpeg: pip install simplejpeg, or use decoder=pillow"
        )
    return _simplejpeg if installed and name != "pillow" else _pillow


def _pillow(jpeg: Cut, scale: int) -> Tensor:
    size = -(-jpeg.width // scale), -(-jpeg.height // scale)
    try:
        # `frombytes` is faster than `Image.open`, which would parse the header again.
        image = Image.frombytes("RGB", size, jpeg.data, "jpeg", ("RGB", "", scale, 0))
    except (ValueError, OSError) as error:
        raise BrokenImageError(str(error)) from error
    return torch.from_numpy(np.array(image))


def _simplejpeg(jpeg: Cut, scale: int) -> Tensor:
    import simplejpeg

    height, width = -(-jpeg.height // scale), -(-jpeg.width // scale)
    least = {"min_height": height, "min_width": width, "min_factor": scale} if scale > 1 else {}
    try:
        # If the file has more data after the last unit, the decoder warns. `strict` would turn the warning into an
        # error, so it is set only for files without such data.
        return torch.from_numpy(simplejpeg.decode_jpeg(jpeg.data, strict=jpeg.exact, **least))
    except ValueError as error:
        raise BrokenImageError(str(error)) from error
