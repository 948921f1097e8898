"""Source of samples from shards: random or centre crops of images, which are read and decoded on request."""

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

MOST_OPEN = 256  # Largest number of shards that a process keeps open.
# Smallest fraction of an image's area in a random crop, and smallest and largest aspect ratio of the crop (Szegedy et
# al. 2015). These numbers and the number of attempts are the defaults of torchvision's `RandomResizedCrop`.
LEAST_AREA, RATIO = 0.08, (3 / 4, 4 / 3)
ATTEMPTS = 10
Sizes = npt.NDArray[np.int64]


class Crop(NamedTuple):
    """A crop of an image, in pixels, and whether the crop is flipped horizontally."""

    left: int
    top: int
    width: int
    height: int
    mirrored: bool


Crops = Callable[[Sizes, Sizes], list[Crop]]


def random_crops(widths: Sizes, heights: Sizes) -> list[Crop]:
    """Return a random crop for each image, with the distribution of torchvision's ``RandomResizedCrop``.

    A crop is flipped horizontally with probability 1/2. The random numbers come from torch's default generator, which
    is seeded for each batch.

    Args:
        widths: Width of each image, in pixels.
        heights: Height of each image, in pixels.
    """
    count = len(widths)
    area, ratio, left, top, mirror = torch.rand(5, ATTEMPTS, count, dtype=torch.float64).numpy()
    area = (LEAST_AREA + area * (1 - LEAST_AREA)) * widths * heights
    ratio = np.exp(np.log(RATIO[0]) + ratio * np.log(RATIO[1] / RATIO[0]))
    width, height = np.rint(np.sqrt(area * ratio)).astype(int), np.rint(np.sqrt(area / ratio)).astype(int)
    fits = (width > 0) & (width <= widths) & (height > 0) & (height <= heights)
    chosen = fits.argmax(0), np.arange(count)
    # If none of an image's random crops fits, take the largest centred crop with an allowed aspect ratio.
    fitting = fits[chosen]
    width = np.where(fitting, width[chosen], np.minimum(widths, np.rint(heights * RATIO[1]).astype(int)))
    height = np.where(fitting, height[chosen], np.minimum(heights, np.rint(widths / RATIO[0]).astype(int)))
    x = np.where(fitting, left[chosen] * (widths - width + 1), (widths - width) / 2).astype(int)
    y = np.where(fitting, top[chosen] * (heights - height + 1), (heights - height) / 2).astype(int)
    mirrored = mirror[0] < 0.5
    rows = np.stack([x, y, width, height], axis=1).tolist()
    return [Crop(row[0], row[1], row[2], row[3], bool(flip)) for row, flip in zip(rows, mirrored.tolist(), strict=True)]


def centre_crops(widths: Sizes, heights: Sizes, share: float) -> list[Crop]:
    """Return a centred square crop for each image.

    Args:
        widths: Width of each image, in pixels.
        heights: Height of each image, in pixels.
        share: Side of the square as a fraction of the image's shorter side.
    """
    side = np.maximum(1, np.rint(np.minimum(widths, heights) * share).astype(int))
    x, y = (widths - side) // 2, (heights - side) // 2
    rows = zip(x.tolist(), y.tolist(), side.tolist(), strict=True)
    return [Crop(left, top, width, width, False) for left, top, width in rows]


