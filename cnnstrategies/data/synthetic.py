"""Images out of nothing, of any size and number, for benchmarks."""

from typing import Any

import torch
from typing_extensions import override

from cnnstrategies.data.augment import to_normalised
from cnnstrategies.data.loading import Batch
from cnnstrategies.data.module import ImageDataModule
from cnnstrategies.errors import ConfigurationError

NOISES = 61  # Distinct noise images; prime, so that classes and noises meet in all combinations.


class SyntheticDataModule(ImageDataModule):
    """Images that cost almost nothing to load: a pattern per class plus noise, the same for the same seed.

    Sample i has class ``i % num_classes``, so that a network can learn the classes and its loss goes down.

    Args:
        num_samples: Training images; a tenth as many are for validation, for test and for predict.
        num_classes: Number of classes.
        image_size: Height and width.
        channels: Channels.
        **options: Those of :class:`~cnnstrategies.data.ImageDataModule`.

    Raises:
        ConfigurationError: A number is too small.
    """

    def __init__(
        self,
        num_samples: int = 1280,
        num_classes: int = 1000,
        image_size: int = 224,
        channels: int = 3,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        for name, value, least in (("num_samples", num_samples, 10), ("num_classes", num_classes, 2)):
            if value < least:
                raise ConfigurationError(f"{name}={value}: at least {least} are needed")
        for name, value in (("image_size", image_size), ("channels", channels)):
            if value < 1:
                raise ConfigurationError(f"{name}={value}: at least 1 is needed")
        self.num_samples = num_samples
        self.num_classes = num_classes
        self.class_names = [str(index) for index in range(num_classes)]
        self.image_shape = (channels, image_size, image_size)
        self.train_transform = self.eval_transform = to_normalised([0.5] * channels, [0.25] * channels)

    @override
    def setup(self, stage: str) -> None:
        held_out = self.num_samples // 10
        self.train_source = SyntheticSource(0, self.num_samples, self.num_classes, self.image_shape, self.seed)
        self.val_source = self.test_source = self.predict_source = SyntheticSource(
            self.num_samples, held_out, self.num_classes, self.image_shape, self.seed
        )


class SyntheticSource:
    """Samples ``first`` to ``first + size`` of an endless row of patterns with noise.

    A class's pattern is a coarse grid of grey values; of grids and noise images there are few in memory.
    """

    def __init__(self, first: int, size: int, num_classes: int, image_shape: tuple[int, int, int], seed: int) -> None:
        channels, height, width = image_shape
        generator = torch.Generator().manual_seed(seed)
        self.first = first
        self.size = size
        self.num_classes = num_classes
        self.rows, self.columns = (torch.arange(n) * min(4, n) // n for n in (height, width))
        grid = (num_classes, channels, min(4, height), min(4, width))
        self.grids = torch.randint(64, grid, generator=generator, dtype=torch.uint8) * 2
        self.noise = torch.randint(128, (NOISES, *image_shape), generator=generator, dtype=torch.uint8)

    def __len__(self) -> int:
        return self.size

    def fetch(self, indices: list[int]) -> Batch:
        """Build the samples at ``indices``: uint8 images and their classes."""
        numbers = torch.tensor(indices) + self.first
        targets = numbers % self.num_classes
        # Columns before rows: then whole rows are copied.
        patterns = self.grids[targets].index_select(3, self.columns).index_select(2, self.rows)
        return self.noise[numbers % NOISES].add_(patterns), targets
