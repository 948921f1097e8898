"""Images of shards, as a data module's source: which rectangle of each is shown, and how that is read and decoded."""

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from cnnstrategies.data.decoding import BrokenImageError, decode
from cnnstrategies.data.folders import readable
from cnnstrategies.data.loading import Batch
from cnnstrategies.data.shards import jpeg
from cnnstrategies.data.shards.index import INDEX, TAR_BLOCK, TAR_OWNER, Index, ShardedPart
from cnnstrategies.data.shards.jpeg import SCALES, DecoderName, find_decoder
from cnnstrategies.errors import ConfigurationError

MOST_OPEN = 256  # Shards that a process has open.
LEAST_AREA, RATIO = 0.08, (3 / 4, 4 / 3)  # Szegedy et al. 2015; torchvision's defaults, as are the ten attempts.
ATTEMPTS = 10
Sizes = npt.NDArray[np.int64]


class Crop(NamedTuple):
    """A rectangle, and whether it is shown mirrored."""

    left: int
    top: int
    width: int
    height: int
    mirrored: bool


Crops = Callable[[Sizes, Sizes], list[Crop]]


def random_crops(widths: Sizes, heights: Sizes) -> list[Crop]:
    """Rectangles of random size, shape and place as torchvision's ``RandomResizedCrop`` draws them, half mirrored.

    From torch's own generator: what seeds a batch seeds its crops. Sizes are those of the images, in pixels.
    """
    count = len(widths)
    area, ratio, left, top, mirror = torch.rand(5, ATTEMPTS, count, dtype=torch.float64).numpy()
    area = (LEAST_AREA + area * (1 - LEAST_AREA)) * widths * heights
    ratio = np.exp(np.log(RATIO[0]) + ratio * np.log(RATIO[1] / RATIO[0]))
    width, height = np.rint(np.sqrt(area * ratio)).astype(int), np.rint(np.sqrt(area / ratio)).astype(int)
    fits = (width > 0) & (width <= widths) & (height > 0) & (height <= heights)
    chosen = fits.argmax(0), np.arange(count)
    # Where none fits: the largest rectangle in the middle whose shape is allowed.
    found = fits[chosen]
    width = np.where(found, width[chosen], np.minimum(widths, np.rint(heights * RATIO[1]).astype(int)))
    height = np.where(found, height[chosen], np.minimum(heights, np.rint(widths / RATIO[0]).astype(int)))
    x = np.where(found, left[chosen] * (widths - width + 1), (widths - width) / 2).astype(int)
    y = np.where(found, top[chosen] * (heights - height + 1), (heights - height) / 2).astype(int)
    mirrored = mirror[0] < 0.5
    rows = np.stack([x, y, width, height], axis=1).tolist()
    return [Crop(row[0], row[1], row[2], row[3], bool(flip)) for row, flip in zip(rows, mirrored.tolist(), strict=True)]


def centre_crops(widths: Sizes, heights: Sizes, share: float) -> list[Crop]:
    """Squares in the middle that cover a share of the shorter side."""
    side = np.maximum(1, np.rint(np.minimum(widths, heights) * share).astype(int))
    x, y = (widths - side) // 2, (heights - side) // 2
    rows = zip(x.tolist(), y.tolist(), side.tolist(), strict=True)
    return [Crop(left, top, width, width, False) for left, top, width in rows]


