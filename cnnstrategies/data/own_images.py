"""Images of a folder, prepared as the validation images of a data module are."""

import os
from collections import Counter
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torchvision.transforms import v2

from cnnstrategies.data.folders import FILES_END_IN, image_files
from cnnstrategies.data.image_folder import FolderSource
from cnnstrategies.data.module import ImageDataModule
from cnnstrategies.data.preprocessing import IMAGENET
from cnnstrategies.data.segmentation_folder import MaskedSource
from cnnstrategies.errors import ConfigurationError


def own_images(
    datamodule: LightningDataModule | None, folder: Path, left_out: Counter[str] | None = None
) -> FolderSource | MaskedSource:
    """All images of a folder, at any depth, by their paths.

    Where the data module has masks, whole images are fitted, as those of its validation are.

    Args:
        datamodule: Whose shape, resizing and normalisation are those that the network was trained with.
        left_out: Here the folder's other files are counted, by the reason.

    Raises:
        ConfigurationError: There are none, the masks of two would have one name, or the data module is none of ours.
    """
    if not isinstance(datamodule, ImageDataModule):
        raise ConfigurationError(
            f"predictions.images={folder}: {type(datamodule).__name__} does not say how images are prepared: give an "
            "ImageDataModule, or put the folder's images into its predict_dataloader"
        )
    found = image_files(folder, folder, Counter() if left_out is None else left_out)
    names = sorted(os.path.normpath(name) for name in found)
    if not names:
        raise ConfigurationError(
            f"predictions.images={folder}: no images there; it must be a folder, and {FILES_END_IN}"
        )
    channels, height, width = datamodule.image_shape
    if datamodule.ignore_index is not None:
        masks: dict[Path, str] = {}
        for name in names:
            if (other := masks.setdefault(Path(name).with_suffix(""), name)) != name:
                raise ConfigurationError(
                    f"predictions.images={folder}: the masks of {other} and {name} would be the same file: rename one"
                )
        pairs = [(folder / name, None) for name in names]
        return MaskedSource(folder, pairs, height, datamodule.num_classes, datamodule.ignore_index, augment=False)
    grey = [grey_of] if channels == 1 else []
    mode = (datamodule.preprocessing or IMAGENET).mode
    crop = v2.Compose([*grey, v2.Resize(shorter_side(datamodule), mode), v2.CenterCrop([height, width])])
    # Broken ones are not left out here: an error is to say that they must be.
    return FolderSource(folder, names, [0] * len(names), crop, "skip")


def shorter_side(datamodule: ImageDataModule) -> int:
    """To what the shorter side of an image is resized before the centre is cut out of it."""
    return getattr(datamodule, "resize", None) or max(datamodule.image_shape[1:])


def grey_of(image: Tensor) -> Tensor:
    """The brightness of an image uint8 (3, H, W), as (1, H, W); torchvision's makes grey ones darker."""
    weights = torch.tensor([0.299, 0.587, 0.114]).reshape(3, 1, 1)
    return (image * weights).sum(dim=0, keepdim=True).round().to(torch.uint8)
