"""Data module for folders of images in the layout of ImageNet, and the source of images for predict."""

import os
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn
from torchvision.transforms import v2
from typing_extensions import override

from cnnstrategies.data.augment import each_image, to_normalised
from cnnstrategies.data.decoding import bits_of, read_image, spaced
from cnnstrategies.data.folder_module import FolderDataModule, no_directory
from cnnstrategies.data.folders import (
    EXTENSIONS,
    FILES_END_IN,
    Walk,
    folders_in,
    has_images,
    has_training_folder,
    ignored_folders,
    image_files,
    part_folders,
    readable,
)
from cnnstrategies.data.loading import Batch, Transform
from cnnstrategies.data.masks import MaskReader
from cnnstrategies.data.module import ImageDataModule
from cnnstrategies.data.preprocessing import IMAGENET, Preprocessing
from cnnstrategies.data.segmentation_folder import MaskedSource
from cnnstrategies.errors import ConfigurationError

Files = tuple[list[str], list[Any]]
REMEDY = "repair or remove it, or pack the images with `cnnstrategies pack`, which skips broken images"


class ImageFolderDataModule(FolderDataModule):
    """Data module for JPEG, PNG, WebP, BMP, TIFF and PNM files, with one directory per class.

    ::

        root/train/<class>/*.jpg     or, without train/:   root/<class>/*.jpg
        root/val/<class>/*.jpg       without val/, val_split of the training images
        root/test/<class>/*.jpg      without test/, the validation images
        root/predict/**/*.jpg        without predict/, the test images

    The folder names ``training``, ``valid``, ``validation``, ``dev`` and ``testing`` are also accepted, in upper or
    lower case. Links are followed. Training images get a random crop and a random horizontal flip; all other images are
    resized and get a centre crop. Files and directories whose names begin with a dot, and files that are not images,
    are ignored; the start panel shows their number.

    Args:
        root: Directory of the data set.
        image_size: Height and width of the images that the network receives; by default 224. If the network has
            pretrained weights, the command line uses the preprocessing that the weights expect: ``image_size``,
            ``resize``, interpolation, mean and standard deviation. Your own ``image_size`` and ``resize`` have
            priority. In Python, call ``prepare_as`` to use this preprocessing.
        resize: Shorter side of an image before the centre crop, in pixels; by default 8/7 of ``image_size``, which is
            256 for 224.
        augment: Whether training images get a random crop and a random horizontal flip.
        transforms: Additional transforms of training images, applied after the crop to one uint8 (C, H, W) image at a
            time.
        **options: Arguments of :class:`~cnnstrategies.data.folder_module.FolderDataModule`: ``val_split``,
            ``num_workers`` and ``bits``, and those of :class:`~cnnstrategies.data.ImageDataModule`.

    Raises:
        ConfigurationError: The directory does not exist, a split or a class has no images, a split has classes that are
            not in the training images, or ``resize`` is smaller than ``image_size``.
    """

    def __init__(
        self,
        root: Path,
        image_size: int | None = None,
        resize: int | None = None,
        augment: bool = True,
        transforms: Sequence[nn.Module] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        self.augment = augment
        self.transforms = transforms
        self.sizes = image_size, resize
        self.prepare_as(IMAGENET)
        if not self.root.is_dir():
            raise no_directory(self.root)
        self.find()
        self.num_classes = len(self.class_names)

    def find(self) -> None:
        """Find the folders of the splits and the names of the classes."""
        self.folders = part_folders(self.root)
        self.training_root = self.folders.get("train", self.root)
        folders = self._class_folders(self.training_root)
        self.class_names = sorted(folders)
        inside = [name for name in folders.values() if has_training_folder(self.training_root / name)]
        if len(self.class_names) < 2:
            remedy = "put the images of each class into a folder of its own"
            if inside:
                remedy = (
                    f"set data.init_args.root to {self.training_root / inside[0]}, which contains the training images"
                )
            raise ConfigurationError(
                f"{self.training_root.resolve()} contains {len(self.class_names)} class folders, but training needs at "
                f"least 2: {remedy}"
            )
        if len(inside) == len(folders):
            raise ConfigurationError(
                f"each folder in {self.training_root.resolve()} contains a folder for training, so that the splits "
                f"would be mixed: put the splits above the classes, as in train/{inside[0]} and val/{inside[0]}"
            )
        self._check_folders(folders)

    @override
    def prepare_as(self, trained: Preprocessing) -> None:
        self.preprocessing = trained
        image_size, self.resize = trained.sizes(*self.sizes)
        self.image_shape = (3, image_size, image_size)
        self.centre = v2.Compose([v2.Resize(self.resize, trained.mode), v2.CenterCrop(image_size)])
        crop = v2.RandomResizedCrop(image_size, interpolation=trained.mode)
        self.crop = v2.Compose([crop, v2.RandomHorizontalFlip()]) if self.augment else self.centre
        # Images are decoded and cropped one at a time. Whole batches are normalised, because that is faster.
        self.eval_transform = to_normalised(trained.mean, trained.std)
        self.train_transform = nn.Sequential(*each_image(self.transforms, self.image_shape), self.eval_transform)

    @override
    def setup(self, stage: str) -> None:
        parts = self.parts()
        self.places = {"train": str(self.training_root), **{part: str(path) for part, path in self.folders.items()}}
        self.hold_out(parts)
        self.bits = self.bits or bits_of([self.root / name for name in spaced(parts["train"][0])])
        crops = {part: self.crop if part == "train" else self.centre for part in parts}
        self.set_sources(
            {part: FolderSource(self.root, *files, crops[part], self.bits) for part, files in parts.items()}
        )

    def parts(self) -> dict[str, Files]:
        """Return the files and targets of each split that exists, and count the ignored files in ``left_out``."""
        self.left_out = ignored_folders(self.root, self.folders)
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
        walk, folders = Walk(self.root), self._class_folders(directory)
        for target, name in enumerate(self.class_names):
            folder = directory / folders.get(name, name)
            class_files = image_files(folder, self.root, self.left_out, walk)
            names += class_files
            targets += [target] * len(class_files)
        with os.scandir(directory) as entries:
            outside = sum(entry.name.lower().endswith(EXTENSIONS) and entry.name[0] != "." for entry in entries)
        self.left_out["outside of the classes' folders"] += outside
        return names, targets

    def _class_folders(self, directory: Path) -> dict[str, str]:
        """Return the name of each class's folder. Keys are the names of the classes, with composed accents (NFC)."""
        folders: dict[str, str] = {}
        for name in folders_in(directory):
            if directory / name in self.folders.values():
                continue
            if (other := folders.setdefault(unicodedata.normalize("NFC", name), name)) != name:
                raise ConfigurationError(
                    f"{directory} has two folders with the name {readable(name)}, once with composed accents "
                    f"({other!a}) and once with separate ones ({name!a}): move their images into one folder"
                )
        return folders

    def _check_folders(self, training: Mapping[str, str]) -> None:
        """Refuse classes without training images, splits without images, and classes that only other splits have."""
        for name in self.class_names:
            if readable(name) != name:
                raise ConfigurationError(
                    f"{self.training_root / readable(name)}: the name of this folder is not UTF-8; rename the folder"
                )
            if not has_images(folder := self.training_root / training[name]):
                raise ConfigurationError(
                    f"no images of the class {name} in {folder.resolve()}: {FILES_END_IN}; remove the folder if it is "
                    "not a class"
                )
        for part, folder in self.folders.items():
            classes = {} if part == "predict" else self._class_folders(folder)
            if unknown := sorted(set(classes) - set(self.class_names)):
                raise ConfigurationError(
                    f"{folder} contains classes that {self.training_root} does not contain: {', '.join(unknown)}; "
                    "rename or remove these folders"
                )
            class_folders = [folder] if part == "predict" else [folder / name for name in classes.values()]
            if not any(map(has_images, class_folders)):
                layout = "" if part == "predict" else " in a folder for each class"
                raise ConfigurationError(f"no images for {part}{layout} in {folder.resolve()}: {FILES_END_IN}")


class FolderSource:
    """Source of samples from image files. A file is decoded each time its sample is fetched.

    Args:
        root: Directory to which the paths are relative.
        names: Paths of the files, relative to ``root``.
        targets: Class of each image, or a list of numbers for each image.
        transform: Transform of a decoded uint8 (3, H, W) image. The results must have equal shapes.
        bits: Number of bits that images with 16 bits per pixel use; None for 16.
    """

    def __init__(
        self, root: Path, names: Sequence[str], targets: list[Any], transform: Transform, bits: int | None = None
    ) -> None:
        self.root = root
        # The paths are stored in an array, because a list of a million strings would be copied into each forked worker
        # process: Python writes a reference count next to each string, so the memory does not stay shared.
        self.names = np.array([os.fsencode(name) for name in names])
        self.targets = torch.tensor(targets)
        self.transform = transform
        self.bits = bits

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        """Return the path of a sample's file, relative to the root."""
        return readable(os.fsdecode(self.names[index]))

    def fetch(self, indices: list[int]) -> Batch:
        """Decode and transform the images at ``indices``, and return the images (n, C, H, W) and their targets."""
        return torch.stack([self.transform(self._decode(index)) for index in indices]), self.targets[indices]

    def _decode(self, index: int) -> Tensor:
        path = self.root / os.fsdecode(self.names[index])
        return read_image(path, self.bits, REMEDY)


def images_of_folder(datamodule: LightningDataModule | None, folder: Path, left_out: Counter[str] | None = None) -> Any:
    """Return a source of all images in a folder, at any depth, in the order of their paths.

    The images get the same resizing and cropping as the data module's validation images. For segmentation, each image
    is scaled and padded to a square.

    Args:
        datamodule: Data module with which the network was trained. It determines the shape and the preprocessing.
        folder: Folder of the images.
        left_out: Counter to which the numbers of ignored files are added; keys are the reasons.

    Raises:
        ConfigurationError: The data module is not an :class:`ImageDataModule`, the folder has no images, or the masks
            of two images would be written to the same file.
    """
    if not isinstance(datamodule, ImageDataModule):
        raise ConfigurationError(
            f"predictions.images={folder}: {type(datamodule).__name__} does not define the preprocessing of images: "
            "use an ImageDataModule, or load the folder's images in its predict_dataloader"
        )
    files = image_files(folder, folder, Counter() if left_out is None else left_out)
    names = sorted(os.path.normpath(name) for name in files)
    if not names:
        raise ConfigurationError(
            f"predictions.images={folder}: no images found; set a folder that contains images ({FILES_END_IN})"
        )
    if callable(unlabelled := getattr(datamodule, "unlabelled", None)):
        return unlabelled(folder, names)
    channels, height, width = datamodule.image_shape
    if datamodule.ignore_index is not None:
        masks: dict[Path, str] = {}
        for name in names:
            if (other := masks.setdefault(Path(name).with_suffix(""), name)) != name:
                raise ConfigurationError(
                    f"predictions.images={folder}: the masks of {other} and {name} would be written to the same file: "
                    "rename one of the two images"
                )
        pairs = [(folder / name, None) for name in names]
        reader = MaskReader(datamodule.num_classes, datamodule.ignore_index)
        return MaskedSource(folder, pairs, height, reader, augment=False, bits=datamodule.bits)
    grey = [grey_of] if channels == 1 else []
    mode = (datamodule.preprocessing or IMAGENET).mode
    crop = v2.Compose([*grey, v2.Resize(shorter_side(datamodule), mode), v2.CenterCrop([height, width])])
    return FolderSource(folder, names, [0] * len(names), crop, datamodule.bits)


def shorter_side(datamodule: ImageDataModule) -> int:
    """Return the length, in pixels, of an image's shorter side after resizing and before the centre crop."""
    return getattr(datamodule, "resize", None) or max(datamodule.image_shape[1:])


def grey_of(image: Tensor) -> Tensor:
    """Convert a uint8 RGB image (3, H, W) to greyscale (1, H, W), with the weights of ITU-R BT.601.

    torchvision's own conversion rounds down, so images that are already grey would become darker.
    """
    weights = torch.tensor([0.299, 0.587, 0.114]).reshape(3, 1, 1)
    return (image * weights).sum(dim=0, keepdim=True).round().to(torch.uint8)
