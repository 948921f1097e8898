"""Images of shards and their masks, which are cropped alike."""

import io
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from cnnstrategies.data.loading import Batch
from cnnstrategies.data.masks import fitted, read_mask
from cnnstrategies.data.shards import tar
from cnnstrategies.data.shards.crops import Crop
from cnnstrategies.data.shards.source import ShardSource


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
        start = length + -length % tar.BLOCK + tar.BLOCK
        content = self.read(number, start + mask - length if mask else 0)
        return content[:length], content[start:]


def _part(mask: Tensor, crop: Crop, rows: int, columns: int) -> Tensor:
    part = mask[None, None, crop.top : crop.top + crop.height, crop.left : crop.left + crop.width]
    if part.shape[2:] != (rows, columns):
        part = F.interpolate(part, (rows, columns), mode="nearest-exact")
    return (part.flip(-1) if crop.mirrored else part)[0, 0]
