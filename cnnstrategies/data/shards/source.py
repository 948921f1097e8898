"""Source of images in shards: choosing a rectangle of each image, reading it and decoding it."""

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
LEAST_AREA, RATIO = 0.08, (3 / 4, 4 / 3)  # Szegedy et al. 2015. Like the ten attempts, they are torchvision's defaults.
ATTEMPTS = 10
Sizes = npt.NDArray[np.int64]


class Crop(NamedTuple):
    """A rectangle of an image, in pixels, and whether it is mirrored."""

    left: int
    top: int
    width: int
    height: int
    mirrored: bool


Crops = Callable[[Sizes, Sizes], list[Crop]]


def random_crops(widths: Sizes, heights: Sizes) -> list[Crop]:
    """Return a random rectangle for each image, as torchvision's ``RandomResizedCrop`` draws them; half are mirrored.

    The numbers come from torch's default generator, so the seed of a batch determines its crops.

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
    # If no attempt fits, the crop is the largest centred rectangle with an allowed shape.
    fitting = fits[chosen]
    width = np.where(fitting, width[chosen], np.minimum(widths, np.rint(heights * RATIO[1]).astype(int)))
    height = np.where(fitting, height[chosen], np.minimum(heights, np.rint(widths / RATIO[0]).astype(int)))
    x = np.where(fitting, left[chosen] * (widths - width + 1), (widths - width) / 2).astype(int)
    y = np.where(fitting, top[chosen] * (heights - height + 1), (heights - height) / 2).astype(int)
    mirrored = mirror[0] < 0.5
    rows = np.stack([x, y, width, height], axis=1).tolist()
    return [Crop(row[0], row[1], row[2], row[3], bool(flip)) for row, flip in zip(rows, mirrored.tolist(), strict=True)]


def centre_crops(widths: Sizes, heights: Sizes, share: float) -> list[Crop]:
    """Return a centred square for each image, with a side of ``share`` of the image's shorter side."""
    side = np.maximum(1, np.rint(np.minimum(widths, heights) * share).astype(int))
    x, y = (widths - side) // 2, (heights - side) // 2
    rows = zip(x.tolist(), y.tolist(), side.tolist(), strict=True)
    return [Crop(left, top, width, width, False) for left, top, width in rows]


class ShardSource:
    """Source of images of one part: each image is read by a single ``pread``, cropped and resized.

    Only the part of a JPEG that the crop needs is decoded, as far as the structure and the size of the JPEG allow.

    Args:
        index: Index of the packed images.
        part: Part of the images.
        numbers: Numbers of the part's images that belong to this source.
        crops: Function from widths and heights of images to a crop for each image.
        size: Height and width of the results.
        decoder: Name of the decoder for JPEG files.
        interpolation: Interpolation of the resizing.
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
        """Return the state without open files, because a spawned process opens its own."""
        return {**vars(self), "open_files": {}}

    def __len__(self) -> int:
        return len(self.targets)

    def name(self, number: int) -> str:
        """Return the image's name in the packed folder."""
        return readable(os.fsdecode(self.columns["name"][number]))

    def fetch(self, indices: list[int]) -> Batch:
        """Read, decode, crop and resize the images at ``indices``.

        Returns:
            uint8 (n, 3, size, size), with the channels innermost in memory, and the images' classes.

        Raises:
            ConfigurationError: A shard cannot be read, or an image is damaged.
        """
        for number in indices:
            # The operating system starts to read all images in the background, so that waits for the storage overlap.
            shard, offset, length = self._place(number)
            os.posix_fadvise(self._file(shard), offset - TAR_BLOCK, TAR_BLOCK + length, os.POSIX_FADV_WILLNEED)
        crops = self.crops(*(self.columns[name][indices].astype(np.int64) for name in ("width", "height")))
        images = torch.empty(len(indices), self.size, self.size, 3, dtype=torch.uint8).permute(0, 3, 1, 2)
        for number, crop, image in zip(indices, crops, images, strict=True):
            try:
                self._show(number, self.read(number), crop, image)
            except BrokenImageError as error:
                raise ConfigurationError(
                    f"broken image {self.name(number)} in {self._path(number)} ({error}): find damaged shards with "
                    f"`cnnstrategies pack --check {self.paths[0].parent}`, and copy them again, or pack again"
                ) from None
        return images, self.targets[indices]

    def read(self, number: int) -> bytes:
        """Read the file of an image, by one ``pread``.

        Raises:
            ConfigurationError: The shard is truncated or belongs to another packing.
        """
        shard, offset, length = self._place(number)
        # The read includes the tar header before the file, which names the packing.
        content = os.pread(self._file(shard), TAR_BLOCK + length, offset - TAR_BLOCK)
        if len(content) < TAR_BLOCK + length:
            raise ConfigurationError(
                f"{self._path(number)} is truncated: it ends within {self.name(number)}; copy it again, or pack again"
            )
        if content[TAR_OWNER] != self.owner:
            raise ConfigurationError(
                f"{self._path(number)} belongs to another packing than {INDEX}: copy all files of one packing, or pack "
                "again"
            )
        return content[TAR_BLOCK:]

    def _show(self, number: int, data: bytes, crop: Crop, out: Tensor) -> None:
        """Decode a rectangle of an image, and resize it into ``out`` (3, H, W)."""
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
                scale = 1  # Not every decoder can shrink an image.
        left, top, width, height = (round(pixel / scale) for pixel in (left, top, width, height))
        part = pixels[top : top + height, left : left + width].permute(2, 0, 1)[None]
        if part.shape[2:] != out.shape[1:]:
            # torch has a fast kernel for bytes with the channels innermost, but does not see that a slice has this
            # layout.
            part = part.contiguous(memory_format=torch.channels_last)
            part = F.interpolate(part, out.shape[1:], mode=self.interpolation, antialias=True)
        out.copy_((part.flip(-1) if crop.mirrored else part)[0])

    def _place(self, number: int) -> tuple[int, int, int]:
        """Return the shard of an image, the offset of its first byte, and the number of its bytes."""
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
                    f"cannot read {self.paths[shard]} ({error.strerror}): grant the right to read it, or copy it again"
                ) from None
        return self.open_files[shard].fileno()
