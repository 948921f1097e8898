"""Images of shards, as a data module's source."""

import contextlib
import io
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from cnnstrategies.data.decoding import BrokenImageError, decode, fitted, read_mask
from cnnstrategies.data.folders import readable
from cnnstrategies.data.loading import Batch
from cnnstrategies.data.sampling import WINDOW
from cnnstrategies.data.shards import jpeg
from cnnstrategies.data.shards.crops import Crop, Sizes
from cnnstrategies.data.shards.index import INDEX, TAR_BLOCK, TAR_OWNER, Index, Part
from cnnstrategies.data.shards.jpeg import SCALES, DecoderName, find_decoder
from cnnstrategies.errors import ConfigurationError

MOST_OPEN = 256  # Shards that a process has open.
MOST_ASKED = 4 * WINDOW  # Blocks that have been asked for and may still be in memory.
Crops = Callable[[Sizes, Sizes], list[Crop]]


class ShardSource:
    """Images of one part, each read by a single ``pread`` and cropped and resized.

    Of a JPEG only what the crop needs is decoded, as far as its structure and its size allow.

    Args:
        index: Of the shards.
        part: Which images.
        numbers: Those of the part that this source has.
        crops: Gives the rectangles of a batch.
        size: Height and width of the results.
        decoder: Of JPEG files.
        block: Images that are asked for from storage together, where that is slow; None leaves it to the storage.
        interpolation: ``bilinear`` or ``bicubic``.

    Attributes:
        decode_jpeg: The decoder.
        open_files: Descriptors of this process, by the numbers of their shards.
    """

    def __init__(
        self,
        index: Index,
        part: Part,
        numbers: npt.NDArray[np.int64],
        crops: Crops,
        size: int,
        decoder: DecoderName,
        block: int | None = None,
        interpolation: str = "bilinear",
    ) -> None:
        self.paths = [index.root / shard.file for shard in part.shards]
        self.owner = index.packing.encode()
        self.columns = {name: column[numbers] for name, column in part.columns.items()}
        self.targets = torch.from_numpy(self.columns["target"].astype(np.int64))
        self.crops = crops
        self.size = size
        self.decoder = decoder
        self.block = block
        self.interpolation = interpolation
        self.decode_jpeg = find_decoder(decoder)
        self._open_anew()

    def __getstate__(self) -> dict[str, Any]:
        """Leave open files behind: a spawned process has its own."""
        return {name: value for name, value in vars(self).items() if name not in ("open_files", "_asked", "_close")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open_anew()

    def __len__(self) -> int:
        return len(self.targets)

    def name(self, number: int) -> str:
        """The image's name in what was packed."""
        return readable(os.fsdecode(self.columns["name"][number]))

    def fetch(self, indices: list[int]) -> Batch:
        """Read, decode, crop and resize the images at ``indices``.

        Returns:
            uint8 (n, 3, size, size), the channels innermost in memory, and their classes.

        Raises:
            ConfigurationError: One cannot be read.
        """
        self.ask_ahead(indices)
        images = torch.empty(len(indices), self.size, self.size, 3, dtype=torch.uint8).permute(0, 3, 1, 2)
        for number, crop, image in zip(indices, self.chosen_crops(indices), images, strict=True):
            with self.names_broken(number):
                self.show(number, self.read(number), crop, image)
        return images, self.targets[indices]

    def chosen_crops(self, indices: list[int]) -> list[Crop]:
        """The rectangles of a batch."""
        return self.crops(*(self.columns[name][indices].astype(np.int64) for name in ("width", "height")))

    @contextlib.contextmanager
    def names_broken(self, number: int) -> Iterator[None]:
        """Turn a broken image into an error that says which it is."""
        try:
            yield
        except BrokenImageError as error:
            raise ConfigurationError(
                f"broken image {self.name(number)} in {self._path(number)} ({error}): `cnnstrategies pack --check "
                f"{self.paths[0].parent}` finds damaged shards; copy them again, or pack again"
            ) from None

    def read(self, number: int, behind: int = 0) -> bytes:
        """The file of an image, by one ``pread``.

        Args:
            number: Of the image.
            behind: Bytes that follow it in the shard, to be read with it.

        Raises:
            ConfigurationError: The shard ends before it, or is of another packing.
        """
        shard, offset, length = self._place(number)
        length += behind
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

    def ask_ahead(self, indices: list[int]) -> None:
        """Have the system read in the background what will be read.

        The images of a batch, so that they wait for the storage together and not one after the other; or whole
        blocks, in order, when the first of their images comes.
        """
        if self.block is None:
            for index in indices:
                shard, offset, length = self._place(index)
                os.posix_fadvise(self._file(shard), offset - TAR_BLOCK, TAR_BLOCK + length, os.POSIX_FADV_WILLNEED)
            return
        for block in sorted({index // self.block for index in indices}):
            if self._asked.pop(block, False):
                self._asked[block] = True  # Now the latest.
                continue
            self._asked[block] = True
            numbers = range(block * self.block, min(len(self), (block + 1) * self.block))
            first, begin, _ = self._place(numbers[0])
            last, offset, length = self._place(numbers[-1])
            for shard in range(first, last + 1):
                start = begin if shard == first else 0
                count = offset + length - start if shard == last else 0  # 0 is all to the end.
                os.posix_fadvise(self._file(shard), start, count, os.POSIX_FADV_WILLNEED)
        while len(self._asked) > MOST_ASKED:
            self._asked.pop(next(iter(self._asked)))

    def show(self, number: int, data: bytes, crop: Crop, out: Tensor) -> Crop:
        """Decode a rectangle of an image, and bring it to the size of ``out`` (3, H, W).

        Returns:
            The rectangle that is shown: an image that is decoded at a fraction of its size is cut to its pixels there.
        """
        header = jpeg.read_header(data) if self.columns["plain"][number] else None
        left, top, width, height = crop[:4]
        first_column, first_row = 0, 0
        if header is None:
            pixels, scale = decode(io.BytesIO(data)).permute(1, 2, 0), 1
        else:
            shown = jpeg.cut(data, header, left, top, left + width, top + height)
            scale = next((one for one in SCALES if min(width, height) >= one * self.size), 1)
            pixels = self.decode_jpeg(shown, scale)
            first_column, first_row = shown.left, shown.top
            left, top = left - first_column, top - first_row
            if pixels.shape[:2] == (shown.height, shown.width):
                scale = 1  # Not every decoder shrinks.
        left, top, width, height = (round(one / scale) for one in (left, top, width, height))
        part = pixels[top : top + height, left : left + width].permute(2, 0, 1)[None]
        if part.shape[2:] != out.shape[1:]:
            # Of bytes with the channels innermost there is a fast kernel; a slice is not seen to have them so.
            part = part.contiguous(memory_format=torch.channels_last)
            part = F.interpolate(part, out.shape[1:], mode=self.interpolation, antialias=True)
        out.copy_((part.flip(-1) if crop.mirrored else part)[0])
        left, top, width, height = (one * scale for one in (left, top, width, height))
        return Crop(first_column + left, first_row + top, width, height, crop.mirrored)

    def _place(self, number: int) -> tuple[int, int, int]:
        """The shard of an image, its first byte there and how many they are."""
        shard, offset, length = (int(self.columns[name][number]) for name in ("shard", "offset", "length"))
        return shard, offset, length

    def _path(self, number: int) -> Path:
        return self.paths[int(self.columns["shard"][number])]

    def _open_anew(self) -> None:
        self.open_files: dict[int, int] = {}
        self._asked: dict[int, bool] = {}
        self._close = weakref.finalize(self, _close_all, self.open_files)

    def _file(self, shard: int) -> int:
        if shard not in self.open_files:
            if len(self.open_files) >= MOST_OPEN:
                os.close(self.open_files.pop(next(iter(self.open_files))))
            try:
                self.open_files[shard] = os.open(self.paths[shard], os.O_RDONLY)
            except OSError as error:
                raise ConfigurationError(
                    f"cannot read {self.paths[shard]} ({error.strerror}): give the right to it, or copy it again"
                ) from None
        return self.open_files[shard]


def _close_all(files: dict[int, int]) -> None:
    for file in files.values():
        os.close(file)


class MaskedShardSource(ShardSource):
    """Images and masks of one part, each pair read by a single ``pread``.

    Args:
        arguments: Those of :class:`~cnnstrategies.data.shards.source.ShardSource`.
        fill: The colour of pixels that are no image's.
        ignore_index: What masks have there, and masks that are not there everywhere.
        fits: Scale a rectangle so that its longer side fits, and fill up the square; else it becomes the square.
    """

    def __init__(self, *arguments: Any, fill: list[int], ignore_index: int, fits: bool) -> None:
        super().__init__(*arguments)
        self.fill = torch.tensor(fill, dtype=torch.uint8)
        self.ignore_index = ignore_index
        self.fits = fits

    @override
    def fetch(self, indices: list[int]) -> Batch:
        """The images at ``indices``: uint8 (n, 3, size, size), and their masks (n, size, size).

        Raises:
            ConfigurationError: One cannot be read.
        """
        self.ask_ahead(indices)
        images = self.fill.repeat(len(indices), self.size, self.size, 1).permute(0, 3, 1, 2)
        masks = torch.full((len(indices), self.size, self.size), self.ignore_index)
        for number, crop, image, mask in zip(indices, self.chosen_crops(indices), images, masks, strict=True):
            rows, columns = fitted(crop.height, crop.width, self.size) if self.fits else mask.shape
            with self.names_broken(number):
                data, behind = self._pair(number)
                shown = self.show(number, data, crop, image[:, :rows, :columns])
                if behind:
                    mask[:rows, :columns] = _part(read_mask(io.BytesIO(behind)), shown, rows, columns)
        return images, masks

    def image_size(self, index: int) -> tuple[int, int]:
        """Height and width of an image."""
        return int(self.columns["height"][index]), int(self.columns["width"][index])

    def _pair(self, number: int) -> tuple[bytes, bytes]:
        """The files of an image and its mask, which are neighbours in the shard."""
        length, mask = (int(self.columns[name][number]) for name in ("length", "mask"))
        start = length + -length % TAR_BLOCK + TAR_BLOCK
        content = self.read(number, start + mask - length if mask else 0)
        return content[:length], content[start:]


def _part(mask: Tensor, crop: Crop, rows: int, columns: int) -> Tensor:
    part = mask[None, None, crop.top : crop.top + crop.height, crop.left : crop.left + crop.width]
    if part.shape[2:] != (rows, columns):
        part = F.interpolate(part, (rows, columns), mode="nearest-exact")
    return (part.flip(-1) if crop.mirrored else part)[0, 0]
