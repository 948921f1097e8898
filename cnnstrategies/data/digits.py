"""Handwritten digits: real images, nothing to download."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from typing_extensions import override

from cnnstrategies.data.augment import RandomShift, each_image, to_normalised
from cnnstrategies.data.loading import TensorSource
from cnnstrategies.data.module import ImageDataModule, split, split_source

# The test set is the same whatever the seed of the training.
TEST_SHARE, TEST_SEED = 0.2, 0
FILE = Path(__file__).with_name("digits.npz")


class DigitsDataModule(ImageDataModule):
    """1797 grey images of 8 x 8 pixels in 10 classes, which lie beside this file.

    The test set of Optical Recognition of Handwritten Digits (Alpaydin and Kaynak, UCI 1998, CC BY 4.0), the one that
    scikit-learn has too. Here a fixed fifth of it is the test set, which predict uses too; ``val_split`` of the rest is
    for validation.

    Args:
        val_split: Share of the training images that is held out for validation.
        augment: Shift training images by up to one pixel.
        transforms: Further transforms of training images, one uint8 (C, H, W) at a time, after the others.
        **options: Those of :class:`~cnnstrategies.data.ImageDataModule`; ``batch_size`` is by default 64.
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
