"""Base class of the data modules whose images are files in a folder."""

from pathlib import Path
from typing import Any

from cnnstrategies.data.decoding import checked_bits
from cnnstrategies.data.module import ImageDataModule, split
from cnnstrategies.errors import ConfigurationError


class FolderDataModule(ImageDataModule):
    """Base class of the data modules whose images are files in a folder.

    Args:
        root: Directory of the data set.
        val_split: Fraction of the training images that is held out for validation if there is no folder ``val``.
        num_workers: Number of worker processes that load batches for each rank; with 0 the rank loads them itself.
        bits: Number of bits that images with 16 bits per pixel use, 8 to 16; by default the number that 32 training
            images use. The start panel shows it.
        **options: Arguments of :class:`~cnnstrategies.data.ImageDataModule`.
    """

    def __init__(
        self, root: Path, val_split: float = 0.1, num_workers: int = 4, bits: int | None = None, **options: Any
    ) -> None:
        super().__init__(num_workers=num_workers, **options)
        self.bits = checked_bits(bits)
        self.root = Path(root)
        self.val_split = val_split

    def hold_out(self, parts: dict[str, Any]) -> None:
        """Hold images out of the training images if there are none for validation.

        Args:
            parts: For each split, lists with an item for each image: files and targets. ``train`` is replaced, and
                ``val`` is added.

        Raises:
            ConfigurationError: ``val_split`` leaves no image for training or for validation.
        """
        if "val" in parts:
            return
        training = parts["train"]
        for part, chosen in zip(("train", "val"), split(len(training[0]), self.val_split, self.seed), strict=True):
            parts[part] = tuple([items[i] for i in chosen.tolist()] for items in training)


def no_directory(directory: Path) -> ConfigurationError:
    """Return the error for a data set without one of its directories."""
    return ConfigurationError(
        f"no directory {directory.resolve()}: set data.init_args.root to the data set's directory"
    )