class ShardSource:
    """Source of samples from the shards of one split. Each image is read by a single ``pread``, cropped and resized.

    If the structure of a JPEG file allows it, only the part of the image around the crop is decoded; see ``jpeg.py``.

    Args:
        index: Index of the packed images.
        part: Packed images of the split.
        numbers: Numbers, within the split, of the images that belong to this source.
        crops: Function that takes the widths and the heights of images and returns a crop for each image.
        size: Height and width of the results, in pixels.
        decoder: Decoder for JPEG files: ``auto``, ``pillow`` or ``simplejpeg``.
        interpolation: Interpolation for resizing: ``bilinear`` or ``bicubic``.
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
        self.open_files: dict[int, io.FileIO] = {}  # Open shards; keys are the indices of the shards.

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for pickling, without open files, because a spawned process opens the shards again."""
        return {**vars(self), "open_files": {}}

    def __len__(self) -> int:
        return len(self.targets)

    def name(self, number: int) -> str:
        """Return the path that the image had in the folder that was packed."""
        return readable(os.fsdecode(self.columns["name"][number]))

    def fetch(self, indices: list[int]) -> Batch:
        """Read, decode, crop and resize the images at ``indices``.

        Returns:
            The images, uint8 (n, 3, size, size) in the memory format channels_last, and the images' classes.

        Raises:
            ConfigurationError: A shard cannot be read, or an image is damaged.
        """
        for number in indices:
            # Ask the operating system to read all images of the batch in the background, so that the reads overlap.
            shard, offset, length = self._place(number)
            os.posix_fadvise(self._file(shard), offset - TAR_BLOCK, TAR_BLOCK + length, os.POSIX_FADV_WILLNEED)
        crops = self.crops(*(self.columns[name][indices].astype(np.int64) for name in ("width", "height")))
        images = torch.empty(len(indices), self.size, self.size, 3, dtype=torch.uint8).permute(0, 3, 1, 2)
        for number, crop, image in zip(indices, crops, images, strict=True):
            try:
                self._show(number, self.read(number), crop, image)
            except BrokenImageError as error:
                raise ConfigurationError(
                    f"broken image {self.name(number)} in {self._path(number)} ({error}): run `cnnstrategies pack "
                    f"--check {self.paths[0].parent}` to find damaged shards, and copy them again, or pack again"
                ) from None
        return images, self.targets[indices]

    def read(self, number: int) -> bytes:
        """Read the file of an image, by one ``pread``.

        Raises:
            ConfigurationError: The shard is truncated, or was not written together with the index.
        """
        shard, offset, length = self._place(number)
        # Read the tar header before the file as well, because the header contains the packing id.
        content = os.pread(self._file(shard), TAR_BLOCK + length, offset - TAR_BLOCK)
        if len(content) < TAR_BLOCK + length:
            raise ConfigurationError(
                f"{self._path(number)} is truncated: it ends within {self.name(number)}; copy it again, or pack again"
            )
        if content[TAR_OWNER] != self.owner:
            raise ConfigurationError(
                f"{self._path(number)} was not written together with {INDEX}: copy all files of the same "
                "`cnnstrategies pack` run, or pack again"
            )
        return content[TAR_BLOCK:]

    def _show(self, number: int, data: bytes, crop: Crop, out: Tensor) -> None:
        """Decode a crop of an image, and write the resized crop to ``out`` (3, H, W)."""
        header = jpeg.read_header(data) if self.columns["plain"][number] else None
        left, top, width, height = crop[:4]
        if header is None:
            pixels, scale = decode(io.BytesIO(data)).permute(1, 2, 0), 1
        else:
            shown = jpeg.cut(data, header, left, top, left + width, top + height)
            scale = next((factor for factor in SCALES if min(width, height) >= factor * self.size), 1)
            pixels = self.decode_jpeg(shown, scale)
            left, top = left - shown.left, top - shown.top
            if pixels.shape[:2] == (shown.height, shown.width):
                scale = 1  # The decoder has ignored `scale` and returned the full size.
        left, top, width, height = (round(pixel / scale) for pixel in (left, top, width, height))
        part = pixels[top : top + height, left : left + width].permute(2, 0, 1)[None]
        if part.shape[2:] != out.shape[1:]:
            # torch has a fast kernel for uint8 tensors in channels_last format, but does not recognise this format in
            # a slice. The slice is therefore copied.
            part = part.contiguous(memory_format=torch.channels_last)
            part = F.interpolate(part, out.shape[1:], mode=self.interpolation, antialias=True)
        out.copy_((part.flip(-1) if crop.mirrored else part)[0])

    def _place(self, number: int) -> tuple[int, int, int]:
        """Return the index of an image's shard, and the image file's offset and length in the shard, in bytes."""
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
                    f"cannot read {self.paths[shard]} ({error.strerror}): give this user read permission, or copy the "
                    "file again"
                ) from None
        return self.open_files[shard].fileno()
