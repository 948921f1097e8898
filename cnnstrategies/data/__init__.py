"""Data modules, one per file."""

from cnnstrategies.data.digits import DigitsDataModule
from cnnstrategies.data.module import ImageDataModule

__all__ = ["DigitsDataModule", "ImageDataModule"]
