"""Data module for synthetic images with masks."""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from cnnstrategies.data.loading import Batch
from cnnstrategies.data.small_sets import GeneratedSource, SyntheticDataModule
from cnnstrategies.runtime.seeds import mixed_seed

NOISES = 7  # Number of noise images. It is prime, so that they occur in all combinations with shapes.
SHAPES = 6  # Number of rectangles in each image.
IGNORED = 255


class SyntheticSegmentationDataModule(SyntheticDataModule):
    """Data module for synthetic images with masks, which take little time to generate.

    Each image shows rectangles on a background of class 0, with noise. A rectangle's class determines its colour, and
    the mask has the class of each pixel. Images, classes and places are determined by the seed and the sample's number.

    Args:
        num_samples: Number of training images. For validation there are additional images, a tenth of this number. The
            validation images are also used for test and predict.
        num_classes: Number of classes, with the background.
        image_size: Height and width of an image, in pixels.
        channels: Number of channels of an image.
        **options: Arguments of :class:`~cnnstrategies.data.ImageDataModule`.

    Raises:
        ConfigurationError: A number is too small.
    """

    ignore_index = IGNORED  # No pixel is ignored; this is the default of ImageSegmenter.

    def __init__(
        self,
        num_samples: int = 200,
        num_classes: int = 4,
        image_size: int = 1024,
        channels: int = 3,
        **options: Any,
    ) -> None:
        super().__init__(num_samples, num_classes, image_size, channels, **options)

    @property
    @override
    def source_class(self) -> type[GeneratedSource]:
        return MaskedShapes


class MaskedShapes(GeneratedSource):
    """Source of images with masks. The classes include the background."""

    def __init__(self, first: int, size: int, num_classes: int, image_shape: tuple[int, int, int], seed: int) -> None:
        super().__init__(first, size, num_classes, image_shape, seed)
        generator = torch.Generator().manual_seed(seed)
        self.colours = torch.randint(128, (num_classes, image_shape[0]), generator=generator, dtype=torch.uint8)
        self.noise = torch.randint(128, (NOISES, *image_shape), generator=generator, dtype=torch.uint8)

    @override
    def fetch(self, indices: list[int]) -> Batch:
        """Build the samples at ``indices``: uint8 images (n, C, H, W), and masks of int64 (n, H, W)."""
        samples = [self._sample(index + self.first) for index in indices]
        return torch.stack([image for image, _ in samples]), torch.stack([mask for _, mask in samples])

    def _sample(self, number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, number))
        _, height, width = self.image_shape
        image = self.noise[number % NOISES] + self.colours[0][:, None, None]
        mask = torch.zeros(height, width, dtype=torch.int64)
        for _ in range(SHAPES):
            kind = int(torch.randint(1, self.num_classes, (), generator=generator))
            rows, columns = (_span(length, generator) for length in (height, width))
            image[:, rows, columns] = self.noise[number % NOISES, :, rows, columns] + self.colours[kind][:, None, None]
            mask[rows, columns] = kind
        return image, mask


def _span(length: int, generator: torch.Generator) -> slice:
    """Return a random range of rows or columns, of an eighth to half of the length."""
    extent = int(torch.randint(max(1, length // 8), max(2, length // 2 + 1), (), generator=generator))
    start = int(torch.randint(0, length - extent + 1, (), generator=generator))
    return slice(start, start + extent)
