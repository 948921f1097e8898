"""Data modules for data sets that fit in memory: digits, data sets from torchvision, and synthetic images."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torchvision import datasets
from torchvision.datasets import VisionDataset
from typing_extensions import override

from cnnstrategies.data.augment import RandomFlip, RandomShift, each_image, to_normalised
from cnnstrategies.data.loading import Batch, TensorSource
from cnnstrategies.data.module import ImageDataModule, split, split_source
from cnnstrategies.errors import ConfigurationError

# The test set is split off with a fixed seed, so it does not depend on the data module's `seed`.
TEST_SHARE, TEST_SEED = 0.2, 0
FILE = Path(__file__).with_name("digits.npz")
NOISES = 61  # Number of noise images. It is prime, so that classes and noise images occur in all combinations.


class DigitsDataModule(ImageDataModule):
    """Data module for 1797 greyscale images of handwritten digits, 8 x 8 pixels in 10 classes, without a download.

    The package contains the images. They are the test set of Optical Recognition of Handwritten Digits (Alpaydin and
    Kaynak, UCI 1998, CC BY 4.0), which scikit-learn also contains. A fixed fifth of the images is for test and predict.
    The fraction ``val_split`` of the other images is for validation.

    Args:
        val_split: Fraction of the training images that is held out for validation.
        augment: Whether training images are shifted at random by up to one pixel.
        transforms: Additional transforms of training images, applied after the shift to one uint8 (C, H, W) image at a
            time.
        **options: Arguments of :class:`~cnnstrategies.data.ImageDataModule`; ``batch_size`` is 64 by default.
    """

    default_batch_size = 64
    num_classes = 10
    image_shape = (1, 8, 8)

    def __init__(
        self,
        *,
        val_split: float = 0.2,
        augment: bool = True,
        transforms: Sequence[nn.Module] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.val_split = val_split
        self.class_names = [str(digit) for digit in range(10)]
        self.eval_transform = to_normalised(mean=[0.3], std=[0.38])
        shift, further = [RandomShift(1)] * augment, each_image(transforms, self.image_shape)
        self.train_transform = nn.Sequential(*shift, *further, self.eval_transform)

    @override
    def setup(self, stage: str) -> None:
        with np.load(FILE) as digits:
            images = torch.from_numpy(digits["images"] * (255 / 16)).round().to(torch.uint8).unsqueeze(1)
            targets = torch.from_numpy(digits["targets"]).long()
        rest, test = split(len(images), TEST_SHARE, TEST_SEED)
        self.train_source, self.val_source = split_source(images[rest], targets[rest], self.val_split, self.seed)
        self.test_source = self.predict_source = TensorSource(images[test], targets[test])


class TorchvisionDataModule(ImageDataModule):
    """Base class of the data modules for torchvision's data sets that fit in memory.

    A subclass sets torchvision's class of the data set, the mean and standard deviation of its training images, and the
    augmentation. The official test images are for test and predict. The fraction ``val_split`` of the training images
    is for validation.

    Args:
        root: Directory of the data set.
        download: Whether to download the data set if it does not exist.
        val_split: Fraction of the training images that is held out for validation.
        augment: Whether training images are shifted at random by a few pixels and, except for digits, flipped
            horizontally at random.
        transforms: Additional transforms of training images, applied last, to one uint8 (C, H, W) image at a time.
        num_workers: Number of worker processes that load batches for each rank; with 0 the rank loads them itself.
        **options: Arguments of :class:`~cnnstrategies.data.ImageDataModule`; ``batch_size`` is 128 by default.
    """

    default_batch_size = 128
    dataset_class: ClassVar[type[VisionDataset]]
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]
    flip: ClassVar[bool]
    shift: ClassVar[int]

    def __init__(
        self,
        root: Path = Path("datasets"),
        download: bool = True,
        val_split: float = 0.1,
        augment: bool = True,
        transforms: Sequence[nn.Module] | None = None,
        num_workers: int = 2,
        **options: Any,
    ) -> None:
        super().__init__(num_workers=num_workers, **options)
        self.root = root
        self.download = download
        self.val_split = val_split
        self.eval_transform = to_normalised(self.mean, self.std)
        random: list[nn.Module] = [RandomShift(self.shift), *([RandomFlip()] if self.flip else [])]
        further = each_image(transforms, self.image_shape)
        self.train_transform = nn.Sequential(*random * augment, *further, self.eval_transform)

    @override
    def prepare_data(self) -> None:
        """Download the data set if it does not exist. Lightning calls this in one process on each node."""
        for train in (True, False):
            self._open(train, download=self.download)

    @override
    def setup(self, stage: str) -> None:
        training, test = self._open(train=True, download=False), self._open(train=False, download=False)
        self.class_names = [str(name) for name in training.classes]
        self.train_source, self.val_source = split_source(*tensors(training), self.val_split, self.seed)
        self.test_source = self.predict_source = TensorSource(*tensors(test))

    def _open(self, train: bool, download: bool) -> VisionDataset:
        name = self.dataset_class.__name__
        try:
            return self.dataset_class(self.root, train=train, download=download)
        except (RuntimeError, OSError) as error:
            why = " ".join(str(error).split())
            reason = f"the download failed ({why})" if download else "it does not exist, and download is false"
            raise ConfigurationError(
                f"no {name} in {self.root.resolve()}: {reason}; create the folder with torchvision.datasets.{name} on "
                "a machine with internet access and copy it, or set data.init_args.root to an existing copy, or use "
                "DigitsDataModule, which needs no download"
            ) from error


def tensors(dataset: VisionDataset) -> tuple[Tensor, Tensor]:
    """Return all images and targets of a torchvision data set that has them in memory.

    Returns:
        Images uint8 (N, C, H, W) and targets int64 (N,).
    """
    images = torch.as_tensor(dataset.data)
    images = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()
    return images, torch.as_tensor(dataset.targets, dtype=torch.int64)


class MNISTDataModule(TorchvisionDataModule):
    """Data module for 70 000 greyscale images of handwritten digits, 28 x 28 pixels, 10 classes (LeCun et al. 1998)."""

    dataset_class = datasets.MNIST
    num_classes = 10
    image_shape = (1, 28, 28)
    mean, std = (0.1307,), (0.3081,)
    flip, shift = False, 2


class FashionMNISTDataModule(TorchvisionDataModule):
    """Data module for 70 000 greyscale images of clothes, 28 x 28 pixels, 10 classes (Xiao et al. 2017)."""

    dataset_class = datasets.FashionMNIST
    num_classes = 10
    image_shape = (1, 28, 28)
    mean, std = (0.2860,), (0.3530,)
    flip, shift = True, 2


class CIFAR10DataModule(TorchvisionDataModule):
    """Data module for 60 000 colour images of 32 x 32 pixels, 10 classes (Krizhevsky 2009)."""

    dataset_class = datasets.CIFAR10
    num_classes = 10
    image_shape = (3, 32, 32)
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    flip, shift = True, 4


class CIFAR100DataModule(TorchvisionDataModule):
    """Data module for 60 000 colour images of 32 x 32 pixels, 100 classes (Krizhevsky 2009)."""

    dataset_class = datasets.CIFAR100
    num_classes = 100
    image_shape = (3, 32, 32)
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    flip, shift = True, 4


class SyntheticDataModule(ImageDataModule):
    """Data module for synthetic images, which take almost no time to load.

    An image is the sum of its class's pattern and noise; both are determined by the seed. Sample i has the class
    ``i % num_classes``. A network can learn the classes from their patterns.

    Args:
        num_samples: Number of training images. For validation there are additional images, a tenth of this number. The
            validation images are also used for test and predict.
        num_classes: Number of classes.
        image_size: Height and width of an image, in pixels.
        channels: Number of channels of an image.
        **options: Arguments of :class:`~cnnstrategies.data.ImageDataModule`.

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
                raise ConfigurationError(f"{name}={value}: use at least {least}")
        for name, value in (("image_size", image_size), ("channels", channels)):
            if value < 1:
                raise ConfigurationError(f"{name}={value}: use at least 1")
        self.num_samples = num_samples
        self.num_classes = num_classes
        self.class_names = [str(index) for index in range(num_classes)]
        self.image_shape = (channels, image_size, image_size)
        self.train_transform = self.eval_transform = to_normalised([0.5] * channels, [0.25] * channels)

    @property
    def source_class(self) -> type["GeneratedSource"]:
        """The class of the sources of all splits."""
        return PatternSource

    @override
    def setup(self, stage: str) -> None:
        options = self.num_classes, self.image_shape, self.seed
        self.train_source = self.source_class(0, self.num_samples, *options)
        self.val_source = self.test_source = self.predict_source = self.source_class(
            self.num_samples, self.num_samples // 10, *options
        )


