"""Data module for image files in the layout of ImageNet, and images of a user's folder for predict."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn
from torchvision.transforms import v2
from typing_extensions import override

from cnnstrategies.data.augment import each_image, to_normalised
from cnnstrategies.data.decoding import BrokenImageError, decode
from cnnstrategies.data.folders import (
    EXTENSIONS,
    FILES_END_IN,
    beside,
    folders_in,
    has_images,
    image_files,
    part_folders,
    readable,
)
from cnnstrategies.data.loading import Batch, Transform
from cnnstrategies.data.module import ImageDataModule, split
from cnnstrategies.data.preprocessing import IMAGENET, Preprocessing
from cnnstrategies.data.segmentation_folder import MaskedSource
from cnnstrategies.errors import ConfigurationError

Files = tuple[list[str], list[Any]]


class ImageFolderDataModule(ImageDataModule):
    """Data module for JPEG, PNG, WebP, BMP, TIFF and PNM files, with one directory per class.

    ::

        root/train/<class>/*.jpg     or, without train/:   root/<class>/*.jpg
        root/val/<class>/*.jpg       without val/, val_split of the training images
        root/test/<class>/*.jpg      without test/, the validation images
        root/predict/**/*.jpg        without predict/, the test images

    ``training``, ``valid``, ``validation``, ``dev`` and ``testing`` are also accepted, in any case. Links are followed.
    Training images are cropped at random and mirrored; all other images are resized and cropped in the centre. The
    start panel shows how many files are not used, such as files and directories whose name begins with a dot.

    Args:
        root: Directory of the data set.
        image_size: Height and width of the images that the network receives; by default 224. For a network with trained
            weights the command line takes sizes that are not set, the interpolation, the mean and the deviation from
            the weights' own preprocessing. In Python ``prepare_as`` does so.
        resize: Shorter side before the centre crop; by default 8/7 of ``image_size``, which for 224 is the usual 256.
        val_split: Fraction of the training images that is held out for validation if there is no ``val``.
        augment: Crop training images at random and mirror them.
        transforms: Further transforms of training images, applied last to one uint8 (C, H, W) image at a time.
        num_workers: Worker processes per process that load batches; 0 loads in the process itself.
        **options: Arguments of :class:`~cnnstrategies.data.ImageDataModule`.

    Raises:
        ConfigurationError: The directory does not exist, a part or a class has no images, two parts disagree about the
            classes, or ``resize`` is smaller than ``image_size``.
    """

    def __init__(
        self,
        root: Path,
        image_size: int | None = None,
        resize: int | None = None,
        val_split: float = 0.1,
        augment: bool = True,
        transforms: Sequence[nn.Module] | None = None,
        num_workers: int = 4,
        **options: Any,
    ) -> None:
        super().__init__(num_workers=num_workers, **options)
        self.root = Path(root)
        self.val_split = val_split
        self.augment = augment
        self.transforms = transforms
        self.sizes = image_size, resize
        self.prepare_as(IMAGENET)
        if not self.root.is_dir():
            raise ConfigurationError(f"no directory {self.root.resolve()}: set data.init_args.root")
        self.find()
        self.num_classes = len(self.class_names)

    def find(self) -> None:
        """Find the parts and the classes."""
        self.folders = part_folders(self.root)
        self.training_root = self.folders.get("train", self.root)
        self.class_names = self._class_folders(self.training_root)
        if len(self.class_names) < 2:
            raise ConfigurationError(
                f"{self.training_root.resolve()} has {len(self.class_names)} class directories: at least 2 are needed, "
                "one for each class"
            )
        self._check_folders()

    @override
    def prepare_as(self, trained: Preprocessing) -> None:
        self.preprocessing = trained
        image_size, self.resize = trained.sizes(*self.sizes)
        self.image_shape = (3, image_size, image_size)
        self.centre = v2.Compose([v2.Resize(self.resize, trained.mode), v2.CenterCrop(image_size)])
        crop = v2.RandomResizedCrop(image_size, interpolation=trained.mode)
        self.crop = v2.Compose([crop, v2.RandomHorizontalFlip()]) if self.augment else self.centre
        # Decoding and cropping work on one image at a time; normalising a whole batch is faster.
        self.eval_transform = to_normalised(trained.mean, trained.std)
        self.train_transform = nn.Sequential(*each_image(self.transforms, self.image_shape), self.eval_transform)

    @override
    def setup(self, stage: str) -> None:
        parts = self.parts()
        self.places = {"train": str(self.training_root), **{part: str(path) for part, path in self.folders.items()}}
        if "val" not in parts:
            names, targets = parts["train"]
            for part, chosen in zip(("train", "val"), split(len(names), self.val_split, self.seed), strict=True):
                indices = chosen.tolist()
                parts[part] = [names[i] for i in indices], [targets[i] for i in indices]
        crops = {part: self.crop if part == "train" else self.centre for part in parts}
        self.set_sources({part: FolderSource(self.root, *files, crops[part]) for part, files in parts.items()})

    def parts(self) -> dict[str, Files]:
        """Return the files and classes of each existing part, and count the files that are not used."""
        self.left_out = beside(self.root, self.folders)
        parts = {"train": self._labelled(self.training_root)}
        for part, folder in self.folders.items():
            if part == "predict":
                names = image_files(folder, self.root, self.left_out)
                parts[part] = names, [0] * len(names)
            elif part != "train":
                parts[part] = self._labelled(folder)
        return parts

    def _labelled(self, directory: Path) -> Files:
        names: list[str] = []
        targets: list[int] = []
        for target, name in enumerate(self.class_names):
            class_files = image_files(directory / name, self.root, self.left_out)
            names += class_files
            targets += [target] * len(class_files)
        with os.scandir(directory) as entries:
            outside = sum(entry.name.lower().endswith(EXTENSIONS) and entry.name[0] != "." for entry in entries)
        self.left_out["outside of the classes' folders"] += outside
        return names, targets

    def _class_folders(self, directory: Path) -> list[str]:
        return [name for name in folders_in(directory) if directory / name not in self.folders.values()]

    def _check_folders(self) -> None:
        """Refuse a class without training images, and a part without images."""
        for name in self.class_names:
            if readable(name) != name:
                raise ConfigurationError(
                    f"{self.training_root / readable(name)}: the name of this class's folder is not UTF-8: rename the "
                    "folder"
                )
            if not has_images(folder := self.training_root / name):
                raise ConfigurationError(
                    f"no images for the class {name} in {folder.resolve()}: {FILES_END_IN}; remove the folder if it is "
                    "not a class"
                )
        for part, folder in self.folders.items():
            classes = [] if part == "predict" else self._class_folders(folder)
            if unknown := sorted(set(classes) - set(self.class_names)):
                raise ConfigurationError(
                    f"{folder} has classes that {self.training_root} does not have: {', '.join(unknown)}; rename them"
                )
            class_folders = [folder] if part == "predict" else [folder / name for name in classes]
            if not any(map(has_images, class_folders)):
                layout = "" if part == "predict" else " in a directory for each class"
                raise ConfigurationError(f"no images for {part}{layout} in {folder.resolve()}: {FILES_END_IN}")


class FolderSource:
    """Source of images that are decoded from files on request.

    Args:
        root: Directory at which the names begin.
        names: Paths of the files from ``root``.
        targets: Class of each image, or a list of numbers for each image.
        transform: Transform of each decoded image, uint8 (3, H, W); the results must have equal shapes.
    """

    def __init__(self, root: Path, names: Sequence[str], targets: list[Any], transform: Transform) -> None:
        self.root = root
        # One array instead of a list: counting references to a million strings would copy their memory into each forked
        # worker.
        self.names = np.array([os.fsencode(name) for name in names])
        self.targets = torch.tensor(targets)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        """Return the path from the root of the file at ``index``, as readable text."""
        return readable(os.fsdecode(self.names[index]))

    def fetch(self, indices: list[int]) -> Batch:
        """Decode and transform the images at ``indices``, and return them with their targets."""
        return torch.stack([self.transform(self._decode(index)) for index in indices]), self.targets[indices]

    def _decode(self, index: int) -> Tensor:
        path = self.root / os.fsdecode(self.names[index])
        try:
            return decode(path)
        except BrokenImageError as error:
            raise ConfigurationError(
                f"broken image {path} ({error}): repair or remove it; `cnnstrategies pack` leaves out broken images"
            ) from None


def images_of_folder(
    datamodule: LightningDataModule | None, folder: Path, left_out: Counter[str] | None = None
) -> FolderSource | MaskedSource:
    """Return a source of all images of a folder, at any depth, in the order of their paths.

    If the data module has masks, whole images are fitted into the square, as for validation.

    Args:
        datamodule: Data module that gives the shape, resizing and normalisation with which the network was trained.
        folder: Folder of the images.
        left_out: Counter to which the numbers of the folder's other files are added, by reason.

    Raises:
        ConfigurationError: The data module does not prepare images, the folder has no images, or two images would have
            the same mask file.
    """
    if not isinstance(datamodule, ImageDataModule):
        raise ConfigurationError(
            f"predictions.images={folder}: {type(datamodule).__name__} does not define how images are prepared: use an "
            "ImageDataModule, or put the folder's images into its predict_dataloader"
        )
    files = image_files(folder, folder, Counter() if left_out is None else left_out)
    names = sorted(os.path.normpath(name) for name in files)
    if not names:
        raise ConfigurationError(
            f"predictions.images={folder}: no images found; it must be a folder, and {FILES_END_IN}"
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
    return FolderSource(folder, names, [0] * len(names), crop)


def shorter_side(datamodule: ImageDataModule) -> int:
    """Return the length of an image's shorter side before the centre crop, in pixels."""
    return getattr(datamodule, "resize", None) or max(datamodule.image_shape[1:])


def grey_of(image: Tensor) -> Tensor:
    """Return the brightness of an image uint8 (3, H, W), as (1, H, W).

    torchvision's own conversion makes grey images darker.
    """
    weights = torch.tensor([0.299, 0.587, 0.114]).reshape(3, 1, 1)
    return (image * weights).sum(dim=0, keepdim=True).round().to(torch.uint8)
