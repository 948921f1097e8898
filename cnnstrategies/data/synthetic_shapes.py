"""Data module for synthetic images with shapes and their boxes."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from cnnstrategies.data.detection_source import DetectionDataset
from cnnstrategies.data.small_sets import GeneratedSource, SyntheticDataModule
from cnnstrategies.runtime.seeds import mixed_seed

KINDS = ("rectangle", "ellipse", "triangle", "cross")
EMPTY = 8  # Every eighth image has no boxes.
CELLS = 2  # An image has this many rows and columns of places for a shape.


class SyntheticDetectionDataModule(SyntheticDataModule):
    """Data module for synthetic images with up to four shapes, which take little time to generate.

    A class is a shape: rectangle, ellipse, triangle or cross. Colour, size and place of a shape are random, and so is
    the background, which has noise. Every eighth image has no shapes. Images are determined by the seed and the
    sample's number. They have equal sizes.

    Args:
        num_samples: Number of training images. For validation there are additional images, a tenth of this number. The
            validation images are also used for test and predict.
        num_classes: Number of classes, 2 to 5, with the background.
        image_size: Height and width of an image, in pixels.
        channels: Number of channels of an image.
        **options: Arguments of :class:`~cnnstrategies.data.ImageDataModule`.

    Raises:
        ConfigurationError: A number is too small or too large.
    """

    dataset_class: ClassVar = DetectionDataset
    first_label = 1
    has_equal_sizes = True

    def __init__(
        self,
        num_samples: int = 640,
        num_classes: int = 4,
        image_size: int = 64,
        channels: int = 3,
        **options: Any,
    ) -> None:
        super().__init__(num_samples, num_classes, image_size, channels, **options)
        self.class_names = ["background", *KINDS[: num_classes - 1]]
        self.train_transform = self.eval_transform = nn.Identity()

    @property
    @override
    def source_class(self) -> type[GeneratedSource]:
        return BoxedShapes


class BoxedShapes(GeneratedSource):
    """Source of images with shapes and their boxes. The classes include the background."""

    @override
    def fetch(self, indices: list[int]) -> Any:
        """Build the samples at ``indices``: a list of float32 images (C, H, W) in [0, 1], and a list of their targets.

        A target has ``boxes`` float32 (n, 4) as x1, y1, x2, y2, ``labels`` int64 (n,) and ``image_id``, the index.
        """
        samples = [self._sample(index) for index in indices]
        return [image for image, _ in samples], [target for _, target in samples]

    def _sample(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        number = index + self.first
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, number))
        channels, height, width = self.image_shape
        image = 0.3 * torch.rand(channels, 1, 1, generator=generator) + 0.1 * torch.rand(
            self.image_shape, generator=generator
        )
        boxes: list[list[int]] = []
        labels: list[int] = []
        cells = 0 if number % EMPTY == EMPTY - 1 else CELLS * CELLS
        for cell, drawn in enumerate(torch.rand(cells, generator=generator).tolist()):
            if drawn < 0.4 and (boxes or cell < cells - 1):
                continue
            rows, columns = (
                _span(length // CELLS, place, generator)
                for length, place in ((height, cell // CELLS), (width, cell % CELLS))
            )
            label = int(torch.randint(1, self.num_classes, (), generator=generator))
            colour = 0.5 + 0.5 * torch.rand(channels, 1, generator=generator)
            inside = _shape(KINDS[label - 1], rows.stop - rows.start, columns.stop - columns.start)
            image[:, rows, columns][:, inside] = colour
            boxes.append([columns.start, rows.start, columns.stop, rows.stop])
            labels.append(label)
        target = {
            "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
            "labels": torch.tensor(labels, dtype=torch.int64),
            "image_id": torch.tensor(index),
        }
        return image, target


def _span(length: int, place: int, generator: torch.Generator) -> slice:
    """Return a random range of rows or columns within a cell, of half of the cell's length or more."""
    extent = int(torch.randint(max(1, length // 2), length + 1, (), generator=generator))
    start = place * length + int(torch.randint(0, length - extent + 1, (), generator=generator))
    return slice(start, start + extent)


def _shape(kind: str, height: int, width: int) -> Tensor:
    """Return which pixels of a box are inside a shape, bool (height, width)."""
    rows, columns = (((torch.arange(length) + 0.5) / length * 2 - 1) for length in (height, width))
    y, x = torch.meshgrid(rows, columns, indexing="ij")
    if kind == "ellipse":
        return x.square() + y.square() <= 1
    if kind == "triangle":
        return x.abs() <= (y + 1) / 2 + 1 / width
    if kind == "cross":
        return (x.abs() <= 0.4) | (y.abs() <= 0.4)
    return torch.ones(height, width, dtype=torch.bool)