class GeneratedSource(ABC):
    """Source of generated samples: ``size`` samples of an endless sequence, starting with sample number ``first``.

    Args:
        first: Number of the first sample.
        size: Number of samples.
        num_classes: Number of classes.
        image_shape: (C, H, W) of an image.
        seed: Seed of the sequence.
    """

    def __init__(self, first: int, size: int, num_classes: int, image_shape: tuple[int, int, int], seed: int) -> None:
        self.first, self.size, self.num_classes, self.image_shape, self.seed = (
            first, size, num_classes, image_shape, seed,
        )  # fmt: skip

    def __len__(self) -> int:
        return self.size

    @abstractmethod
    def fetch(self, indices: list[int]) -> Any:
        """Build the samples at ``indices``: images and targets."""


class PatternSource(GeneratedSource):
    """Source of images with the pattern of their class, a coarse grid of random values, and noise.

    Only the grids and a few noise images are in memory.
    """

    def __init__(self, first: int, size: int, num_classes: int, image_shape: tuple[int, int, int], seed: int) -> None:
        super().__init__(first, size, num_classes, image_shape, seed)
        channels, height, width = image_shape
        generator = torch.Generator().manual_seed(seed)
        self.rows, self.columns = (torch.arange(n) * min(4, n) // n for n in (height, width))
        grid = (num_classes, channels, min(4, height), min(4, width))
        self.grids = torch.randint(64, grid, generator=generator, dtype=torch.uint8) * 2
        self.noise = torch.randint(128, (NOISES, *image_shape), generator=generator, dtype=torch.uint8)

    @override
    def fetch(self, indices: list[int]) -> Batch:
        """Build the samples at ``indices``, and return uint8 images and their classes."""
        numbers = torch.tensor(indices) + self.first
        targets = numbers % self.num_classes
        # Columns are repeated before rows, so that repeating the rows copies whole rows, which is faster.
        patterns = self.grids[targets].index_select(3, self.columns).index_select(2, self.rows)
        return self.noise[numbers % NOISES].add_(patterns), targets