class ShardSource:
    """Images of one part, each read by a single ``pread`` and cropped and resized.

    Of a JPEG only what the crop needs is decoded, as far as its structure and its size allow.

    Args:
        numbers: Those of the part that this source has.
    """

    def __init__(
        self,
        index: Index,
        part: ShardedPart,
        numbers: npt.NDArray[np.int64],
        crops: Crops,
        size: int,
        decoder: DecoderName,
        interpolation: str = "bilinear",
    ) -> None:
        self.paths = [index.root / shard.file for shard in part.shards]
        self.owner = index.packing.encode()
        self.columns = {name: column[numbers] for name, column in part.columns.items()}
        self.targets = torch.from_numpy(self.columns["target"].astype(np.int64))
        self.crops = crops
        self.size = size
        self.decoder = decoder
        self.interpolation = interpolation
        self.decode_jpeg = find_decoder(decoder)
        self.open_files: dict[int, io.FileIO] = {}  # By shard.

    def __getstate__(self) -> dict[str, Any]:
        """Leave open files behind: a spawned process has its own."""
        return {**vars(self), "open_files": {}}

    def __len__(self) -> int:
        return len(self.targets)

    def name(self, number: int) -> str:
        """The image's name in what was packed."""
        return readable(os.fsdecode(self.columns["name"][number]))

    def fetch(self, indices: list[int]) -> Batch:
        """Read, decode, crop and resize the images at ``indices``.

        Returns:
            uint8 (n, 3, size, size), the channels innermost in memory, and their classes.
        """
        for number in indices:
            # The system reads in the background what will be read: all wait for the storage together.
            shard, offset, length = self._place(number)
            os.posix_fadvise(self._file(shard), offset - TAR_BLOCK, TAR_BLOCK + length, os.POSIX_FADV_WILLNEED)
        crops = self.crops(*(self.columns[name][indices].astype(np.int64) for name in ("width", "height")))
        images = torch.empty(len(indices), self.size, self.size, 3, dtype=torch.uint8).permute(0, 3, 1, 2)
        for number, crop, image in zip(indices, crops, images, strict=True):
            try:
                self._show(number, self.read(number), crop, image)
            except BrokenImageError as error:
                raise ConfigurationError(
                    f"broken image {self.name(number)} in {self._path(number)} ({error}): `cnnstrategies pack --check "
                    f"{self.paths[0].parent}` finds damaged shards; copy them again, or pack again"
                ) from None
        return images, self.targets[indices]

    def read(self, number: int) -> bytes:
        """The file of an image, by one ``pread``."""
        shard, offset, length = self._place(number)
        # With the entry's header before it, which says whose it is.
        content = os.pread(self._file(shard), TAR_BLOCK + length, offset - TAR_BLOCK)
        if len(content) < TAR_BLOCK + length:
            raise ConfigurationError(
                f"{self._path(number)} is truncated: it ends within {self.name(number)}; copy it again, or pack again"
            )
        if content[TAR_OWNER] != self.owner:
            raise ConfigurationError(
                f"{self._path(number)} is not of the packing that {INDEX} describes: it is an index of other shards; "
                "copy all files of one packing, or pack again"
            )
        return content[TAR_BLOCK:]

    def _show(self, number: int, data: bytes, crop: Crop, out: Tensor) -> None:
        """Decode a rectangle of an image, and bring it to the size of ``out`` (3, H, W)."""
        header = jpeg.read_header(data) if self.columns["plain"][number] else None
        left, top, width, height = crop[:4]
        if header is None:
            pixels, scale = decode(io.BytesIO(data)).permute(1, 2, 0), 1
        else:
            shown = jpeg.cut(data, header, left, top, left + width, top + height)
            scale = next((one for one in SCALES if min(width, height) >= one * self.size), 1)
            pixels = self.decode_jpeg(shown, scale)
            left, top = left - shown.left, top - shown.top
            if pixels.shape[:2] == (shown.height, shown.width):
                scale = 1  # Not every decoder shrinks.
        left, top, width, height = (round(one / scale) for one in (left, top, width, height))
        part = pixels[top : top + height, left : left + width].permute(2, 0, 1)[None]
        if part.shape[2:] != out.shape[1:]:
            # Of bytes with the channels innermost there is a fast kernel; a slice is not seen to have them so.
            part = part.contiguous(memory_format=torch.channels_last)
            part = F.interpolate(part, out.shape[1:], mode=self.interpolation, antialias=True)
        out.copy_((part.flip(-1) if crop.mirrored else part)[0])

    def _place(self, number: int) -> tuple[int, int, int]:
        """The shard of an image, its first byte there and how many they are."""
        shard, offset, length = (int(self.columns[name][number]) for name in ("shard", "offset", "length"))
        return shard, offset, length

    def _path(self, number: int) -> Path:
        return self.paths[int(self.columns["shard"][number])]

    def _file(self, shard: int) -> int:
        if shard not in self.open_files:
            if len(self.open_files) >= MOST_OPEN:
                self.open_files.pop(next(iter(self.open_files))).close()
            try:
                self.open_files[shard] = io.FileIO(self.paths[shard])
            except OSError as error:
                raise ConfigurationError(
                    f"cannot read {self.paths[shard]} ({error.strerror}): give the right to it, or copy it again"
                ) from None
        return self.open_files[shard].fileno()
