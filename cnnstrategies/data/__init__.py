"""LightningDataModules for images. Their loaders divide each global batch among the processes."""

import lightning.pytorch  # noqa: F401  # Its import registers the strategies, which need this package's modules.

from cnnstrategies.data.detection_folder import DetectionFolderDataModule
from cnnstrategies.data.image_folder import ImageFolderDataModule
from cnnstrategies.data.image_table import ImageTableDataModule
from cnnstrategies.data.module import ImageDataModule
from cnnstrategies.data.segmentation_folder import SegmentationFolderDataModule
from cnnstrategies.data.sharded import ShardedImageDataModule
from cnnstrategies.data.small_sets import (
    CIFAR10DataModule,
    CIFAR100DataModule,
    DigitsDataModule,
    FashionMNISTDataModule,
    MNISTDataModule,
    SyntheticDataModule,
)
from cnnstrategies.data.synthetic_masks import SyntheticSegmentationDataModule
from cnnstrategies.data.synthetic_shapes import SyntheticDetectionDataModule

__all__ = [
    "CIFAR10DataModule",
    "CIFAR100DataModule",
    "DetectionFolderDataModule",
    "DigitsDataModule",
    "FashionMNISTDataModule",
    "ImageDataModule",
    "ImageFolderDataModule",
    "ImageTableDataModule",
    "MNISTDataModule",
    "SegmentationFolderDataModule",
    "ShardedImageDataModule",
    "SyntheticDataModule",
    "SyntheticDetectionDataModule",
    "SyntheticSegmentationDataModule",
]
