"""Data modules, one per file."""

from cnnstrategies.data.cifar10 import CIFAR10DataModule
from cnnstrategies.data.cifar100 import CIFAR100DataModule
from cnnstrategies.data.digits import DigitsDataModule
from cnnstrategies.data.fashion_mnist import FashionMNISTDataModule
from cnnstrategies.data.image_folder import ImageFolderDataModule
from cnnstrategies.data.image_table import ImageTableDataModule
from cnnstrategies.data.mnist import MNISTDataModule
from cnnstrategies.data.module import ImageDataModule
from cnnstrategies.data.segmentation_folder import SegmentationFolderDataModule
from cnnstrategies.data.sharded import ShardedImageDataModule
from cnnstrategies.data.synthetic import SyntheticDataModule

__all__ = [
    "CIFAR10DataModule",
    "CIFAR100DataModule",
    "DigitsDataModule",
    "FashionMNISTDataModule",
    "ImageDataModule",
    "ImageFolderDataModule",
    "ImageTableDataModule",
    "MNISTDataModule",
    "SegmentationFolderDataModule",
    "ShardedImageDataModule",
    "SyntheticDataModule",
]
